"""Round trips through the 8- and 4-bit formats of activations and caches (spec 5.1 to 5.4)."""

from pallas_kernels.quantize.reference import fp8_blocks, mxfp4_blocks, nvfp4_blocks

__all__ = ["fp8_blocks", "mxfp4_blocks", "nvfp4_blocks"]

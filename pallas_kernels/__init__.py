"""Arrays in, arrays out: memory layouts of quantised data and the operations that read them.

Knows no model and no mesh. `layouts` owns what the bytes of a quantised weight mean.
"""

from pallas_kernels.layouts import FORMATS, QuantizedTensor, codes_shape, quantize, scale_shape

__all__ = ["FORMATS", "QuantizedTensor", "codes_shape", "quantize", "scale_shape"]

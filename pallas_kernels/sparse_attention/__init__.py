"""Attention of every row over its window and its selected entries (spec 3.4, 3.9)."""

from pallas_kernels.sparse_attention.reference import sparse_attention

__all__ = ["sparse_attention"]

"""Which compressed entries a query attends: scores, candidate blocks, top-k (spec 3.6 to 3.8)."""

from pallas_kernels.index_select.reference import candidate_blocks, index_scores, top_entries

__all__ = ["candidate_blocks", "index_scores", "top_entries"]

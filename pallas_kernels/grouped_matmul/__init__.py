"""Linears and routed experts over quantised weights (spec 5.6, 7.2, 7.3)."""

from pallas_kernels.grouped_matmul.api import (
    expert_mlp,
    grouped_linear,
    linear,
    routed_experts,
    runs_here,
)
from pallas_kernels.grouped_matmul.reference import Experts

__all__ = ["Experts", "expert_mlp", "grouped_linear", "linear", "routed_experts", "runs_here"]

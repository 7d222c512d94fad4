"""The routed experts of a layer: grouped SwiGLU with the routing weight inside (spec 7.2, 7.3)."""

from pallas_kernels.grouped_matmul.reference import Experts, expert_mlp, routed_experts

__all__ = ["Experts", "expert_mlp", "routed_experts"]

"""Mixture of experts: router with two selection biases, routed experts, one shared expert (spec 7).

The bias decides which experts are chosen and never enters their weights; rows inside an image span
use their own bias.

Letters: T rows, D hidden, X experts, K chosen experts, F expert width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from deepinfer_jax.config import Config, LayerRole
from deepinfer_jax.model.linear import Linear, product
from deepinfer_jax.numerics import Numerics
from pallas_kernels.grouped_matmul import Experts, expert_mlp, routed_experts
from pallas_kernels.quantize import fp8_blocks
from pallas_kernels.rounding import round_to

_SOFTPLUS_LINEAR_ABOVE = 20.0


def route(x, gate, bias, bias_vl, image, *, top_k: int, scale: float, wide):
    """Choose experts and weigh them (spec 7.1).

    Args:
        x: [T, D].
        gate: [X, D].
        bias: float32 [X], for text rows.
        bias_vl: float32 [X], for rows of an image span.
        image: bool [T].
        top_k: K.
        scale: the weights of a row sum to this.
        wide: float32 (float64 in gradient checks).

    Returns:
        Experts int32 [T, K], ascending, and their weights [T, K]. Ties: the lower expert.
    """
    a = product(x, gate, wide)
    soft = jnp.log1p(jnp.exp(jnp.minimum(a, _SOFTPLUS_LINEAR_ABOVE)))
    soft = jnp.where(a > _SOFTPLUS_LINEAR_ABOVE, a, soft)
    # Far below zero it underflows, and the square root has no derivative at 0.
    score = jnp.sqrt(jnp.maximum(soft, jnp.finfo(wide).tiny))
    biased = lax.stop_gradient(score) + jnp.where(image[:, None], bias_vl, bias)
    chosen = jnp.sort(lax.top_k(biased, top_k)[1], axis=1)
    picked = jnp.take_along_axis(score, chosen, axis=1)
    return chosen, picked / (jnp.sum(picked, axis=1, keepdims=True) + 1e-20) * scale


class Gate(nnx.Module):
    """Router weights [X, D] and selection biases [X]."""

    def __init__(self, take):
        self.weight = nnx.Param(take("weight"))
        self.bias = nnx.Param(take("bias"))
        self.bias_vl = nnx.Param(take("bias_vl"))


class ExpertWeights(nnx.Module):
    """w1 (gate), w3 (up) [.., F, D] and w2 (down) [.., D, F]; routed ones have a leading axis X."""

    def __init__(self, take):
        self.w1 = Linear(take / "w1")
        self.w2 = Linear(take / "w2")
        self.w3 = Linear(take / "w3")

    def weights(self) -> Experts:
        """The arrays in the order of the kernel."""
        return Experts(*(w.weight.get_value() for w in (self.w1, self.w3, self.w2)))


class MixtureOfExperts(nnx.Module):
    """Router, routed experts, shared expert."""

    def __init__(self, take):
        self.gate = Gate(take / "gate")
        self.experts = ExpertWeights(take / "experts")
        self.shared_experts = ExpertWeights(take / "shared_experts")

    def route(self, x, image, role: LayerRole, config: Config, wide):
        """See `route`."""
        g = self.gate
        return route(
            x,
            g.weight.get_value(),
            g.bias.get_value(),
            g.bias_vl.get_value(),
            image,
            top_k=role.top_k,
            scale=config.routed_scaling_factor,
            wide=wide,
        )

    def shared(self, x, config: Config, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
        """Row operation: the experts' common input and the shared expert's output, [T, D] each."""
        quantize = numerics.quantize_activations
        x = fp8_blocks(x) if quantize else x
        weights = self.shared_experts.weights()
        return x, expert_mlp(x, None, weights, limit=config.swiglu_limit, quantize=quantize)

    def combine(self, x, common, chosen, weight, valid, config: Config, numerics: Numerics):
        """Routed plus shared experts, rounded once (spec 7.2).

        Args:
            x: [T, D], from `shared`.
            common: [T, D], from `shared`.
            chosen: int32 [T, K], ascending.
            weight: [T, K].
            valid: bool [T].
            config: the model's.
            numerics: the model's.

        Returns:
            [T, D].
        """
        routed = routed_experts(
            x,
            chosen,
            weight,
            valid,
            self.experts.weights(),
            limit=config.swiglu_limit,
            quantize=numerics.quantize_activations,
            tile=numerics.tile,
        )
        return round_to(routed + common.astype(routed.dtype), numerics.activation)

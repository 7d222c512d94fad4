"""One layer: Engram, attention and experts, each reading and writing the M streams (spec 2.2, 2.3).

The mix that a sublayer computes is used by the next one to read the streams, so `premix` travels
with them from layer to layer. Stages that need only their own row run through `over_rows`; between
them the cache is written.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from deepinfer_jax.cache import Cache
from deepinfer_jax.config import Config, LayerRole
from deepinfer_jax.model.attention import Attention, Choice
from deepinfer_jax.model.engram import Engram
from deepinfer_jax.model.experts import MixtureOfExperts
from deepinfer_jax.model.hyper_connections import Mixes, collapse, expand, mixes, stream_mean
from deepinfer_jax.model.norms import RMSNorm
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.rows import Rows, over_rows


class Residual(NamedTuple):
    """The state between layers."""

    streams: jax.Array  # [T, M, D]
    premix: jax.Array  # [T, M] wide, how the next sublayer reads the streams


def initial_state(embeddings: jax.Array, config: Config, numerics: Numerics) -> Residual:
    """M equal streams, of which the first sublayer reads the first (spec 2.2): [T, D]."""
    streams = jnp.repeat(embeddings.astype(numerics.activation)[:, None], config.hc_mult, axis=1)
    first = jnp.zeros((streams.shape[0], config.hc_mult), numerics.wide).at[:, 0].set(1)
    return Residual(streams, first)


class Block(nnx.Module):
    """Weights of layer `role.index`, under their released names."""

    def __init__(self, take, role: LayerRole):
        self.attn = Attention(take / "attn", role)
        self.ffn = MixtureOfExperts(take / "ffn")
        self.attn_norm = RMSNorm(take / "attn_norm")
        self.ffn_norm = RMSNorm(take / "ffn_norm")
        for half in ("attn", "ffn"):
            for kind in ("fn", "base", "scale"):
                name = f"hc_{half}_{kind}"
                setattr(self, name, nnx.Param(take(name)))
        self.engram = Engram(take / "engram") if role.engram is not None else None

    def mixes(self, half: str, streams, config: Config, wide) -> Mixes:
        """Coefficients of the "attn" or "ffn" half."""
        fn, base, scale = (
            getattr(self, f"hc_{half}_{kind}").get_value() for kind in ("fn", "base", "scale")
        )
        return mixes(streams, fn, base, scale, config, wide)

    def __call__(
        self,
        state: Residual,
        choice: Choice,
        rows: Rows,
        live: jax.Array,
        cache: Cache,
        hashed: jax.Array | None,
        role: LayerRole,
        config: Config,
        numerics: Numerics,
        show: frozenset[str],
    ) -> tuple[Residual, Choice, Cache, dict[str, Any]]:
        """Run the layer on rows.

        Args:
            state: streams and premix entering the layer.
            choice: decisions of the last index source before this layer.
            rows: the rows, T of them.
            live: int32 [], rows up to the last valid one.
            cache: read and written.
            hashed: int32 [T, columns], this layer's Engram rows, if it has an Engram.
            role: what the layer does.
            config: the model's.
            numerics: the model's.
            show: names of `transformer.CAPTURES`.

        Returns:
            The state after the layer, the choice in force, the cache, captured arrays.
        """
        wide, eps, tile = numerics.wide, config.rms_norm_eps, numerics.tile
        # Sharing keys within a group changes shapes with the number of rows.
        group = 1 if numerics.reproducible else rows.group
        until = rows.position if rows.until is None else rows.until
        asked = role.draft_target and "draft" in show

        def run(function, *inputs):
            return over_rows(function, *inputs, tile=tile, live=live)

        def read(state, position, image, hashed):
            streams, premix = state
            if self.engram is not None:
                with jax.named_scope("engram"):
                    streams = self.engram(streams, hashed, image, config, numerics)
            mix = self.mixes("attn", streams, config, wide)
            x = self.attn_norm(collapse(streams, premix), eps, wide)
            feature = stream_mean(streams, wide) if asked else None
            return streams, mix, self.attn.project(x, position, role, config, numerics), feature

        def answer(streams, mix, projected, choice, slot, position, until, image):
            seen = {}
            with jax.named_scope("attention"):
                if projected.index is not None:
                    choice, shown = self.attn.choose(
                        projected.index, slot, position, choice.candidates, cache, role, config,
                        numerics, group,
                    )  # fmt: skip
                    seen |= {k: v for k, v in shown.items() if _CHOICE_CAPTURES[k] in show}
                output, weights = self.attn.attend(
                    projected.queries, slot, position, until,
                    choice.selected if role.ratio else None, cache, role, config, numerics, group,
                    "weights" in show,
                )  # fmt: skip
            streams = expand(streams, output, mix)
            after = self.mixes("ffn", streams, config, wide)
            x = self.ffn_norm(collapse(streams, mix.pre), eps, wide)
            with jax.named_scope("router"):
                routed = self.ffn.route(x, image, role, config, wide)
            with jax.named_scope("shared_expert"):
                x, common = self.ffn.shared(x, config, numerics)
            if "attention" in show:
                seen["attn_out"] = output
            if "weights" in show:
                seen["attn_weights"] = weights
            return streams, after, choice, x, common, routed, seen

        with jax.named_scope(f"layer_{role.index}"):
            streams, mix, projected, feature = run(
                read, state, rows.position, rows.image, hashed
            )
            with jax.named_scope("remember"):
                cache = self.attn.remember(projected, rows, live, cache, role, config, numerics)
            seen = {"engram_out": streams} if self.engram and "engram" in show else {}
            streams, after, choice, x, common, (experts, share), shown = run(
                answer, streams, mix, projected, choice, rows.slot, rows.position, until, rows.image
            )
            with jax.named_scope("experts"):
                y = self.ffn.combine(x, common, experts, share, rows.valid, config, numerics)
            result = Residual(run(expand, streams, y, after), after.pre)

        seen |= shown
        if asked:
            seen["feature"] = feature
        if "ffn" in show:
            seen["ffn_out"] = y
        if "router" in show:
            seen |= {"router_idx": experts, "router_w": share}
        if "mixes" in show:
            for half, m in (("attn", mix), ("ffn", after)):
                for kind, value in m._asdict().items():
                    seen[f"{half}_mix.{role.index}.{kind}"] = value
        return result, choice, cache, seen


_CHOICE_CAPTURES = {
    "index_scores": "scores",
    "block_scores": "scores",
    "topk": "selection",
    "candidates": "selection",
}

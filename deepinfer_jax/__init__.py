"""DeepSeek-V4.1-Flash in JAX: exact, reproducible, and one XLA program from prompt to text."""

from deepinfer_jax.cache import Cache, bytes_per_slot, bytes_per_token, init_cache
from deepinfer_jax.config import Config
from deepinfer_jax.decoding.generate import Generation, generate, stream
from deepinfer_jax.decoding.loop import Finish
from deepinfer_jax.decoding.measuring import measure_step_times
from deepinfer_jax.decoding.sampling import Sampling, SamplingParams
from deepinfer_jax.decoding.schedule import StepTimes
from deepinfer_jax.decoding.stats import Report, Stats
from deepinfer_jax.forward import Forward, forward
from deepinfer_jax.layout import to_layout
from deepinfer_jax.llm import LLM, Completion
from deepinfer_jax.loading import load, load_tokenizer
from deepinfer_jax.model.transformer import CAPTURES, Transformer, logits, step
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parameter_counts import parameter_counts
from deepinfer_jax.rows import Rows, rectangle
from deepinfer_jax.trainable import combine, quantize, trainable

__version__ = "0.1.0"

__all__ = [
    "CAPTURES",
    "Cache",
    "Completion",
    "Config",
    "Finish",
    "Forward",
    "Generation",
    "LLM",
    "Numerics",
    "Report",
    "Rows",
    "Sampling",
    "SamplingParams",
    "Stats",
    "StepTimes",
    "Transformer",
    "bytes_per_slot",
    "bytes_per_token",
    "combine",
    "forward",
    "generate",
    "init_cache",
    "load",
    "load_tokenizer",
    "logits",
    "measure_step_times",
    "parameter_counts",
    "quantize",
    "rectangle",
    "step",
    "stream",
    "to_layout",
    "trainable",
]

"""`deepinfer-jax`: text from a checkpoint, and what a checkpoint takes.

Text goes to stdout as it comes, everything else to stderr. What the user can put right ends in one
sentence and exit code 2, without a traceback.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deepinfer_jax.cache import bytes_per_slot, bytes_per_token
from deepinfer_jax.config import Config
from deepinfer_jax.decoding.sampling import SamplingParams
from deepinfer_jax.llm import LLM
from deepinfer_jax.loading import EMBEDDED, folder_of
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parameter_counts import parameter_counts

_BURST = 4
_RELEASED = "flash"

_EXAMPLES = """\
examples:
  deepinfer-jax generate "def fibonacci(n):"
  deepinfer-jax generate "The following table" --temperature 0 --max-tokens 32
  deepinfer-jax generate "import" --seed 7 --stop $'\\n\\n'
  deepinfer-jax info tiny
  deepinfer-jax info flash
  deepinfer-jax info path/to/checkpoint
"""

_GENERATE_NOTES = """\
The prompt is printed too. The last line, on stderr, has the time to load the checkpoint, to compile
(a first pass over the prompt with its first tokens, which are thrown away), and to generate: the
prompt and all tokens, once more. Tokens per second are new tokens over the last of these times.
The same command prints the same text.

examples:
  deepinfer-jax generate "def fibonacci(n):"
  deepinfer-jax generate "The following table" --temperature 0 --max-tokens 32
  deepinfer-jax generate "import" --seed 7 --stop $'\\n\\n'
"""

_INFO_NOTES = """\
Only config.json is needed. Caches are counted in their packed storage. "flash" is the configuration
of the released DeepSeek-V4.1-Flash.

examples:
  deepinfer-jax info tiny
  deepinfer-jax info path/to/checkpoint
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; None takes that of the process. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, FloatingPointError) as error:
        print(f"deepinfer-jax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer-jax",
        description="DeepSeek-V4.1-Flash in JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run, summary: str, notes: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=notes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=run)
        return sub

    text = command("generate", _generate, "continue a text", _GENERATE_NOTES)
    text.add_argument("prompt", metavar="PROMPT", help="the beginning of the text")
    text.add_argument("--model", default="tiny", help="tiny, or a checkpoint folder (tiny)")
    text.add_argument("--max-tokens", type=int, default=64, help="most new tokens (64)")
    text.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token (0.7)"
    )
    text.add_argument("--top-p", type=float, default=0.95, help="in (0, 1], 1 is off (0.95)")
    text.add_argument("--top-k", type=int, default=-1, help="-1 is off (-1)")
    text.add_argument("--seed", type=int, default=0, help="decides the text (0)")
    text.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given more than once",
    )  # fmt: skip
    text.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="of activations (bfloat16)",
    )  # fmt: skip

    sizes = command("info", _info, "count parameters and bytes of a checkpoint", _INFO_NOTES)
    sizes.add_argument("path", metavar="PATH", help="tiny, flash, or a folder with config.json")
    return parser


def _generate(options: argparse.Namespace) -> None:
    if "" in options.stop:
        raise ValueError("--stop must not be empty: every text begins with nothing")
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    began = time.perf_counter()
    llm = LLM(options.model, numerics=Numerics(dtype=options.dtype))
    loaded = time.perf_counter()
    trial = llm.stream(options.prompt, params, burst=_BURST)
    next(trial)
    trial.close()
    compiled = time.perf_counter()
    print(options.prompt, end="", flush=True)
    shown = 0
    for so_far in llm.stream(options.prompt, params, burst=_BURST):
        text, stopped = _until(so_far.text, options.stop, so_far.finish_reason is not None)
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if stopped:
            break
    done = time.perf_counter()
    print(flush=True)
    count = len(so_far.token_ids)
    print(
        f"load {loaded - began:.1f} s, compile {compiled - loaded:.1f} s, "
        f"generate {done - compiled:.1f} s: {count} tokens, "
        f"{count / (done - compiled):.1f} tokens/s",
        file=sys.stderr,
    )


def _until(text: str, stops: Sequence[str], ended: bool) -> tuple[str, bool]:
    """The text before the first stop, and whether there is one.

    While the text grows, an end that may be the beginning of a stop is kept back.
    """
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)], True
    if ended:
        return text, False
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(begun, default=0)], False


def _info(options: argparse.Namespace) -> None:
    config, stored = _config_and_size(options.path)
    counts = parameter_counts(config)
    print(
        f"{options.path}: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.n_routed_experts} experts of which a token uses {config.num_experts_per_tok}, "
        f"{config.vocab_size} token ids, {config.max_position_embeddings} positions"
    )
    tables = {
        "parameters": {
            "backbone": counts.backbone,
            "Engram tables": counts.engram_tables,
            "drafter": counts.drafter,
            "total": counts.total,
            "active, prompt token": counts.active_input,
            "active, new token": counts.active_output,
        },
        "bytes": {
            "tensors": counts.nbytes,
            "weight files here": stored,
            "cache, each token": bytes_per_token(config),
            "cache, each sequence": bytes_per_slot(config),
        },
    }
    for title, table in tables.items():
        print(f"\n{title}")
        for name, size in table.items():
            print(f"  {name:21s}{size:>20,.16g}")


def _config_and_size(path: str) -> tuple[Config, int]:
    """The configuration, and the bytes of the weight files beside it."""
    if path == _RELEASED:
        return Config.flash(), 0
    folder = folder_of(path) if path in EMBEDDED else Path(path)
    if not folder.exists():
        raise FileNotFoundError(
            f"{path} does not exist: give {', '.join(EMBEDDED)}, {_RELEASED}, or a folder with "
            "config.json"
        )
    return Config.read(folder), sum(f.stat().st_size for f in folder.glob("*.safetensors"))


if __name__ == "__main__":
    sys.exit(main())

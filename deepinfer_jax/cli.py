"""`deepinfer-jax`: text from a checkpoint, what a checkpoint takes, and how long its steps take.

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
from deepinfer_jax.decoding.measuring import measure_step_times
from deepinfer_jax.decoding.request import DRAFTS
from deepinfer_jax.decoding.sampling import SamplingParams
from deepinfer_jax.llm import LLM
from deepinfer_jax.loading import EMBEDDED, folder_of, load
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.parameter_counts import parameter_counts

_BURST = 4
_RELEASED = "flash"
_NO_DRAFT = "none"

# Options of `generate` that are fields of `SamplingParams`: default and help.
_SAMPLING = {
    "max_tokens": (64, "most new tokens"),
    "min_tokens": (0, "fewest new tokens"),
    "temperature": (0.7, "0 takes the likeliest token"),
    "top_p": (0.95, "in (0, 1], 1 is off"),
    "top_k": (-1, "-1 is off"),
    "min_p": (0.0, "in [0, 1], 0 is off"),
    "repetition_penalty": (1.0, "above 0, 1 is off"),
    "presence_penalty": (0.0, "in [-2, 2], 0 is off"),
    "frequency_penalty": (0.0, "in [-2, 2], 0 is off"),
    "seed": (0, "decides the text"),
}

_EXAMPLES = """\
examples:
  deepinfer-jax generate "def fibonacci(n):"
  deepinfer-jax generate "The following table" --temperature 0 --max-tokens 32
  deepinfer-jax generate "import" --seed 7 --stop $'\\n\\n'
  deepinfer-jax info tiny
  deepinfer-jax info flash
  deepinfer-jax info path/to/checkpoint
  deepinfer-jax measure --batch 8 --context 512 --out times.json
"""

_GENERATE_NOTES = """\
The prompt is printed too. The last line, on stderr, has the time to load the checkpoint, to compile
(a first pass over the prompt with its first tokens, which are thrown away), and to generate: the
prompt and all tokens, once more. Tokens per second are new tokens over the last of these times.
The same command prints the same text; on a CPU, drafts change its speed only. A step of the model
gives one token, or with drafts several.

examples:
  deepinfer-jax generate "def fibonacci(n):"
  deepinfer-jax generate "The following table" --temperature 0 --max-tokens 32
  deepinfer-jax generate "import" --seed 7 --stop $'\\n\\n'
  deepinfer-jax generate "def fibonacci(n):" --draft scheduled --repetition-penalty 1.1
"""

_INFO_NOTES = """\
Only config.json is needed. Caches are counted in their packed storage. "flash" is the configuration
of the released DeepSeek-V4.1-Flash.

examples:
  deepinfer-jax info tiny
  deepinfer-jax info path/to/checkpoint
"""

_MEASURE_NOTES = """\
A step drafts, runs the rows of all sequences and chooses tokens; more drafts are more rows. The
file is what `generate --draft scheduled --step-times FILE` decides by.

examples:
  deepinfer-jax measure --out times.json
  deepinfer-jax measure --model path/to/checkpoint --batch 8 --context 512 --out times.json
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

    model = dict(default="tiny", help="tiny, or a checkpoint folder (tiny)")
    dtype = dict(choices=("bfloat16", "float32"), default="bfloat16",
                 help="of activations (bfloat16)")  # fmt: skip

    text = command("generate", _generate, "continue a text", _GENERATE_NOTES)
    text.add_argument("prompt", metavar="PROMPT", help="the beginning of the text")
    text.add_argument("--model", **model)
    for name, (default, meaning) in _SAMPLING.items():
        text.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="N",
            help=f"{meaning} ({default})",
        )  # fmt: skip
    text.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given more than once",
    )  # fmt: skip
    text.add_argument(
        "--draft", choices=[name or _NO_DRAFT for name in DRAFTS], default=_NO_DRAFT,
        help=f"how to draft tokens ({_NO_DRAFT})",
    )  # fmt: skip
    text.add_argument(
        "--step-times", metavar="FILE", help="of `measure`, for --draft scheduled (a guess)"
    )
    text.add_argument("--dtype", **dtype)

    sizes = command("info", _info, "count parameters and bytes of a checkpoint", _INFO_NOTES)
    sizes.add_argument("path", metavar="PATH", help="tiny, flash, or a folder with config.json")

    times = command("measure", _measure, "time steps for a schedule of drafts", _MEASURE_NOTES)
    times.add_argument("--model", **model)
    times.add_argument("--batch", type=int, default=1, metavar="N", help="sequences together (1)")
    times.add_argument("--context", type=int, default=256, metavar="N", help="tokens of each (256)")
    times.add_argument("--out", required=True, metavar="FILE", help="what to write")
    times.add_argument("--dtype", **dtype)
    return parser


def _generate(options: argparse.Namespace) -> None:
    if "" in options.stop:
        raise ValueError("--stop must not be empty: every text begins with nothing")
    params = SamplingParams(**{name: getattr(options, name) for name in _SAMPLING})
    draft = None if options.draft == _NO_DRAFT else options.draft
    began = time.perf_counter()
    llm = LLM(
        options.model, numerics=Numerics(dtype=options.dtype), draft=draft,
        step_times=options.step_times,
    )  # fmt: skip
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
    per_step = "" if draft is None else f", {count / so_far.steps:.2f} tokens/step"
    print(
        f"load {loaded - began:.1f} s, compile {compiled - loaded:.1f} s, "
        f"generate {done - compiled:.1f} s: {count} tokens, "
        f"{count / (done - compiled):.1f} tokens/s{per_step}",
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


def _measure(options: argparse.Namespace) -> None:
    folder = Path(options.out).parent
    if not folder.is_dir():  # said before the work, not after it
        raise FileNotFoundError(f"--out: there is no folder {folder}")
    model = load(options.model, numerics=Numerics(dtype=options.dtype))
    times = measure_step_times(model, options.batch, options.context)
    times.save(options.out)
    print("rows  milliseconds")
    for rows, seconds in zip(times.rows.tolist(), times.seconds.tolist(), strict=True):
        print(f"{rows:4d}{1e3 * seconds:14.3f}")


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

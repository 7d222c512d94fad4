"""The command line: text on stdout, the rest on stderr, errors in one sentence."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CACHE
from test_llm import small_config

import deepinfer_jax as di
from deepinfer_jax import cli, testing

ROOT = Path(__file__).parent.parent
STATS = re.compile(
    r"load \d+\.\d s, compile \d+\.\d s, generate \d+\.\d s: (\d+) tokens, \d+\.\d tokens/s"
    r"(?:, (\d+\.\d\d) tokens/step)?\n"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    testing.write_checkpoint(folder, small_config(), seed=5)
    return folder


def run(*arguments) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_jax.cli", *map(str, arguments)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)},
    )


HOT = ("--temperature", "30", "--max-tokens", "16", "--seed", "3")


@pytest.fixture(scope="module")
def expected(checkpoint) -> str:
    """What `LLM` writes for the same request."""
    params = di.SamplingParams(temperature=30, top_p=0.95, max_tokens=16, seed=3)
    *_, completion = di.LLM(checkpoint).stream("abc", params)
    assert len(completion.token_ids) == 16 and len(completion.text) > 8
    return completion.text


def test_generate_writes_text_to_stdout_and_times_to_stderr(checkpoint, expected):
    done = run("generate", "abc", "--model", checkpoint, *HOT)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == f"abc{expected}\n"
    assert STATS.fullmatch(done.stderr.decode()).groups() == ("16", None)


def test_drafts_give_the_same_text_in_fewer_steps(checkpoint, expected, tmp_path, capsys):
    times = tmp_path / "times.json"
    di.StepTimes.of([8, 16], [1.0, 1.1]).save(times)
    drafts = ["--draft", "scheduled", "--step-times", str(times)]
    assert cli.main(["generate", "abc", "--model", str(checkpoint), *HOT, *drafts]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"abc{expected}\n"
    tokens, per_step = STATS.fullmatch(shown.err).groups()
    # Drafter and model share the noise, which decides nearly alone at this temperature.
    assert tokens == "16" and float(per_step) > 1.5


class Pieces(list):
    """A stdout that remembers what was written and whether it was flushed."""

    def write(self, text):
        self.append(text)
        self.flushed = False

    def flush(self):
        self.flushed = True


def test_text_comes_piece_by_piece(checkpoint, expected, monkeypatch):
    pieces = Pieces()
    seen = []
    stream = di.LLM.stream

    def watched(*arguments, **rest):
        for part in stream(*arguments, **rest):
            seen.append(("".join(pieces), pieces == [] or pieces.flushed))
            yield part

    monkeypatch.setattr(sys, "stdout", pieces)
    monkeypatch.setattr(di.LLM, "stream", watched)
    assert cli.main(["generate", "abc", "--model", str(checkpoint), *HOT]) == 0
    assert "".join(pieces) == f"abc{expected}\n"
    # A trial for compilation, then what had been written before each of four bursts.
    assert len(seen) == 5 and all(flushed for _, flushed in seen)
    texts = [text for text, _ in seen]
    assert texts[:2] == ["", "abc"] and sorted(set(texts), key=len) == texts


def test_stop_text_ends_the_output_before_it(checkpoint, expected, capsys):
    stop = expected[5:8]
    before = expected[: expected.index(stop)]
    arguments = ["generate", "abc", "--model", str(checkpoint), *HOT, "--stop", "\x01\x02\x03"]
    assert cli.main([*arguments, "--stop", stop]) == 0
    assert capsys.readouterr().out == f"abc{before}\n"


@pytest.mark.parametrize(
    ("text", "stops", "ended", "shown"),
    [
        ("one two", [], False, ("one two", False)),
        ("one two", ["tw"], False, ("one ", True)),
        ("one two", ["o ", "ne"], False, ("o", True)),
        ("one tw", ["two"], False, ("one ", False)),
        ("one tw", ["two"], True, ("one tw", False)),
        ("a\n", ["\n\n"], False, ("a", False)),
        ("aab", ["abaa", "b!"], False, ("a", False)),
    ],
)
def test_what_may_be_a_stop_is_kept_back(text, stops, ended, shown):
    assert cli._until(text, stops, ended) == shown


def test_options_reach_the_sampler(monkeypatch, capsys):
    class Fake:
        def __init__(self, model, numerics, draft, step_times):
            self.made = model, numerics.dtype, draft, step_times

        def stream(self, prompt, params, burst):
            asked.append((*self.made, prompt, params))
            yield di.Completion(
                prompt, " there", [5, 6, 7], [0.0] * 3, [0.0] * 3, None, None, "stop", 8, 0, steps=2
            )

    asked = []
    monkeypatch.setattr(cli, "LLM", Fake)
    values = dict(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125,
        repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.75, seed=8,
    )  # fmt: skip
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    options += "--model m --dtype float32 --draft fixed --step-times t".split()
    assert cli.main(["generate", "hi", *options]) == 0
    assert asked == [("m", "float32", "fixed", "t", "hi", di.SamplingParams(**values))] * 2
    shown = capsys.readouterr()
    assert shown.out == "hi there\n" and STATS.fullmatch(shown.err).groups() == ("3", "1.50")

    assert cli.main(["generate", "hi"]) == 0
    usual = di.SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95, seed=0)
    assert asked[2:] == [("tiny", "bfloat16", None, None, "hi", usual)] * 2
    assert STATS.fullmatch(capsys.readouterr().err).groups() == ("3", None)


def test_measure_prints_and_writes_step_times(checkpoint, tmp_path, monkeypatch, capsys):
    def measured(model, batch, context):
        asked.append((model.numerics.dtype, model.config, batch, context))
        return di.StepTimes.of([8, 16], [0.25, 0.5])

    asked = []
    monkeypatch.setattr(cli, "measure_step_times", measured)
    out = tmp_path / "times.json"
    options = ["--model", str(checkpoint), "--dtype", "float32", "--out", str(out)]
    assert cli.main(["measure", *options, "--batch", "3", "--context", "40"]) == 0
    assert asked == [("float32", small_config(), 3, 40)]
    assert di.StepTimes.load(out).seconds.tolist() == [0.25, 0.5]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table == [["rows", "milliseconds"], ["8", "250.000"], ["16", "500.000"]]


def numbers(text: str) -> dict[str, str]:
    """The rows of `info`."""
    rows = (re.fullmatch(r"  (\S.*?)  +([\d,.]+)", line) for line in text.splitlines())
    return {row[1]: row[2] for row in rows if row}


def test_info_of_the_embedded_checkpoint(capsys):
    assert cli.main(["info", "tiny"]) == 0
    shown = numbers(capsys.readouterr().out)
    weights = ROOT / "deepinfer_jax" / "assets" / "tiny" / "model.safetensors"
    counts = di.parameter_counts(di.load("tiny").config)
    assert shown == {
        "backbone": f"{counts.backbone:,}",
        "Engram tables": f"{counts.engram_tables:,}",
        "drafter": f"{counts.drafter:,}",
        "total": "10,572,536",
        "active, prompt token": f"{counts.active_input:,}",
        "active, new token": f"{counts.active_output:,}",
        "tensors": f"{counts.nbytes:,}",
        "weight files here": f"{weights.stat().st_size:,}",
        # Ratio 2 and ratio 1 sources; entries of 64 in 4 bits with a scale for 16, keys for 32.
        "cache, each token": f"{1.5 * (64 / 2 + 64 / 16 + 64 / 2 + 64 / 32):.0f}",
        "cache, each sequence": f"{di.bytes_per_slot(di.load('tiny').config):,}",
    }


@pytest.mark.parametrize("by_folder", [False, True])
def test_info_needs_only_a_configuration(tmp_path, capsys, by_folder):
    (tmp_path / "config.json").write_text(json.dumps(di.Config.flash().to_hf()))
    assert cli.main(["info", str(tmp_path) if by_folder else "flash"]) == 0
    shown = numbers(capsys.readouterr().out)
    assert shown["backbone"].startswith("552,") and shown["Engram tables"].startswith("196,")
    assert shown["weight files here"] == "0" and shown["cache, each token"] == "890"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("info nowhere", "nowhere does not exist: give tiny, flash, or a folder with config.json"),
        ("info tests", "no config.json at tests/config.json: give a checkpoint directory"),
        ("generate x --model nowhere", "nowhere is neither a checkpoint folder nor an embedded"),
        ("generate x --top-p 1.2", "top_p must be in (0, 1], got 1.2"),
        ("generate x --temperature -1", "temperature must be a finite float32 number of at least"),
        ("generate x --max-tokens 0", "max_tokens must be at least 1, got 0"),
        ("generate x --seed -1", "seed must be in [0, 2**32), got -1"),
        ("generate x --min-tokens 65", "min_tokens must be from 0 to max_tokens = 64, got 65"),
        ("generate x --min-p 2", "min_p must be in [0, 1], got 2.0"),
        ("generate x --step-times t", "step_times means nothing without drafts: give draft"),
        ("generate x --draft scheduled --step-times t", "no step times at t: write some with"),
        ("measure --out nowhere/t.json", "--out: there is no folder nowhere"),
        ("measure --out t.json --batch 0", "batch must be at least 1, got 0"),
        ("measure --out t.json --context 9000", "context must be at most "),
        ("generate x --max-tokens 9000", "prompt 0 has 2 tokens and asks for up to 9000 more"),
    ],
)
def test_errors_are_a_sentence_and_exit_code_two(arguments, sentence, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith(f"deepinfer-jax: error: {sentence}")


@pytest.mark.parametrize("arguments", [["generate", ""], ["generate", "x", "--stop", ""]])
def test_empty_texts_are_refused(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "empty" in capsys.readouterr().err


def test_broken_files_are_an_error_without_a_traceback(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = run("info", tmp_path)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"deepinfer-jax: error: ") and b"is not valid JSON" in done.stderr
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    done = run("generate", "x", "--model", tmp_path)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"deepinfer-jax: error: ") and b"Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["generate"], ["info"], ["measure"]])
def test_help_has_examples_that_parse(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--help"])
    assert ended.value.code == 0
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)
        assert words[0] == "deepinfer-jax"
        command = cli._parser().parse_args(words[1:]).command
        assert command in (cli._generate, cli._info, cli._measure)


def test_no_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2 and "COMMAND" in capsys.readouterr().err

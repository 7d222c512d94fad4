"""`LLM` adds batching and text to `generate`, and nothing to what it says."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import llm as llm_module
from deepinfer_jax import testing
from deepinfer_jax.config import RopeScaling
from deepinfer_jax.decoding.loop import Alternatives
from deepinfer_jax.model.engram_tables import token_map

BOS, EOS, PAD = 0, 1, 2
ROOM = 64


def small_config() -> di.Config:
    """Two layers and a drafter of one over single bytes: little to compile."""
    return testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(0, 1),
        dspark_block_size=3,
        compress_ratios=(2, 2, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=-1,
        engram_layer_ids=(1,),
        max_position_embeddings=ROOM,
        rope_scaling=RopeScaling(original_max_position_embeddings=32),
    )


def small_llm(change_head=lambda head: head, **given) -> di.LLM:
    config = small_config()
    random = testing.random_weights(config, 5)

    def take(path):
        return change_head(random(path)) if path == "head.weight" else random(path)

    ids = token_map(testing.byte_tokenizer())
    model = di.Transformer(config, di.Numerics(), take, ids)
    return di.LLM(model, testing.byte_tokenizer(), max_batch=4, **given)


@pytest.fixture(scope="module")
def llm():
    return small_llm()


@pytest.fixture(scope="module", params=["fixed", "scheduled"])
def drafting(request):
    return small_llm(draft=request.param)


def hot(**fields) -> di.SamplingParams:
    """Nearly uniform over all tokens, so that texts differ and hold broken characters."""
    given = dict(temperature=30, max_tokens=12, ignore_eos=True, seed=3)
    return di.SamplingParams(**given | fields)


GREEDY = hot(temperature=0)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, progress=False)


def alone(llm, prompt, params):
    """What the `generate` function says to this prompt, in the shapes that `llm` gives to four."""
    ids = llm.encode(prompt)
    tokens = np.full((4, 16), PAD, np.int32)
    tokens[:, : len(ids)] = ids
    biases = {**(params.logit_bias or {}), **{t: -math.inf for t in params.banned_token_ids}}
    biases |= {-1 - i: 0.0 for i in range(8 - len(biases))}
    result = di.generate(
        llm.model,
        tokens,
        np.full(4, len(ids)),
        seeds=np.uint32(params.seed),
        max_new_tokens=16,
        limits=params.max_tokens,
        min_new_tokens=params.min_tokens,
        sampling=params.row(),
        logit_bias=([max(t, -1) for t in biases], list(biases.values())),
        forced=params.forced_token_ids,
        stop_ids=params.stop_token_ids,
        ignore_eos=True,
    )
    count = int(result.lengths[0])
    return [
        np.asarray(array)[0, :count].tolist()
        for array in (result.tokens, result.logprobs, result.processed_logprobs)
    ]


def parts(completion):
    """What of a completion must not depend on anything but its request."""
    return completion.token_ids, completion.logprobs, completion.processed_logprobs


def test_each_prompt_gets_what_it_gets_alone(llm):
    prompts = ["first", "a", "somewhat longer", "zz", "the fifth"]
    params = [
        hot(temperature=t, max_tokens=n, seed=s, top_k=k, top_p=p)
        for t, n, s, k, p in [
            (0, 9, 1, -1, 1.0), (2, 12, 2, -1, 0.8), (1, 1, 3, 5, 1.0), (5, 16, 4, -1, 1.0),
            (3, 7, 5, 9, 0.9),
        ]
    ]  # fmt: skip
    completions = generate(llm, prompts, params)
    assert [c.prompt for c in completions] == prompts
    for completion, prompt, param in zip(completions, prompts, params, strict=True):
        assert list(parts(completion)) == alone(llm, prompt, param)
        assert len(completion.token_ids) == completion.steps == param.max_tokens
        assert completion.finish_reason == "length" and completion.seed == param.seed
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert len({tuple(c.token_ids) for c in completions}) == len(prompts)


# Six tokens far ahead of all others.
SIX = tuple(range(70, 76))
AHEAD = dict(logit_bias=dict.fromkeys(SIX, 100.0))
# Changes to a request, and to the request that it is compared with.
FIELDS = {
    "temperature": (dict(temperature=0.01), {}),
    "top_p": (dict(top_p=0.05), {}),
    "top_k": (dict(top_k=3), {}),
    "min_p": (dict(min_p=0.9), {}),
    "repetition_penalty": (dict(repetition_penalty=1.5), AHEAD),
    "presence_penalty": (dict(presence_penalty=2.0), AHEAD),
    "frequency_penalty": (dict(frequency_penalty=-2.0), AHEAD),
    "logit_bias": (dict(logit_bias={9: 100.0}), {}),
    "banned_token_ids": (dict(banned_token_ids=SIX[:4]), AHEAD),
    "forced_token_ids": (dict(forced_token_ids=(-1, 9, 9)), {}),
    "stop_token_ids": (dict(stop_token_ids=SIX[:2]), AHEAD),
    "min_tokens": (dict(min_tokens=7), AHEAD | dict(stop_token_ids=SIX)),
    "max_tokens": (dict(max_tokens=5), {}),
    "seed": (dict(seed=4), {}),
}


def requests_for_every_field():
    """Each field given, and the same requests without it."""
    common = dict(temperature=1.0)
    given = [hot(**common | base | change) for change, base in FIELDS.values()]
    return given, [hot(**common | base) for _, base in FIELDS.values()]


def test_every_field_of_the_params_reaches_the_program_and_no_neighbour(llm):
    given, without = requests_for_every_field()
    completions = generate(llm, ["field"] * 2 * len(given), given + without)
    found = dict(zip(FIELDS, completions[: len(given)], strict=True))
    bases = dict(zip(FIELDS, completions[len(given) :], strict=True))
    for name, request in zip(FIELDS, given, strict=True):
        assert list(parts(found[name])) == alone(llm, "field", request), name
        assert found[name].token_ids != bases[name].token_ids, name

    distinct = [len(set(c["presence_penalty"].token_ids[:6])) for c in (bases, found)]
    assert distinct[0] < distinct[1]
    assert set(found["logit_bias"].token_ids) == {9}
    assert set(found["banned_token_ids"].token_ids) == set(SIX[4:])
    assert found["forced_token_ids"].token_ids[1:3] == [9, 9]
    assert found["stop_token_ids"].finish_reason == "stop"
    assert found["stop_token_ids"].token_ids[-1] in SIX[:2]
    *early, last = found["min_tokens"].token_ids
    assert len(early) == 7 and not set(early) & set(SIX) and last in SIX
    assert len(found["max_tokens"].token_ids) == 5


def test_samples_differ_and_the_first_is_the_only_one(llm):
    prompts = ["one", "four"]
    samples = generate(llm, prompts, hot(n=4))
    assert [(c.prompt, c.sample) for c in samples] == [(p, i) for p in prompts for i in range(4)]
    assert len({tuple(c.token_ids) for c in samples}) == 8 and {c.seed for c in samples} == {3}
    single = generate(llm, prompts * 2, hot())
    assert [samples[0], samples[4]] == single[:2]


def test_alternatives_are_as_many_as_asked_best_first(llm):
    params = [
        dataclasses.replace(GREEDY, logprobs=5),
        hot(temperature=2.0, top_k=4, logprobs=20),
        hot(temperature=2.0, logprobs=0),
        hot(temperature=2.0),
    ]
    greedy, cut, none, silent = found = generate(llm, ["top"] * 4, params)
    unasked = generate(llm, ["top"] * 4, [dataclasses.replace(p, logprobs=None) for p in params])
    assert list(map(parts, found)) == list(map(parts, unasked))
    for completion, k in zip((greedy, cut, none), (5, 20, 0), strict=True):
        assert [len(place) for place in completion.top_logprobs] == [k] * 12
        for place in completion.top_logprobs + completion.processed_top_logprobs:
            values = list(place.values())
            assert values == sorted(values, reverse=True) and all(v <= 0 for v in values)
    assert silent.top_logprobs is silent.processed_top_logprobs is None
    assert none.processed_top_logprobs == none.top_logprobs

    assert [next(iter(place)) for place in greedy.top_logprobs] == greedy.token_ids
    best = [next(iter(place.values())) for place in greedy.top_logprobs]
    assert best == greedy.logprobs and max(best) < 0
    assert greedy.processed_top_logprobs == [{token: 0.0} for token in greedy.token_ids]

    for i, token in enumerate(cut.token_ids):
        raw, processed = cut.top_logprobs[i], cut.processed_top_logprobs[i]
        assert list(raw)[:4] == list(processed) and processed[token] == cut.processed_logprobs[i]
        assert raw[token] == cut.logprobs[i] != processed[token]
        assert sum(map(math.exp, processed.values())) == pytest.approx(1, abs=1e-5)


def test_drafts_change_no_text(llm, drafting):
    given, without = requests_for_every_field()
    params = given + without + [hot(n=2), GREEDY]
    prompts = ["draft"] * len(params)
    plain, drafted = generate(llm, prompts, params), generate(drafting, prompts, params)
    steps = [c.steps for c in drafted]
    assert [c._replace(steps=0) for c in plain] == [c._replace(steps=0) for c in drafted]
    assert [c.steps for c in plain] == [len(c.token_ids) for c in plain]
    # Drafter and model share the noise, which decides nearly alone in these requests.
    tokens = [len(c.token_ids) for c in drafted]
    assert all(a <= b for a, b in zip(steps, tokens, strict=True))
    assert sum(steps) < 0.8 * sum(tokens)


def test_values_of_params_compile_nothing(llm, drafting, compile_counter):
    given, _ = requests_for_every_field()
    # 20 texts: a last batch of fewer than four would be another shape.
    given += [hot(n=5), hot(repetition_penalty=2, ignore_eos=False)]
    for model in (llm, drafting):
        generate(model, ["a"] * 4, GREEDY)
        before = compile_counter.count
        generate(model, ["abc", "something else"] * (len(given) // 2), given)
        assert compile_counter.count == before


def test_a_string_is_one_prompt_and_ids_are_taken_as_they_are(llm):
    ids = llm.encode("abc")
    assert ids[0] == BOS and llm.tokenizer.decode(ids[1:]) == "abc"
    (text,) = generate(llm, "abc", hot())
    same, without_begin = generate(llm, [ids, np.array(ids[1:])], hot())
    assert same.token_ids == text.token_ids != without_begin.token_ids


@pytest.mark.parametrize("source", ["tiny", "bytes"])
def test_control_tokens_written_in_a_prompt_are_text(llm, source):
    if source == "tiny":
        tokenizer = di.load_tokenizer("tiny")
        encode = di.LLM(llm.model, tokenizer).encode
    else:
        tokenizer, encode = llm.tokenizer, llm.encode
    added = tokenizer.get_added_tokens_decoder()
    assert len(added) >= 10
    for token in added.values():
        text = f"a {token.content}b"
        ids = encode(text)[1:]
        assert not set(added) & set(ids), token
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert set(added) & set(tokenizer.encode(text).ids), "the plain encoder would have done"


def test_stop_token_ends_the_text_and_is_not_in_it(llm):
    (free,) = generate(llm, "stop", hot())
    place = next(i for i in range(4, 12) if free.token_ids[i] not in free.token_ids[:i])
    stop = free.token_ids[place]
    params = [hot(stop_token_ids=(stop,)), hot(stop_token_ids=(PAD, stop, BOS))]
    for completion in generate(llm, ["stop", "stop"], params):
        assert completion.token_ids == free.token_ids[: place + 1]
        assert len(completion.logprobs) == place + 1
        assert completion.text == llm.tokenizer.decode(free.token_ids[:place])
        assert completion.finish_reason == "stop"


def test_end_of_sequence_stops_those_that_do_not_ignore_it():
    # A large row of the head makes the end-of-sequence token likely whenever its sign is right.
    eager = small_llm(lambda head: head.at[EOS].multiply(300))
    ignores, stops = generate(eager, ["end", "end"], [hot(), hot(ignore_eos=False)])
    place = ignores.token_ids.index(EOS)
    assert place < 11 and len(ignores.token_ids) == 12 and ignores.finish_reason == "length"
    assert stops.token_ids == ignores.token_ids[: place + 1] and stops.finish_reason == "stop"


def test_seed_is_drawn_when_there_is_none_and_told(llm):
    first, second = generate(llm, ["x", "x"], hot(seed=None))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    again, _ = generate(llm, ["x", "x"], [hot(seed=first.seed), hot(seed=first.seed)])
    assert again == first


def test_stream_grows_to_what_generate_says(llm):
    (whole,) = generate(llm, "stream", hot())
    parts = list(llm.stream("stream", hot(), burst=3))
    assert [len(p.token_ids) for p in parts] == [3, 6, 9, 12]
    assert parts[-1] == whole
    for part in parts[:-1]:
        assert part.finish_reason is None and whole.text.startswith(part.text)
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]


def answer(tokens, lengths) -> di.Generation:
    """A result of `generate` with these tokens."""
    B, N = tokens.shape
    zeros, nothing = np.zeros((B, N)), np.zeros((B, N, 0))
    top = Alternatives(nothing.astype(np.int32), nothing)
    finish = np.full(B, di.Finish.LENGTH)
    return di.Generation(tokens, lengths, zeros, zeros, top, top, finish, di.Stats.zeros(B, N, 0))


def test_stream_keeps_back_a_character_until_all_its_bytes_are_there(llm, monkeypatch):
    ids = llm.encode("é€x")[1:]  # bytes: two, three, one
    assert len(ids) == 6

    def bytes_one_by_one(model, **arguments):
        for count in range(1, 7):
            yield answer(np.array([ids[:count] + [PAD] * (6 - count)]), np.array([count]))

    monkeypatch.setattr(llm_module, "stream", bytes_one_by_one)
    texts = [part.text for part in llm.stream("a", hot(max_tokens=6))]
    assert texts == ["", "é", "é", "é", "é€", "é€x"]


class Recorder:
    """Stands in for the `generate` function: every prompt is answered by its last token."""

    def __init__(self, config):
        self.config = config
        self.calls = []

    def __call__(self, model, *, tokens, lengths, max_new_tokens, limits, **rest):
        assert tokens.shape[1] + max_new_tokens <= self.config.max_position_embeddings
        assert (lengths <= tokens.shape[1]).all() and (limits <= max_new_tokens).all()
        self.calls.append((*tokens.shape, max_new_tokens))
        last = np.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        return answer(np.repeat(last, max_new_tokens, axis=1), limits)


@pytest.mark.parametrize(
    ("sizes", "shapes"),
    [
        # (prompt length, new tokens) of each; (B, S, N) of each call
        ([(3, 5)], [(1, 16, 16)]),
        ([(3, 5), (16, 16), (1, 1)], [(4, 16, 16)]),
        ([(17, 5), (3, 20)], [(2, 32, 32)]),
        ([(20, 1)] * 3 + [(2, 1)] * 4, [(4, 16, 16), (4, 32, 16)]),
        # Near the end of the positions, widths are what still fits.
        ([(40, 24)], [(1, 40, 24)]),
        ([(63, 1)], [(1, 63, 1)]),
        ([(1, 63)], [(1, 1, 63)]),
        # Each fits, but not both in one rectangle.
        ([(40, 8), (4, 40)], [(1, 16, 48), (1, 56, 8)]),
    ],
)
def test_few_shapes_and_every_prompt_fits(llm, monkeypatch, sizes, shapes):
    recorder = Recorder(llm.model.config)
    monkeypatch.setattr(llm_module, "generate", recorder)
    prompts = [[BOS] * (length - 1) + [10 + i] for i, (length, _) in enumerate(sizes)]
    completions = generate(llm, prompts, [hot(max_tokens=most) for _, most in sizes])
    assert recorder.calls == shapes
    for i, (completion, (_, most)) in enumerate(zip(completions, sizes, strict=True)):
        assert completion.token_ids == [10 + i] * most


def test_progress_counts_texts_on_stderr(llm, monkeypatch, capsys):
    monkeypatch.setattr(llm_module, "generate", Recorder(llm.model.config))
    llm.generate(["a"] * 5, GREEDY)
    shown = capsys.readouterr()
    assert "5/5" in shown.err and shown.out == ""
    llm.generate(["a"] * 5, GREEDY, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompts", "params", "error", "sentence"),
    [
        ("", GREEDY, ValueError, r"prompt 0 is empty; .* give the ids \[0\]"),
        (["a", []], GREEDY, ValueError, "prompt 1 is empty"),
        (["a", 7], GREEDY, TypeError, "prompt 1 must be a string or a list of token ids, got int"),
        ([[5, 273]], GREEDY, ValueError, r"prompt 0 has token id 273, outside .* \[0, 266\)"),
        ([[-1]], GREEDY, ValueError, "prompt 0 has token id -1"),
        (["a" * 52], GREEDY, ValueError, "prompt 0 has 53 tokens and asks .* 12 more, .* 64"),
        (["a", "b"], [GREEDY], ValueError, "one for each prompt, got 1 for 2 prompts"),
        ([[1.5]], GREEDY, ValueError, "prompt 0 must be integers, got float64"),
        (["a"], [{}], TypeError, "params must be SamplingParams or a list of them, got dict"),
        (["a"], di.Sampling(), TypeError, "got Sampling .Sampling is for the function generate"),
        *(
            (
                ["a", "b"],
                [GREEDY, hot(**{name: value})],
                ValueError,
                f"{name} of prompt 1 has token id 266, outside the vocabulary",
            )
            for name, value in {
                "stop_token_ids": (266,),
                "logit_bias": {266: 1.0},
                "banned_token_ids": (5, 266),
                "forced_token_ids": (-1, 266),
            }.items()
        ),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(llm, prompts, params, error, sentence):
    with pytest.raises(error, match=sentence):
        generate(llm, prompts, params)


def test_a_stream_is_of_one_sample(llm):
    with pytest.raises(ValueError, match="stream gives one text: n must be 1, got 2"):
        next(llm.stream("a", hot(n=2)))


def test_no_prompts_give_no_completions(llm):
    assert generate(llm, [], GREEDY) == []


def test_scores_that_are_not_numbers_are_an_error_that_says_so():
    broken = small_llm(lambda head: jnp.full_like(head, jnp.nan))
    with pytest.raises(FloatingPointError, match="prompt 0: after 0 new tokens .* not numbers"):
        generate(broken, "abc", GREEDY)


def test_drafts_and_their_step_times_are_checked_at_once(llm, tmp_path):
    def make(**arguments):
        return di.LLM(llm.model, llm.tokenizer, **arguments)

    with pytest.raises(ValueError, match="draft must be one of .* got 'none'"):
        make(draft="none")
    with pytest.raises(ValueError, match="step_times is for draft='scheduled'"):
        make(draft="fixed", step_times=di.StepTimes.of([1], [1.0]))
    path = tmp_path / "times.json"
    with pytest.raises(FileNotFoundError, match="no step times at .*times.json"):
        make(draft="scheduled", step_times=path)
    di.StepTimes.of([4, 9], [1.0, 2.5]).save(path)
    assert make(draft="scheduled", step_times=path).step_times.seconds.tolist() == [1.0, 2.5]


def test_loaded_model_needs_a_tokenizer_and_takes_numerics(llm):
    with pytest.raises(ValueError, match="give tokenizer=load_tokenizer"):
        di.LLM(llm.model)
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        di.LLM(llm.model, llm.tokenizer, max_batch=0)
    numerics = dataclasses.replace(llm.model.numerics, dtype="float32")
    assert di.LLM(llm.model, llm.tokenizer, numerics).model.numerics == numerics

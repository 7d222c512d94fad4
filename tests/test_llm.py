"""`LLM` adds batching and text to `generate`, and nothing to what it says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax import llm as llm_module
from deepinfer_jax import testing
from deepinfer_jax.config import RopeScaling
from deepinfer_jax.model.engram_tables import token_map

BOS, EOS, PAD = 0, 1, 2
ROOM = 64


def small_config() -> di.Config:
    """Two layers over single bytes: little to compile."""
    return testing.tiny_config(
        num_hidden_layers=2,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=(2, 2),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=-1,
        engram_layer_ids=(1,),
        max_position_embeddings=ROOM,
        rope_scaling=RopeScaling(original_max_position_embeddings=32),
    )


def small_llm(change_head=lambda head: head) -> di.LLM:
    config = small_config()
    random = testing.random_weights(config, 5)

    def take(path):
        return change_head(random(path)) if path == "head.weight" else random(path)

    ids = token_map(testing.byte_tokenizer())
    model = di.Transformer(config, di.Numerics(), take, ids)
    return di.LLM(model, testing.byte_tokenizer(), max_batch=4)


@pytest.fixture(scope="module")
def llm():
    return small_llm()


def hot(**fields) -> di.SamplingParams:
    """Nearly uniform over all tokens, so that texts differ and hold broken characters."""
    given = dict(temperature=30, max_tokens=12, ignore_eos=True, seed=3)
    return di.SamplingParams(**given | fields)


GREEDY = hot(temperature=0)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, progress=False)


def alone(llm, prompt, params):
    """What the `generate` function says to this prompt."""
    ids = llm.encode(prompt)
    tokens = np.full((2, 16), PAD, np.int32)
    tokens[:, : len(ids)] = ids
    result = di.generate(
        llm.model,
        tokens,
        np.full(2, len(ids)),
        seeds=np.uint32(params.seed),
        max_new_tokens=16,
        limits=params.max_tokens,
        sampling=di.Sampling(params.temperature, params.top_p, params.top_k),
        ignore_eos=True,
    )
    count = int(result.lengths[0])
    return np.asarray(result.tokens)[0, :count].tolist(), np.asarray(result.logprobs)[0, :count]


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
        tokens, logprobs = alone(llm, prompt, param)
        assert completion.token_ids == tokens and len(tokens) == param.max_tokens
        assert completion.logprobs == logprobs.tolist()
        assert completion.finish_reason == "length" and completion.seed == param.seed
        assert completion.text == llm.tokenizer.decode(tokens)
    assert len({tuple(c.token_ids) for c in completions}) == len(prompts)


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


def test_stream_keeps_back_a_character_until_all_its_bytes_are_there(llm, monkeypatch):
    ids = llm.encode("é€x")[1:]  # bytes: two, three, one
    assert len(ids) == 6

    def bytes_one_by_one(model, **arguments):
        for count in range(1, 7):
            tokens = np.array([ids[:count] + [PAD] * (6 - count)])
            yield di.Generation(tokens, np.array([count]), np.zeros((1, 6)), np.array([0]), None)

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
        answers = np.repeat(last, max_new_tokens, axis=1)
        zeros = np.zeros(len(lengths), np.int32)
        return di.Generation(answers, limits, np.zeros(answers.shape), zeros, None)


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


def test_progress_counts_prompts_on_stderr(llm, monkeypatch, capsys):
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
        (["a"], hot(stop_token_ids=(266,)), ValueError, "stop_ids must be token ids below 266"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(llm, prompts, params, error, sentence):
    with pytest.raises(error, match=sentence):
        generate(llm, prompts, params)


def test_no_prompts_give_no_completions(llm):
    assert generate(llm, [], GREEDY) == []


def test_scores_that_are_not_numbers_are_an_error_that_says_so():
    broken = small_llm(lambda head: jnp.full_like(head, jnp.nan))
    with pytest.raises(FloatingPointError, match="prompt 0: after 0 new tokens .* not numbers"):
        generate(broken, "abc", GREEDY)


def test_loaded_model_needs_a_tokenizer_and_takes_numerics(llm):
    with pytest.raises(ValueError, match="give tokenizer=load_tokenizer"):
        di.LLM(llm.model)
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        di.LLM(llm.model, llm.tokenizer, max_batch=0)
    numerics = dataclasses.replace(llm.model.numerics, dtype="float32")
    assert di.LLM(llm.model, llm.tokenizer, numerics).model.numerics == numerics

"""`LLM`: text in, text out, over `generate` and `stream`.

What it adds to them: a tokenizer, batches, a progress bar, one `SamplingParams` for each prompt. A
prompt is a document's beginning, so the begin-of-sentence token goes before it, as in training;
what looks like a control token inside it is text. Widths are rounded up to powers of two, so that
few shapes compile. In reproducible numerics (the default on CPU) a text depends on its own prompt
and params only: not on widths, the batch or drafts.

Letters: B sequences, S prompt width, K tokens in a list.
"""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from deepinfer_jax import inputs
from deepinfer_jax.decoding.generate import Generation, generate, stream
from deepinfer_jax.decoding.loop import Finish
from deepinfer_jax.decoding.request import check_drafting
from deepinfer_jax.decoding.sampling import MAX_LOGPROBS, SamplingParams
from deepinfer_jax.decoding.schedule import StepTimes
from deepinfer_jax.loading import load, load_tokenizer
from deepinfer_jax.model.transformer import Transformer
from deepinfer_jax.numerics import Numerics

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NARROWEST = 16
# What a decoder writes for bytes that are no character, or not yet one.
_BROKEN = "\ufffd"


class Completion(NamedTuple):
    """What was written for one prompt.

    Log-probabilities are the model's alone, before temperature, penalties, biases and cuts, or
    "processed": of the distribution that the token was drawn from.

    Attributes:
        prompt: as it was given.
        text: the new text, without the stop token.
        token_ids: the new tokens, with the stop token.
        logprobs: of each new token.
        processed_logprobs: of each new token.
        top_logprobs: for each new token the `logprobs` of the params most likely ones, best first,
            by token id; None if the params do not ask.
        processed_top_logprobs: the same; fewer where fewer tokens are possible.
        finish_reason: "stop" for an end-of-sequence or stop token, "length" for `max_tokens`, None
            in a stream that goes on.
        seed: the one used; giving it again gives the same text.
        sample: which of the `n` samples of its prompt it is, from 0 on.
        steps: rounds that its tokens took: as many as there are tokens, or fewer with drafts.
    """

    prompt: str | Sequence[int]
    text: str
    token_ids: list[int]
    logprobs: list[float]
    processed_logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    processed_top_logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    seed: int
    sample: int
    steps: int


class _Request(NamedTuple):
    index: int  # among the completions
    number: int  # of the prompt
    prompt: str | Sequence[int]
    ids: list[int]
    params: SamplingParams
    seed: int
    sample: int


class LLM:
    """A model, its tokenizer, and what it takes to use them with strings.

    Attributes:
        model: the `Transformer`.
        tokenizer: a `tokenizers.Tokenizer`.
        max_batch: most sequences that are generated together.
        draft: how tokens are drafted; it changes the speed and, in reproducible numerics, no text.
        step_times: what a round costs, for a schedule of drafts.
    """

    def __init__(
        self,
        model: str | Path | Transformer,
        tokenizer: "Tokenizer | None" = None,
        numerics: Numerics | None = None,
        *,
        max_batch: int = 8,
        draft: str | None = None,
        step_times: StepTimes | str | Path | None = None,
    ):
        """Load what is not given.

        Args:
            model: a name or folder for `load`, or a loaded model.
            tokenizer: None takes that of the folder.
            numerics: rounding points; None takes those of the release, or of the loaded model.
            max_batch: most sequences that are generated together.
            draft: None, "fixed" or "scheduled", as for the function `generate`.
            step_times: for draft="scheduled", as for the function `generate`.

        Raises:
            FileNotFoundError: no such folder or file.
            ValueError: a bad checkpoint or file of step times, a loaded model without a tokenizer,
                drafts from a model without a drafter.
        """
        self.max_batch = inputs.whole_number(max_batch, "max_batch")
        if isinstance(model, Transformer):
            if tokenizer is None:
                raise ValueError(
                    "LLM: a loaded model does not know its tokenizer; give "
                    "tokenizer=load_tokenizer(folder)"
                )
            self.model = model if numerics is None else model.with_numerics(numerics)
        else:
            self.model = load(model, numerics=numerics)
        self.tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        check_drafting(self.model, draft, step_times=step_times)
        self.draft = draft
        from_file = isinstance(step_times, (str, Path))
        self.step_times = StepTimes.load(step_times) if from_file else step_times
        self._plain = _without_added_tokens(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: begin-of-sentence, then the text.

        Control tokens written out in a text are text. To give control tokens, give ids.
        """
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self.model.config.bos_token_id, *ids]

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue prompts.

        Args:
            prompts: a string, or a list of strings and lists of token ids. Ids are taken as they
                are: nothing goes before them.
            params: for all prompts, or one for each. None: `SamplingParams()`. A seed of None is
                drawn from the operating system, one for each prompt.
            progress: show a bar on stderr.

        Returns:
            Completions in the order of the prompts; the `n` samples of a prompt side by side.

        Raises:
            TypeError: a prompt that is neither text nor token ids, params that are none.
            ValueError: a prompt that is empty or too long, an id outside the vocabulary, another
                number of params than of prompts.
            FloatingPointError: no token can be chosen, because the model's scores are not numbers
                or every token is banned.
        """
        from tqdm import tqdm

        requests = self._requests([prompts] if isinstance(prompts, str) else prompts, params)
        completions: dict[int, Completion] = {}
        with tqdm(total=len(requests), unit=" texts", disable=not progress) as bar:
            for batch in self._batches(requests):
                result = generate(self.model, **self._arguments(batch))
                result = jax.tree.map(np.asarray, result)
                for row, request in enumerate(batch):
                    completions[request.index] = self._completion(request, result, row)
                bar.update(len(batch))
        return [completions[i] for i in range(len(requests))]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, burst: int = 8
    ) -> Iterator[Completion]:
        """Continue one prompt, handing out what there is after every `burst` rounds.

        A round gives one token, or several with drafts. Each text begins with the one before it: a
        character whose bytes are not all there is kept back.

        Args:
            prompt: text, or token ids.
            params: None: `SamplingParams()`.
            burst: rounds between looks at the device.

        Yields:
            The completion so far; the last one has a `finish_reason`.

        Raises:
            TypeError: as for `generate`.
            ValueError: as for `generate`, and for params that ask for several samples.
            FloatingPointError: as for `generate`.
        """
        batch = self._requests([prompt], params)
        if len(batch) > 1:
            raise ValueError(f"stream gives one text: n must be 1, got {len(batch)}")
        for result in stream(self.model, burst=burst, **self._arguments(batch)):
            yield self._completion(batch[0], jax.tree.map(np.asarray, result), 0)

    def _requests(self, prompts, params) -> list[_Request]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, (list, tuple)):
            params = [params] * len(prompts)
        for one in params:
            if not isinstance(one, SamplingParams):
                raise TypeError(
                    f"params must be SamplingParams or a list of them, got {type(one).__name__} "
                    "(Sampling is for the function generate)"
                )
        if len(params) != len(prompts):
            raise ValueError(
                f"params must be one SamplingParams or one for each prompt, got {len(params)} for "
                f"{len(prompts)} prompts"
            )
        requests: list[_Request] = []
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            ids = self._ids(number, prompt, one)
            self._check_token_lists(number, one)
            seed = secrets.randbits(32) if one.seed is None else one.seed
            for sample in range(one.n):
                requests.append(_Request(len(requests), number, prompt, ids, one, seed, sample))
        return requests

    def _ids(self, index: int, prompt, params: SamplingParams) -> list[int]:
        """Token ids of prompt number `index`, checked."""
        if not isinstance(prompt, (str, Sequence, np.ndarray)):
            raise TypeError(
                f"prompt {index} must be a string or a list of token ids, got "
                f"{type(prompt).__name__}"
            )
        if not len(prompt):
            begin = self.model.config.bos_token_id
            raise ValueError(
                f"prompt {index} is empty; to write a document from nothing give the ids [{begin}]"
            )
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        else:
            ids = inputs.integers(prompt, f"prompt {index}").tolist()
        room, vocabulary = self.model.config.max_position_embeddings, self.model.config.vocab_size
        if len(ids) + params.max_tokens > room:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens and asks for up to {params.max_tokens} "
                f"more, beyond the model's max_position_embeddings = {room}"
            )
        for token in ids:
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt {index} has token id {token}, outside the vocabulary [0, {vocabulary})"
                )
        return ids

    def _check_token_lists(self, index: int, params: SamplingParams) -> None:
        vocabulary = self.model.config.vocab_size
        for name in ("stop_token_ids", "logit_bias", "banned_token_ids", "forced_token_ids"):
            for token in getattr(params, name) or ():
                if token >= vocabulary:
                    raise ValueError(
                        f"{name} of prompt {index} has token id {token}, outside the vocabulary "
                        f"[0, {vocabulary})"
                    )

    def _batches(self, requests: list[_Request]) -> Iterator[list[_Request]]:
        """Requests of like length together, as many as fit."""
        batch: list[_Request] = []
        for request in sorted(requests, key=lambda r: len(r.ids)):
            longest, most = _extent([*batch, request])
            fits = longest + most <= self.model.config.max_position_embeddings
            if batch and (len(batch) == self.max_batch or not fits):
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def _arguments(self, batch: list[_Request]) -> dict[str, Any]:
        """Arguments of the `generate` function, padded to a shape that many batches share."""
        config = self.model.config
        longest, most = _extent(batch)
        width = min(_bucket(longest, _NARROWEST), config.max_position_embeddings - most)
        capacity = min(_bucket(most, _NARROWEST), config.max_position_embeddings - width)
        missing = min(_bucket(len(batch), 1), self.max_batch) - len(batch)
        limits = [r.params.max_tokens for r in batch] + [1] * missing
        rows = [*batch, *[batch[-1]] * missing]

        eos = [() if r.params.ignore_eos else (config.eos_token_id,) for r in rows]
        biases = [
            {**(r.params.logit_bias or {}), **dict.fromkeys(r.params.banned_token_ids, -np.inf)}
            for r in rows
        ]
        K = _bucket(max(map(len, biases)), 1)
        fewest = [min(r.params.min_tokens, limit) for r, limit in zip(rows, limits, strict=True)]
        # All that may be asked for or nothing, so that two programs do.
        alternatives = any(r.params.logprobs for r in batch)
        return dict(
            tokens=_lists([r.ids for r in rows], config.pad_token_id, width=width),
            lengths=np.array([len(r.ids) for r in rows], np.int32),
            seeds=np.array([r.seed for r in rows], np.uint32),
            sample=np.array([r.sample for r in rows], np.int32),
            max_new_tokens=capacity,
            limits=np.array(limits, np.int32),
            min_new_tokens=np.array(fewest, np.int32),
            sampling=jax.tree.map(lambda *v: np.array(v), *(r.params.row() for r in rows)),
            stop_ids=_lists([r.params.stop_token_ids + e for r, e in zip(rows, eos, strict=True)]),
            ignore_eos=True,  # it is among each request's stop ids
            logit_bias=(
                _lists(biases, width=K),
                _lists([b.values() for b in biases], 0, np.float32, width=K),
            ),
            forced=_lists([r.params.forced_token_ids[: r.params.max_tokens] for r in rows]),
            top_logprobs=min(MAX_LOGPROBS, config.vocab_size) if alternatives else 0,
            draft=self.draft,
            step_times=self.step_times,
        )

    def _completion(self, request: _Request, result: Generation, row: int) -> Completion:
        count, finish = int(result.lengths[row]), int(result.finish[row])
        if finish == Finish.INVALID:
            raise FloatingPointError(
                f"prompt {request.number}: after {count} new tokens no token can be chosen: every "
                "one is banned, or the model's scores are not numbers (look for NaN or infinity in "
                "its weights)"
            )
        ids = result.tokens[row, :count].tolist()
        stopped = finish == Finish.STOP
        ended = stopped or count == request.params.max_tokens
        asked = request.params.logprobs

        def alternatives(top):
            if asked is None:
                return None
            tokens, logprobs = (a[row, :count, :asked].tolist() for a in top)
            return [
                {token: logprob for token, logprob in zip(*place, strict=True) if token >= 0}
                for place in zip(tokens, logprobs, strict=True)
            ]

        text = self.tokenizer.decode(ids[:-1] if stopped else ids)
        return Completion(
            prompt=request.prompt,
            text=text if ended else text.rstrip(_BROKEN),
            token_ids=ids,
            logprobs=result.logprobs[row, :count].tolist(),
            processed_logprobs=result.processed_logprobs[row, :count].tolist(),
            top_logprobs=alternatives(result.top),
            processed_top_logprobs=alternatives(result.processed_top),
            finish_reason=("stop" if stopped else "length") if ended else None,
            seed=request.seed,
            sample=request.sample,
            steps=int(result.stats.steps[row]),
        )


def _extent(batch: list[_Request]) -> tuple[int, int]:
    """The longest prompt and the most new tokens."""
    return max(len(r.ids) for r in batch), max(r.params.max_tokens for r in batch)


def _lists(rows, fill=-1, dtype=np.int32, width: int | None = None) -> np.ndarray:
    """Lists of any lengths as an array [B, K]; K is that of the longest, or `width`."""
    rows = [list(row) for row in rows]
    array = np.full((len(rows), max(map(len, rows)) if width is None else width), fill, dtype)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return array


def _bucket(n: int, least: int) -> int:
    """The power of two from n up, at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def _without_added_tokens(tokenizer: "Tokenizer") -> "Tokenizer":
    """The same tokenizer, knowing no control tokens.

    `Tokenizer.encode_special_tokens` would not do: it spares only tokens flagged as special, and in
    the released file <think> or the turn marks are not.
    """
    from tokenizers import Tokenizer

    plain = Tokenizer(tokenizer.model)
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    return plain

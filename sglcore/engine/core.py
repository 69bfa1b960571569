"""The engine core: requests in, text out, one step at a time. It joins the token side and the text
side in one process.

Not thread-safe: one owner calls `add`, `abort` and `step`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np

from sglcore.core.ledger import Row
from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.outputs import RequestOutput, TextDelta
from sglcore.engine.structured_output.grammar_cache import Grammars, open_grammars
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.guidance_schema import left_out_of
from sglcore.engine.token_engine import TokenEngine
from sglcore.engine.tokenizers.skipped_tokenizer import open_codec
from sglcore.engine.tokenizers.text_codec import EncodedPair, TextCodec, TextError, eos_token_ids
from sglcore.sampling.params import SamplingParams, fresh_seed
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.result_checks import longest_prompt
from sglcore.worker.model_worker import ModelWorker

Prompt = str | Sequence[int] | PromptEmbeds
Text = TypeVar("Text")


class Engine:
    """An engine in one process: it encodes prompts, runs the steps of a scheduler and a worker, and
    decodes their tokens."""

    def __init__(
        self,
        worker: ModelWorker,
        model_path: Path,
        *,
        overlap: bool = True,
        prefix_cache: bool = True,
        shards: int = 1,
        skip_tokenizer: bool = False,
        grammar_backend: str = "auto",
        record: Callable[[Row], None] | None = None,
    ) -> None:
        """Open the tokenizer of the checkpoint at `model_path` and a scheduler for `worker`, which
        the engine then owns. `overlap`: plan a step while the step before runs; `shards`: the
        worker's number of data-parallel shards (`dp`). `record` receives the ledger row about the
        grammar library, which is chosen when the first request needs one."""
        self.worker = worker
        self.codec = open_codec(model_path, skips=skip_tokenizer)
        self.vocab_size = worker.limits.vocab_size
        self._grammar_backend, self._record = grammar_backend, record
        self.tokens = TokenEngine(
            worker,
            eos_token_ids(model_path),
            overlap=overlap,
            prefix_cache=prefix_cache,
            shards=shards,
            open_grammars=self._open_grammars,
        )
        self.scheduler, self.loop, self.eos_ids = self.tokens.scheduler, self.tokens.loop, self.tokens.eos_ids
        self._texts: dict[str, OutputProcessor] = {}
        self._numbers = count()

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` has something to do."""
        return self.tokens.has_work

    def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
        """Queue a prompt and return its output object, which later steps fill. Without a
        `request_id`, the request gets an unused one. Warns of parts of a JSON schema that are not
        enforced. Raises RequestError or TextError; then nothing was queued."""
        if self.tokens.is_closed:
            raise TextError("this engine is closed", remedy="start another")
        name = request_id or self._free_name()
        if name in self._texts:
            raise TextError(f"request id {name!r} is in use", remedy="give each request its own id")
        check_ids(params, self.vocab_size)
        self.codec.check(params)
        ids = read_prompt(self.codec, prompt, most=longest_prompt(self.worker.limits))
        for missing in (each for part in left_out_of(params.grammar) for each in part.names):
            warnings.warn(f"the output is not held to {missing} of its schema: check the output", stacklevel=3)
        seed = params.seed if params.seed is not None else fresh_seed()
        processor = OutputProcessor(self.codec, name, prompt if isinstance(prompt, str) else None, ids, params, seed)
        processor.output.max_tokens = cut_tokens(params, len(ids), self.worker.limits.max_model_len)
        self.tokens.add(name, ids, params, seed, embeds=prompt if isinstance(prompt, PromptEmbeds) else None)
        self._texts[name] = processor
        return processor.output

    def abort(self, request_id: str) -> None:
        """End every sample of a request; its output keeps what was produced so far. Unknown ids are
        ignored."""
        self._absorb(self.tokens.abort(request_id))

    def step(self) -> list[TextDelta]:
        """Run one step of the loop and return the text that became final, in order. Waits for the
        device. If the step raises, text of steps before it is still added to the output objects."""
        try:
            outputs = self.tokens.step()
        except BaseException:
            self._absorb(self.tokens.drain())
            raise
        return self._absorb(outputs)

    def embed(self, prompts: Sequence[Prompt], prompt_name: str | None = None) -> list[np.ndarray]:
        """Return one embedding, float32[size], for each prompt, pooled as the checkpoint declares.

        The text of the checkpoint's prompt `prompt_name` (None: its default prompt) is put before
        each text. Waits. Raises TextError if the checkpoint does not embed, and, before any work
        starts, one that names the index of a prompt that cannot run.
        """
        limits = self.worker.limits
        if limits.generates or limits.num_labels:
            found = "generates text" if limits.generates else "has a classification head"
            raise TextError(
                f"this checkpoint {found}",
                wanted="an encoder, such as BERT, or another with --task embed",
                remedy="use generate" if limits.generates else "use score",
            )
        most = longest_prompt(limits, embeds=True)
        return self._answers(
            prompts,
            lambda prompt: (read_prompt(self.codec, prompted(self.codec, prompt, prompt_name), most=most), None),
        )

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        """Return the scores float32 [labels] of each pair of texts, by the checkpoint's
        classification head. Waits. Raises TextError without such a head, and, before any work
        starts, one that names the index of a pair that cannot run."""
        if not self.worker.limits.num_labels:
            raise TextError(
                "this checkpoint has no classification head",
                wanted="an architecture ...ForSequenceClassification",
                remedy="with a language model that answers yes or no, use generate and both tokens' log-probabilities",
            )
        limit = longest_prompt(self.worker.limits, embeds=True)
        return self._answers(pairs, lambda pair: self.codec.encode_texts(*pair, limit=limit))

    def _answers(self, texts: Sequence[Text], read: Callable[[Text], EncodedPair]) -> list[np.ndarray]:
        """Return the worker's result, float32 [size], for each item of `texts`; `read` returns an
        item's token ids and segment ids (None: no segments). Waits. If one item cannot be queued,
        none runs, and the error names its index."""
        requests: list[Request] = []
        try:
            for place, text in enumerate(texts):
                requests.append(self._add_embedding(place, lambda text=text: read(text)))
            while self.loop.has_work:
                self.step()
        except BaseException:
            for request in requests:
                self.scheduler.abort(request.rid)
            raise
        return [embedding_of(request) for request in requests]

    def close(self) -> None:
        """Drop work in flight and free the worker. Idempotent."""
        self.tokens.close()

    def _open_grammars(self) -> Grammars | None:
        vocabulary = Vocabulary(self.codec.tokenizer, self.vocab_size, tuple(sorted(self.eos_ids)))
        grammars, row = open_grammars(self._grammar_backend, vocabulary)
        if self._record is not None:
            self._record(row)
        return grammars

    def _free_name(self) -> str:
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._texts)

    def _add_embedding(self, place: int, read: Callable[[], EncodedPair]) -> Request:
        try:
            return self.tokens.embed(f"embed-{next(self._numbers)}", *read())
        except (TextError, ValueError) as error:
            raise TextError(f"text {place}: {error}") from None

    def _absorb(self, outputs: Sequence[EngineOutput]) -> list[TextDelta]:
        return [delta for output in outputs if (delta := self._take(output)) is not None]

    def _take(self, output: EngineOutput) -> TextDelta | None:
        processor = self._texts.get(output.request_id)
        delta = None if processor is None else processor.take(output)
        if processor is None or delta is None:
            return None  # its text ended at a stop string while further outputs were on their way
        early = processor.early_end(output)
        if early is not None:
            self.tokens.end_sample(output.request_id, *early)
        if processor.output.finished:
            self._texts.pop(output.request_id, None)
        return delta


def read_prompt(codec: TextCodec, prompt: Prompt, *, special: bool = True, most: int | None = None) -> list[int]:
    """Return the token ids of a prompt (of `PromptEmbeds` its ids, or zeros if they are unknown);
    `special` adds the tokens that the checkpoint puts around a text. Raises TextError if the prompt
    is neither text nor ids. Raises ContextError for a long text that surely has more than `most`
    tokens (None: no limit), without reading it to its end."""
    if isinstance(prompt, str):
        return codec.encode(prompt, special=special, most=most)
    if isinstance(prompt, PromptEmbeds):
        return list(prompt.ids)
    wanted = "text, or a list of token ids"
    if isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set)):
        raise TextError(f"a prompt is {type(prompt).__name__}", wanted=wanted)
    try:
        ids = list(prompt)
        if any(isinstance(token_id, (bool, np.bool_)) for token_id in ids):
            raise TypeError("true and false are not token ids")
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise TextError(f"this prompt cannot be read: {error}", wanted=wanted) from None


def prompted(codec: TextCodec, prompt: Prompt, name: str | None) -> Prompt:
    """Return the prompt to embed, with the checkpoint's prompt `name` before a text (None: the
    default prompt).

    Token ids are returned unchanged. Raises TextError if `name` is given with token ids, if the
    checkpoint has no prompt of that name, and for `PromptEmbeds`.
    """
    if isinstance(prompt, str):
        return codec.prompted(prompt, name)
    if isinstance(prompt, PromptEmbeds):
        raise TextError("found embeddings as a prompt to embed", wanted="text, or a list of token ids")
    if name is not None:
        raise TextError(
            f"found token ids with the prompt name {name!r}", wanted="text, which a named prompt can precede"
        )
    return prompt


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise TextError if `params` names a token id of `vocab_size` or above; such an id would bias
    another row's logits."""
    allowed = params.token_rules.allowed if params.token_rules is not None else ()
    named = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids, "allowed_token_ids": allowed}
    for name, ids in named.items():
        if max(ids, default=0) >= vocab_size:
            raise TextError(
                f"{name} has the token id {max(ids)}",
                wanted=f"0..{vocab_size - 1}",
                remedy="use the ids of this model's tokenizer",
                field=name,
            )


def cut_tokens(params: SamplingParams, prompt_tokens: int, max_model_len: int) -> int | None:
    """Return the number of tokens that fit in the context of `max_model_len` after a prompt of
    `prompt_tokens`, if `params.max_tokens` is larger; None if it is not, or is None."""
    left = max_model_len - prompt_tokens
    return left if params.max_tokens is not None and params.max_tokens > left else None


def embedding_of(request: Request) -> np.ndarray:
    """Return the result of an embedding request that has ended: float32 [hidden], or [labels] with
    a classification head. Raises TextError if it has none, because it failed or was aborted."""
    if request.embedding is None:
        raise TextError(f"{request.rid!r} has no embedding: {request.error or 'it was aborted'}")
    return request.embedding

"""The offline API: load a model, give it prompts, get text."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.core.ledger import DecisionLedger
from sglcore.engine.core import Engine, Prompt
from sglcore.engine.outputs import Completion, RequestOutput, TextDelta
from sglcore.engine.progress import Progress
from sglcore.engine.start import choose_sampling, start
from sglcore.engine.tokenizers.chat_template import Message
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.result_checks import longest_prompt


class LLM:
    """A model that generates text, or embeds or scores texts. Also a context manager; `close` frees
    the device.

    `model` is a checkpoint folder, a GGUF file or a name of Hugging Face's hub, which is fetched
    (None: the embedded model). Settings are the fields of `EngineConfig`, each also read from
    `SGLCORE_<NAME>`; `show_progress` draws bars on a terminal. Waits until the model is loaded.
    Raises SglcoreError for errors that a user can correct.
    """

    def __init__(self, model: str | None = None, *, show_progress: bool = False, **settings: Any) -> None:
        self.config: EngineConfig = resolve_config({"model": model, **settings})
        self._progress = Progress(enabled=show_progress)
        self._streams: dict[str, deque[TextDelta]] = {}
        with self._progress:
            self.started = start(self.config, self._progress.phase)
        try:
            self.engine = Engine(
                self.started.worker,
                self.started.model_path,
                overlap=self.started.overlap,
                prefix_cache=self.config.prefix_cache,
                shards=self.config.dp,
                skip_tokenizer=self.config.skip_tokenizer,
                grammar_backend=self.config.grammar_backend,
                record=self.started.ledger.record,
            )
        except BaseException:
            self.started.worker.close()
            raise

    @property
    def ledger(self) -> DecisionLedger:
        """The start-up decisions, each with its reason."""
        return self.started.ledger

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters used if none are given: those of the checkpoint's
        `generation_config.json`, unless the setting `generation_config` is none, and the defaults
        of SamplingParams for the rest."""
        return SamplingParams(**choose_sampling(self.config, self.started.model_path)[0])  # pyright: ignore[reportArgumentType]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_hidden_states: bool | str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, token ids, or `PromptEmbeds`); waits for all. `params`: one
        for all prompts, or one for each; None: `default_params`. `return_hidden_states` replaces
        the field of all `params`: "last", or True or "all" (None: as they say). Returns one output
        per prompt, in order.

        The output of a prompt that cannot run has one completion, with finish_reason "error" and
        the reason in `error`; other prompts are not affected.
        """
        all_prompts = _as_list(prompts)
        all_params = _as_params(self.default_params if params is None else params, len(all_prompts))
        if return_hidden_states is not None:
            all_params = [replace(each, return_hidden_states=return_hidden_states) for each in all_params]
        outputs: list[RequestOutput] = []
        try:
            for prompt, each in zip(all_prompts, all_params, strict=True):
                outputs.append(self._add(prompt, each))
            self._run(outputs)
        except BaseException:
            for output in outputs:
                self.engine.abort(output.request_id)
            raise
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[TextDelta, None, None]:
        """Complete one prompt, yielding text as it becomes final. `params` None: `default_params`.
        The prompt is queued at the first `next`, which raises TextError or RequestError for one
        that cannot run. Closing the iterator aborts the request.

        Several streams may be open, and `generate` may be called meanwhile: each step serves them
        all.
        """
        output = self.engine.add(prompt, params or self.default_params)
        ready = self._streams[output.request_id] = deque()
        try:
            while ready or not output.finished:
                if not ready:
                    self._step()
                while ready:
                    yield ready.popleft()
        finally:
            del self._streams[output.request_id]
            self.engine.abort(output.request_id)
            self._run([output])

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, in the checkpoint's own chat format, and return its output. Waits.
        `params` None: `default_params`. Raises TextError if the chat template refuses the
        conversation, and ContextError if it surely exceeds the context."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, in the checkpoint's own chat format, for
        `generate` or `stream`. Raises TextError if there is no chat template or it refuses the
        conversation, and ContextError for a conversation that surely exceeds the context."""
        return self.prompt(self.engine.codec.render_chat(messages), special=False)

    def prompt(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, for `generate` or `stream`; `special` adds the tokens
        that the checkpoint puts around a prompt. Raises ContextError for a text that surely exceeds
        the context."""
        return self.engine.codec.encode(text, special=special, most=longest_prompt(self.engine.worker.limits))

    def embed(self, prompts: Prompt | Sequence[Prompt], *, prompt_name: str | None = None) -> np.ndarray:
        """Return the embeddings of prompts, float32 [prompts, size], pooled as the checkpoint
        declares.

        Waits. For embedding checkpoints, and for others with `task="embed"`. The checkpoint's
        prompt `prompt_name` (None: its default prompt) is put before each text. Raises TextError
        for other checkpoints, and, before any work starts, one that names the index of a prompt
        that cannot run and why, such as the limit that it exceeds.
        """
        found = self.engine.embed(_as_list(prompts), prompt_name)
        return np.stack(found) if found else np.zeros((0, 0), np.float32)

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> np.ndarray:
        """Return scores, float32 [pairs] for a classification head with one label, else [pairs,
        labels]. Waits. Pairs are one query with each document, or each query with its own document.
        The last function is the checkpoint's: for one label, usually a sigmoid. Raises TextError
        for other numbers of texts, without a classification head, and for a pair that cannot
        run."""
        firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (queries, documents))
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        if len(firsts) != len(seconds):
            found = f"found {len(firsts)} queries for {len(seconds)} documents"
            raise TextError(found, wanted="one query, or one for each document")
        found = self.engine.score(list(zip(firsts, seconds, strict=True)))
        labels = self.engine.worker.limits.num_labels
        scores = np.stack(found) if found else np.zeros((0, labels), np.float32)
        return scores[:, 0] if labels == 1 else scores

    def close(self) -> None:
        """Drop requests in progress and free the device. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        try:
            return self.engine.add(prompt, params)
        except (TextError, ValueError) as error:
            return _refused(prompt, params, str(error))

    def _run(self, outputs: Sequence[RequestOutput]) -> None:
        names = {output.request_id for output in outputs}
        total = sum(len(output.outputs) for output in outputs)
        done = sum(c.finish_reason is not None for output in outputs for c in output.outputs)
        with self._progress:
            while done < total:
                ended = [delta for delta in self._step() if delta.finish_reason is not None]
                done += sum(delta.request_id in names for delta in ended)
                self._progress.phase("generating", done, total)
            while self.engine.has_work and not self._streams:
                self._step()

    def _step(self) -> list[TextDelta]:
        """Run one step for all requests and return its new text; text of open streams is also
        appended to their queues in `_streams`."""
        deltas = self.engine.step()
        for delta in deltas:
            if delta.request_id in self._streams:
                self._streams[delta.request_id].append(delta)
        return deltas


def _refused(prompt: Prompt, params: SamplingParams, reason: str) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids = list(prompt) if text is None and isinstance(prompt, (Sequence, np.ndarray)) else []
    failed = Completion(0, params.seed or 0, finish_reason="error", error=reason)
    return RequestOutput("refused", text, ids, [failed])  # pyright: ignore[reportArgumentType]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes, bytearray, memoryview, Mapping, PromptEmbeds)):
        return [prompts]  # pyright: ignore[reportReturnType]
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]  # pyright: ignore[reportReturnType]
    return items  # pyright: ignore[reportReturnType]


def _as_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Mapping) or not all(isinstance(item, SamplingParams) for item in params):
        raise TextError(f"found {type(params).__name__} as sampling parameters", wanted="SamplingParams(...)")
    if len(params) != count:
        raise TextError(f"found {len(params)} sampling parameters for {count} prompts", wanted="one, or one for each")
    return list(params)

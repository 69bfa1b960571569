"""The frontend: text in, text out, over the engine processes. It tokenises, checks requests and
measures times; it runs no model."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.engine.core import Prompt, check_ids, cut_tokens, read_prompt
from sglcore.engine.model_download import is_hub_name
from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.start import choose_sampling, model_folder
from sglcore.engine.structured_output.answer_check import AnswerChecks
from sglcore.engine.tokenizers.skipped_tokenizer import open_codec
from sglcore.engine.tokenizers.text_codec import EncodedPair
from sglcore.sampling.params import SamplingParams, fresh_seed
from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import ContextError
from sglcore.schedule.result_checks import check_request, longest_prompt
from sglcore.schedule.returned_states import STATES
from sglcore.serving.replicas.engine_launch import Launcher
from sglcore.serving.replicas.ipc import EngineStats, GenerateRequest, ModelInfo, pack_ids, pack_params
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.metrics.server_metrics import CALLER, Metrics
from sglcore.serving.replicas.metrics.vllm_metrics import VllmFamilies
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.server_errors import InvalidRequest, NotAnswering, Overloaded, ShuttingDown
from sglcore.serving.replicas.supervisor import Supervisor
from sglcore.worker.model_worker import Limits

PauseMode = Literal["abort", "wait", "keep"]
LONG_TEXT = 4096
"""A prompt with more characters is tokenised in a thread, so that other requests do not wait for
it."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A result of `Frontend.pooled`: the embedding or the scores of a text, float32 [size], and its
    number of tokens."""

    vector: np.ndarray
    tokens: int


class Frontend:
    """One served model and its engines. `start` launches the engines and returns at once; `health`
    says when requests are accepted."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        *,
        chosen: Sequence[str] = (),
        launcher: Launcher | None = None,
        answer_checks: AnswerChecks | None = None,
    ) -> None:
        """Open the tokenizer and the chat template; nothing is launched before `start`. `chosen`:
        the device of each replica, encoded (empty: each engine chooses); `launcher` None: as the
        server's configuration says; `answer_checks` None: new ones, which `stop` closes. Needs a
        running event loop. Raises ConfigError for a checkpoint, tokenizer, template or launcher
        that cannot be used."""
        from sglcore import __version__

        self.engine_config = config
        self.config = server
        self.model_path: Path = model_folder(config)
        self.codec = open_codec(self.model_path, skips=config.skip_tokenizer, chat_template=chat_template(server))
        self.sampling, _ = choose_sampling(config, self.model_path)
        self.names: tuple[str, ...] = server.served_model_name or (self._own_name(),)
        self.created = int(time.time())
        self.answer_checks = answer_checks or AnswerChecks()
        self.health = Health()
        self.supervisor = Supervisor(config, server, self.health, chosen=chosen, launcher=launcher)
        self.metrics = Metrics(self.names[0], __version__, self._numbers)
        if server.vllm_metrics:
            self.metrics.add(VllmFamilies(self.metrics, self.names[0], self._numbers))
        self.metrics.engine_deaths = lambda: self.supervisor.deaths
        self._open = 0
        self._on_drain: list[Callable[[], object]] = []
        self._may_start = asyncio.Event()
        self._may_start.set()

    @property
    def info(self) -> ModelInfo | None:
        """Facts about an engine that became ready; None until the first one is. They are kept while
        it restarts."""
        return self.supervisor.info

    async def start(self) -> None:
        """Launch the engines; does not wait until they are ready, which `health` tells."""
        await self.supervisor.start()

    async def stop(self) -> None:
        """End the engines; requests in progress are dropped. Waits."""
        await self.supervisor.stop()
        self.answer_checks.close()

    def when_draining(self, told: Callable[[], object]) -> None:
        """Register `told`, which is called once on the event loop when the server begins to drain,
        to end work that no client waits for, such as batches. Registered later, it is never
        called."""
        self._on_drain.append(told)

    async def drain(self) -> None:
        """Accept no more requests, end a pause, and wait until no request is in progress, without a
        time limit."""
        self.health.drain()
        for told in self._on_drain:
            told()
        with suppress(NotAnswering):
            await self.resume()
        while self._open:
            await asyncio.sleep(0.02)

    def give_up(self) -> None:
        """Fail the requests in progress with ShuttingDown, so that their clients get an answer,
        because the drain took too long. Does not wait."""
        seconds = f"{self.config.drain_timeout:g} s (drain_timeout)"
        self.supervisor.give_up(ShuttingDown(f"the server was told to stop, and this request did not end in {seconds}"))

    async def pause(self, mode: PauseMode) -> None:
        """Make new requests wait, and wait until nothing runs. Running requests are ended
        ("abort"), completed first ("wait", without a time limit; `resume` ends the waiting), or
        keep their place between two steps ("keep"). Raises NotReady, and NotAnswering if an engine
        does not answer in time."""
        self._check_ready()
        self._may_start.clear()
        if mode == "abort":
            self.abort(None)
        while mode == "wait" and self.supervisor.generations and not self._may_start.is_set():
            await asyncio.sleep(0.02)
        await self.supervisor.pause(not self._may_start.is_set())

    async def resume(self) -> None:
        """Continue after a pause; waits until the engines do. Idempotent. Raises NotAnswering if an
        engine does not answer in time; it continues later."""
        if self.is_paused:
            self._may_start.set()
            await self.supervisor.pause(False)

    @property
    def is_paused(self) -> bool:
        """Whether the server is paused, so that new requests wait."""
        return not self._may_start.is_set()

    def abort(self, ids: Collection[str] | None) -> int:
        """End the requests with these ids, of answers or of headers x-request-id (None: all;
        unknown ones are ignored); returns the number of prompts that were ended. Does not wait."""
        found = [each for each in self.supervisor.generations if ids is None or names_of(each) & set(ids)]
        for generation in found:
            generation.abort()
        return len(found)

    async def flush_prefix_cache(self) -> int:
        """Drop cached prefixes that no request uses, in all engines, and return their number of
        pages. Waits. Raises NotReady, NotAnswering if an engine does not answer in time, and
        EngineDied."""
        self._check_ready()
        return await self.supervisor.flush()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        special: bool = True,
        progress: bool = False,
        request_id: str | None = None,
        answer_id: str = "",
        prompts: int = 1,
    ) -> Generation:
        """Start to generate for one prompt, and return the generation. `special` adds the tokens
        that the checkpoint puts around text; `progress`: report the progress of the prompt;
        `answer_id`: the id of the answer that the prompt belongs to, with other prompts; `prompts`:
        the number of prompts of that answer, which share its limit of hidden states. Waits while
        the server is paused. Raises RequestError, TextError, NotReady, Overloaded, and
        InvalidRequest for a `request_id` that is in use or for too many hidden states; then nothing
        was started."""
        clock = self.metrics.clock()
        info = self._known_info()
        self._refuse_overload(info, params.n)
        check_ids(params, info.limits["vocab_size"])
        self.codec.check(params)
        with self._counted(params.n):
            ids = await self.tokenize(prompt, special=special, most=self.longest_prompt(info))
        self._check(ids, params, info)
        if params.return_hidden_states is not None:
            self._check_hidden_states(len(ids), params, info, prompts)
        seed = params.seed if params.seed is not None else fresh_seed()
        name = request_id or f"req-{secrets.token_hex(12)}"
        processor = OutputProcessor(self.codec, name, prompt if isinstance(prompt, str) else None, ids, params, seed)
        processor.output.max_tokens = cut_tokens(params, len(ids), info.max_model_len)
        request = GenerateRequest(name, pack_ids(ids), pack_params(params), seed, progress)
        generation = Generation(request, processor, clock)
        generation.caller, generation.answer_id = CALLER.get(), answer_id
        await self._admit(params.n)
        if self.supervisor.has(name):
            raise InvalidRequest(f"a request with the id {name[:60]!r} is in progress", remedy="give each its own id")
        self.supervisor.submit(generation)
        self._open += params.n
        generation.when_closed(lambda: self._count_closed(params.n))
        return generation

    async def pooled(self, texts: Sequence[EncodedPair]) -> list[Pooled]:
        """Return the embedding or scores of texts, each given as a pair of token ids and segment
        ids (None: all 0), in order; waits for all. Raises RequestError, NotReady, Overloaded, and
        as `Supervisor.embed`, if one fails."""
        info = self._known_info()
        self._refuse_overload(info, len(texts))
        for ids, _ in texts:
            self._check(ids, SamplingParams(), info, task="embed")
        await self._admit(len(texts))
        self._open += len(texts)
        try:
            found = await asyncio.gather(
                *(self.supervisor.embed(f"embed-{secrets.token_hex(12)}", *text) for text in texts)
            )
        finally:
            self._count_closed(len(texts))
        return [
            Pooled(np.frombuffer(vector, dtype="<f4"), len(text[0])) for vector, text in zip(found, texts, strict=True)
        ]

    async def tokenize(self, prompt: Prompt, *, special: bool = True, most: int | None = None) -> list[int]:
        """Return the token ids of a prompt; waits. Text of more than LONG_TEXT characters is
        tokenised in a thread; token ids are returned as they are. `special`: add the tokens that
        the checkpoint puts around text. Raises TextError, and ContextError for such a long text
        that surely has more than `most` tokens (None: no limit)."""
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(read_prompt, self.codec, prompt, special=special, most=most)
        return read_prompt(self.codec, prompt, special=special)

    def longest_prompt(self, info: ModelInfo, *, embeds: bool = False) -> int:
        """Return the maximum number of prompt tokens: the model's limit, or the server's
        `max_prompt_tokens` if it is lower. `embeds`: for embedding or scoring, which takes one step
        and no place for an output token."""
        longest = longest_prompt(Limits(**info.limits), embeds=embeds)
        return min(longest, self.config.max_prompt_tokens or longest)

    def stats(self) -> EngineStats:
        """Return the newest known counters of all engines together, those that have ended included;
        does not wait."""
        return self.supervisor.stats()

    async def audit(self) -> list[str]:
        """Return descriptions of pages and slots that are lost or held twice in any engine, and of
        engines that do not answer; waits at most 20 seconds. Raises NotReady if no engine is ready.
        """
        if not self.supervisor.ready:
            raise self.health.refusal()
        return await self.supervisor.audit()

    def _known_info(self) -> ModelInfo:
        """Return the facts about the running engine, or about the last one while it is restarted.
        Raises NotReady if no requests are accepted."""
        if self.info is None or not self.health.takes_requests:
            raise self.health.refusal()
        return self.info

    def _check_ready(self) -> None:
        if not self.health.ready:
            raise self.health.refusal()

    def _refuse_overload(self, info: ModelInfo, more: int) -> None:
        """Raise Overloaded if, with `more` samples, more than `max_queued_requests` samples would
        wait for a place in a batch."""
        places = info.limits["max_requests"] * max(len(self.supervisor.ready), 1)
        waiting = self._open + more - places
        if waiting > self.config.max_queued_requests:
            raise Overloaded(
                f"{waiting} samples would have to wait, because at most {places} can run",
                wanted=f"at most {self.config.max_queued_requests} waiting samples",
                retry_after=self.metrics.retry_after(waiting),
            )

    async def _admit(self, samples: int) -> None:
        """Wait while the server is paused, unless it has no engine any more (`Supervisor.stopped`);
        meanwhile the samples count as waiting."""
        if self._may_start.is_set():
            return
        waits = [asyncio.create_task(event.wait()) for event in (self._may_start, self.supervisor.stopped)]
        try:
            with self._counted(samples):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @contextmanager
    def _counted(self, samples: int) -> Iterator[None]:
        """Count `samples` samples as in progress inside the context, although no engine has them
        yet: a drain waits for them, and they count for overload."""
        self._open += samples
        try:
            yield
        finally:
            self._open -= samples

    def _check(self, ids: list[int], params: SamplingParams, info: ModelInfo, task: str = "generate") -> None:
        """Raise RequestError (ContextError if it is too long) for a request that the engine would
        refuse, so that the caller gets the error at once. `task`: "generate" or "embed"."""
        most = self.config.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise ContextError(
                f"the prompt has {len(ids)} tokens", wanted=f"at most {most}", remedy="shorten the prompt"
            )
        request = Request("unsent", np.array(ids), params, task=task)  # pyright: ignore[reportArgumentType]
        check_request(request, Limits(**info.limits))

    def _check_hidden_states(self, tokens: int, params: SamplingParams, info: ModelInfo, prompts: int) -> None:
        """Raise InvalidRequest if the hidden states of a prompt with this number of `tokens` may
        exceed its part of the answer's limit, one of `prompts`."""
        states, most = 1, self.config.max_hidden_states
        if params.return_hidden_states == "all":
            longest = info.max_model_len if params.max_tokens is None else tokens + params.max_tokens
            states = min(longest, info.max_model_len) - 1
        values = states * params.n * prompts * info.limits["hidden_size"]
        if values > most:
            less = (
                'set return_hidden_states to "last", set a lower max_tokens' if states > 1 else "request fewer samples"
            )
            raise InvalidRequest(
                f"the hidden states of this request may have {values} values ({states} tokens of each sample)",
                wanted=f"at most {most} (max_hidden_states)",
                remedy=f"{less}, or start the server with a larger --max-hidden-states",
                param=STATES,
            )

    def _count_closed(self, samples: int) -> None:
        self._open -= samples

    def _own_name(self) -> str:
        model = self.engine_config.model
        if model is None:
            return "sglcore-demo"
        return model if is_hub_name(model) else self.model_path.resolve().name

    def _numbers(self) -> list[tuple[str, str, EngineStats | None]]:
        replicas = self.supervisor.replicas.values()
        return [(str(replica.number), replica.state, replica.stats) for replica in replicas]


def names_of(generation: Generation) -> set[str]:
    """Return the ids by which a client knows a prompt: its own, that of its answer, which may have
    several prompts, and that of its HTTP request; those that it has."""
    return {generation.request_id, generation.caller, generation.answer_id} - {""}


def chat_template(server: ServerConfig) -> str | None:
    """Return the text of the file that replaces the checkpoint's chat template; None: no file is
    configured. Raises ConfigError if it cannot be read as UTF-8."""
    if server.chat_template is None:
        return None
    try:
        return Path(server.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {server.chat_template} cannot be read: {error}") from None

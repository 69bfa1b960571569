"""A server with a scripted model, delta by delta: reasoning and calls in any order, and every kind
of end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from sglcore.config.server_config import ServerConfig
from sglcore.engine.outputs import Completion, RequestOutput, TextDelta
from sglcore.engine.structured_output.answer_check import AnswerChecks
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import FinishReason, TokenLogprob
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.format import ChatFormat, Rendered
from sglcore.serving.chat.parsers.delta import Delta
from sglcore.serving.http.http_app import make_app
from sglcore.serving.replicas.metrics.server_metrics import Metrics
from tests.serving.threaded import in_thread

MODEL = "scripted"
DEMO = Path(__file__).parents[2] / "sglcore" / "assets" / "demo"
PROMPT = (5, 6, 7, 8, 9)
"""Token ids of every prompt; `CACHED` of them come from the cache."""
CACHED = 2


@dataclass
class Script:
    """The model's next answer: one list of deltas per token (with a chat format: one text per
    token), and its end. `rendered`, `prompts` and `params` record the requests.

    `fault` is raised after the last delta instead of an end; `ignored` are variables that the
    template does not read; `turns` are the answers to the following requests in order;
    `fingerprint` is that of the answering engine.
    """

    says: Sequence[Sequence[Delta] | str] = ()
    reason: FinishReason = "stop"
    stop_cause: int | str | None = None
    error: str = ""
    fault: Exception | None = None
    tokens: int | None = None
    ignored: tuple[str, ...] = ()
    turns: list[Sequence[Sequence[Delta] | str]] = field(default_factory=list)
    fingerprint: str = ""
    rendered: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)


class Stage:
    """A served script. `speak` sets the answer to the following requests."""

    def __init__(self, url: str, script: Script) -> None:
        self.url, self.script = url, script

    def speak(self, *says: Sequence[Delta] | str, **ending: Any) -> Script:
        """Set the answer: each of `says` is a token's deltas; `ending` are fields of Script.
        Returns the script, which records the requests."""
        fresh = Script(says=says, **ending)
        for item in fields(Script):
            setattr(self.script, item.name, getattr(fresh, item.name))
        return self.script

    def converse(self, *turns: Sequence[Sequence[Delta] | str]) -> Script:
        """Set one answer per request: each of `turns` is the answer to one request, in order."""
        return self.speak(turns=list(turns))


def content(text: str) -> list[Delta]:
    """A token of content."""
    return [Delta("content", text)]


def reasoning(text: str) -> list[Delta]:
    """A token of reasoning."""
    return [Delta("reasoning", text)]


def call(name: str, *arguments: str, index: int = 0) -> list[list[Delta]]:
    """The tokens of a call with the id `call_NAME`."""
    start = Delta("tool_start", index=index, name=name, call_id=f"call_{name}")
    return [[start], *([Delta("tool_arguments", text, index=index)] for text in arguments)]


class ScriptedGeneration:
    """The script as a generation: one token per list of deltas; its text is its index."""

    def __init__(self, script: Script, params: SamplingParams) -> None:
        self._script, self._says, self._shown = script, script.says, params.logprobs is not None
        self._done = Completion(0, seed=77)
        self.output = RequestOutput("r", None, list(PROMPT), [self._done], cached_tokens=CACHED)

    first_token_at: float | None = None
    fingerprint = ""
    """Set by `ended`."""

    def abort(self) -> None:
        """Do nothing."""

    async def ended(self) -> None:
        """Set the fingerprint; there is nothing to wait for."""
        self.fingerprint = self._script.fingerprint

    async def wait(self) -> RequestOutput:
        """Return the whole output."""
        async for _ in self:
            pass
        return self.output

    async def __aenter__(self) -> ScriptedGeneration:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abort()

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        self.fingerprint = self._script.fingerprint
        for place, said in enumerate(self._says):
            self._done.token_ids.append(place + 10)
            found = (TokenLogprob(place + 10, -0.5, 1, ((place + 10, -0.5), (3, -1.5))),) if self._shown else None
            text = said if isinstance(said, str) else str(place)
            self._done.text += text
            if found is not None:
                self._done.logprobs = [*(self._done.logprobs or ()), *found]
            yield TextDelta("r", 0, text, (place + 10,), None, found)
        if self._script.fault is not None:
            raise self._script.fault
        self._done.finish_reason, self._done.stop_cause = self._script.reason, self._script.stop_cause
        self._done.error = self._script.error
        if self._script.tokens is not None:
            self._done.token_ids = [1] * self._script.tokens
        yield TextDelta("r", 0, "", (), self._script.reason, None, self._script.error)


class ScriptedParser:
    """Reads a token's text as the index of its deltas."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of that token."""
        said = self._script.says[int(text)]
        assert not isinstance(said, str)
        return list(said)

    def finish(self) -> list[Delta]:
        """Return nothing: no text is held back."""
        return []


class ScriptedFormat:
    """Records the arguments of `render`."""

    skip_special_tokens = True
    stop_token_ids = ()

    def __init__(self, script: Script) -> None:
        self._script = script

    def render(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> Rendered:
        """Record the conversation; every one gives the same prompt."""
        self._script.rendered.append({"messages": [dict(message) for message in messages], **given})
        return Rendered("prompt", ignored=self._script.ignored)

    def stream(self, **given: Any) -> ScriptedParser:
        """Return a parser of the script."""
        return ScriptedParser(self._script)

    def tool_grammar(self, *given: Any, **more: Any) -> None:
        """Return None: the script needs no grammar."""

    def thinking(self, *given: Any, **more: Any) -> None:
        """Return None: the script marks reasoning itself."""


class ScriptedFrontend:
    """The parts of a frontend that the protocols use."""

    def __init__(
        self,
        script: Script,
        config: ServerConfig,
        form: ChatFormat | None = None,
        sampling: Mapping[str, float] = MappingProxyType({}),
        checks: AnswerChecks | None = None,
    ) -> None:
        self._script, self.answer_checks = script, checks or AnswerChecks()
        self.config, self.sampling = config, sampling
        self.codec = TextCodec(DEMO)
        self.format = form or ScriptedFormat(script)
        self.names, self.created, self.model_path = (MODEL,), 1, DEMO
        self.metrics = Metrics(MODEL, "1", lambda: ())
        self.health = SimpleNamespace(ready=True, takes_requests=True, phase="ready")
        self.info = SimpleNamespace(
            max_model_len=64, generates=True, fingerprint="fp_0123456789ab", limits={"vocab_size": 2147}
        )

    async def generate(self, prompt: Any, params: SamplingParams, **given: Any) -> ScriptedGeneration:
        """Return the script as a generation."""
        self._script.prompts.append(prompt)
        self._script.params.append(params)
        if self._script.turns:
            self._script.says = self._script.turns.pop(0)
        return ScriptedGeneration(self._script, params)

    async def tokenize(self, prompt: Any, *, special: bool = True, most: int | None = None) -> list[int]:
        """Return the same tokens for every prompt."""
        return list(PROMPT)


@contextmanager
def staged(
    config: ServerConfig, form: ChatFormat | None = None, checks: AnswerChecks | None = None, **sampling: float
) -> Iterator[Stage]:
    """Run the server in a thread. With `form`, texts are written and parsed in that format.
    `sampling`: the checkpoint's defaults; `checks`: the answer checks."""
    script = Script()
    frontend = ScriptedFrontend(script, config, form, sampling, checks)
    try:
        with in_thread(make_app(cast(ChatFrontend, frontend))) as url:
            yield Stage(url, script)
    finally:
        frontend.answer_checks.close()

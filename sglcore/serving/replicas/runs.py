"""The prompts of one request: started together, read together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput, TextDelta
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.server_errors import Failure, InvalidRequest, Unanswered, blame, ended_badly, failure
from sglcore.serving.replicas.unenforced_schemas import AnswerCheck, Unenforced, unenforced

Item = TextDelta | PromptProgress
AT_ONCE = 64
"""Maximum number of items of several prompts that wait for a slow client; then the reading of the
prompts waits."""


class Runs:
    """The generations for the prompts of one request, in order; an async context manager that ends
    all running ones. `start_runs` makes it."""

    def __init__(
        self,
        generations: Sequence[Generation],
        held: AsyncExitStack,
        form: str = "",
        check: AnswerCheck | None = None,
    ) -> None:
        """`held`: the context of the generations; `form`: the field of the request that constrains
        the answer, which errors name if an engine refuses it (empty: none); `check`: checks the
        parts of the form that are not enforced (None: there are none)."""
        self.generations = tuple(generations)
        self.outputs = [generation.output for generation in generations]
        """The current output of each prompt."""
        self.held, self.form, self.check = held, form, check

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the engines that run the prompts, each once, sorted and joined by
        commas if replicas differ; empty while none runs."""
        return ",".join(sorted({each.fingerprint for each in self.generations if each.fingerprint}))

    @property
    def unenforced(self) -> Sequence[str]:
        """Parts of the answer's schemas that are not enforced, as texts, with findings from the
        samples that have been checked so far; empty if all are enforced."""
        return () if self.check is None else self.check.names

    async def ended(self) -> None:
        """Wait until every sample has ended; an error that ended one is not raised here. Nothing is
        read, so that prompts can be restarted: for an answer that is sent as a whole."""
        for generation in self.generations:
            await generation.ended()

    async def wait(self) -> list[RequestOutput]:
        """Return all outputs, in the order of the prompts; waits for the last one and for its
        check. Raises the error that ended one from outside; a sample that failed by itself only has
        a `finish_reason`."""
        with blame(self.form):
            outputs = [await generation.wait() for generation in self.generations]
        for sample in (sample for output in outputs for sample in output.outputs):
            await self._look(sample)
        return outputs

    def read(self) -> AsyncGenerator[tuple[int, Item], None]:
        """Yield new items of all prompts as they arrive, each after its prompt's index. The end of
        a sample comes after its check. Raises the error that ended a prompt from outside."""
        return self._items() if self.check is None else self._checked()

    async def _checked(self) -> AsyncGenerator[tuple[int, Item], None]:
        async for place, item in self._items():
            if isinstance(item, TextDelta) and item.finish_reason is not None:
                await self._look(self.outputs[place].outputs[item.index])
            yield place, item

    async def _items(self) -> AsyncGenerator[tuple[int, Item], None]:
        """Yield new items of all prompts as they arrive, each after its prompt's index, without
        checking ended samples against their schemas. Raises the error that ended a prompt from
        outside, about the field `form` if the engine refused the form."""
        with blame(self.form):
            if len(self.generations) == 1:
                async for item in self.generations[0]:
                    yield 0, item
                return
            async for found in _merged(self.generations):
                yield found

    async def _look(self, sample: Completion) -> None:
        """Check a sample that has ended against its schema, if there is something to check;
        findings are appended to `sample.warnings`. Waits; raises nothing."""
        if self.check is not None:
            await self.check.look(sample, self.form, sample.text)

    async def __aenter__(self) -> Runs:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.held.aclose()


async def start_runs(
    frontend: Frontend,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    special: bool = True,
    progress: bool = False,
    name: str | None = None,
    field: str = "prompt",
    form: str = "",
    parts: Sequence[Unenforced] | None = None,
) -> Runs:
    """Start all prompts, or none: if one is refused, those before it are ended. Waits until engines
    have them, not for tokens. `special` adds the tokens that the checkpoint puts around text;
    `progress`: report the progress of prompts; `name`: the id of the answer, with "-0", "-1" and so
    on for several prompts (None: new ids); `field`: the request's field with the prompts, for
    errors; `form`: its field that constrains the answer (empty: none); `parts`: parts of the
    answer's schemas that are not enforced (None: those of the grammar in `params`). Raises
    InvalidRequest, and as `Frontend.generate`."""
    if parts is None:
        parts = unenforced(form, params.grammar)
    with blame(form or field):
        frontend.codec.check(params)
    async with AsyncExitStack() as stack:
        generations: list[Generation] = []
        for place, prompt in enumerate(prompts):
            with blame(field if len(prompts) == 1 else f"{field}[{place}]"):
                own, answer = (name, "") if name is None or len(prompts) == 1 else (f"{name}-{place}", name)
                ids = {"request_id": own, "answer_id": answer, "prompts": len(prompts)}
                found = await frontend.generate(prompt, params, special=special, progress=progress, **ids)
            generations.append(await stack.enter_async_context(found))
            await asyncio.sleep(0)  # gives other tasks a turn between many prompts
        check = AnswerCheck(frontend.answer_checks, parts) if parts else None
        if check is not None:
            await check.open()
        return Runs(generations, stack.pop_all(), form, check)


def check_answered(outputs: Sequence[RequestOutput]) -> None:
    """Raise Unanswered, with the first failure, if every sample failed; otherwise each failure is
    in its own choice, and nothing is raised."""
    found = [failure_of(sample) for output in outputs for sample in output.outputs]
    if found and found[0] is not None and all(found):
        raise Unanswered(found[0])


def failure_of(sample: Completion) -> Failure | None:
    """Return what the client gets for a sample that has ended by "error" or "abort"; None for a
    sample that runs or ended otherwise."""
    if sample.finish_reason not in ("error", "abort"):
        return None
    return failure(InvalidRequest(sample.error)) if sample.refused else ended_badly(sample.finish_reason, sample.error)


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Item], None]:
    queue: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue(AT_ONCE)
    tasks = [asyncio.create_task(_pump(place, one, queue)) for place, one in enumerate(generations)]
    open_ones = len(tasks)
    try:
        while open_ones:
            place, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_ones -= 1
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(place: int, generation: Generation, queue: asyncio.Queue[tuple[int, Item | Exception | None]]) -> None:
    try:
        async for item in generation:
            await queue.put((place, item))
        await queue.put((place, None))
    except Exception as error:
        await queue.put((place, error))

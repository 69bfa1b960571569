"""Several prompts of one request: started together, read together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput, TextDelta
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas.errors import Failure, InvalidRequest, Unanswered, blame, ended_badly, failure
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.generation import Generation
from sglcore.serving.replicas.unenforced import AnswerCheck, Unenforced, unenforced

Item = TextDelta | PromptProgress
AT_ONCE = 64
"""Items of several prompts that may wait for a slow client before their readers do."""


class Runs:
    """Generations in the order of their prompts; an async context manager that ends what has not
    ended."""

    def __init__(
        self,
        generations: Sequence[Generation],
        held: AsyncExitStack,
        form: str = "",
        check: AnswerCheck | None = None,
    ) -> None:
        """`form`: the field that is to blame if an engine refuses the form of the answer. `check`:
        for what of it is not enforced."""
        self.generations = tuple(generations)
        self.outputs = [generation.output for generation in generations]
        """What there is of each prompt, as it grows."""
        self.held, self.form, self.check = held, form, check

    @property
    def fingerprint(self) -> str:
        """Those of the engines that run them, joined by commas where replicas differ; empty while
        none does."""
        return ",".join(sorted({each.fingerprint for each in self.generations if each.fingerprint}))

    @property
    def unenforced(self) -> Sequence[str]:
        """What of the schemas that bind the answer is not enforced, and what is known of the
        samples that have been read."""
        return () if self.check is None else self.check.names

    async def ended(self) -> None:
        """Wait until every sample has ended, and take nothing: for an answer that is given as a
        whole."""
        for generation in self.generations:
            await generation.ended()

    async def wait(self) -> list[RequestOutput]:
        """All outputs; waits for the last one, and for its check. Raises what ended one from
        outside."""
        with blame(self.form):
            outputs = [await generation.wait() for generation in self.generations]
        for sample in (sample for output in outputs for sample in output.outputs):
            await self._look(sample)
        return outputs

    def read(self) -> AsyncGenerator[tuple[int, Item], None]:
        """What is new of all, each with its prompt's place. The end of a sample comes when it was
        checked."""
        return self._items() if self.check is None else self._checked()

    async def _checked(self) -> AsyncGenerator[tuple[int, Item], None]:
        async for place, item in self._items():
            if isinstance(item, TextDelta) and item.finish_reason is not None:
                await self._look(self.outputs[place].outputs[item.index])
            yield place, item

    async def _items(self) -> AsyncGenerator[tuple[int, Item], None]:
        """As they come."""
        with blame(self.form):
            if len(self.generations) == 1:
                async for item in self.generations[0]:
                    yield 0, item
                return
            async for found in _merged(self.generations):
                yield found

    async def _look(self, sample: Completion) -> None:
        """Check a sample that has ended."""
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
    """Give all prompts to engines, or none: the first that is refused ends those before it. `field`
    of the request has them; `form` as in `Runs`; `parts`: what of the schemas that bind the text
    does not (None: what the grammar of `params` says)."""
    if parts is None:
        parts = unenforced(form, params.grammar)
    with blame(form or field):
        frontend.codec.check(params)
    async with AsyncExitStack() as stack:
        generations: list[Generation] = []
        for place, prompt in enumerate(prompts):
            with blame(field if len(prompts) == 1 else f"{field}[{place}]"):
                own = name if name is None or len(prompts) == 1 else f"{name}-{place}"
                found = await frontend.generate(prompt, params, special=special, progress=progress, request_id=own)
            generations.append(await stack.enter_async_context(found))
            await asyncio.sleep(0)  # between many prompts others have their turn
        check = AnswerCheck(frontend.answer_checks, parts) if parts else None
        if check is not None:
            await check.open()
        return Runs(generations, stack.pop_all(), form, check)


def check_answered(outputs: Sequence[RequestOutput]) -> None:
    """Raise Unanswered if every sample failed; the failure of a part stands in its choice."""
    found = [failure_of(sample) for output in outputs for sample in output.outputs]
    if found and found[0] is not None and all(found):
        raise Unanswered(found[0])


def failure_of(sample: Completion) -> Failure | None:
    """Why a sample that has ended failed; None if it did not."""
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

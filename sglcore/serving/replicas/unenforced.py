"""What of the schemas that bind an answer is not enforced, and whether the answer keeps to it,
which is looked at when it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from sglcore.engine.answer_check import REMEDY, AnswerChecks, Question
from sglcore.engine.confined import Verdict
from sglcore.engine.guidance_schema import LeftOut, left_out_of
from sglcore.engine.outputs import Completion
from sglcore.sampling.grammar import Grammar

BROKEN = "the answer does not keep to it"
LATE = "not checked in time"


@dataclass(frozen=True, slots=True)
class Unenforced:
    """What of one schema of a request is not enforced."""

    field: str
    """Where the request has the schema."""
    part: LeftOut

    @property
    def names(self) -> list[str]:
        """Its parts as a client is told of them."""
        return [self.field + name for name in self.part.names]


def unenforced(field: str, grammar: Grammar | None) -> list[Unenforced]:
    """What of a grammar's schemas does not bind the text; `field` of the request has the
    grammar."""
    return [Unenforced(field, part) for part in left_out_of(grammar)]


class AnswerCheck:
    """Of one request: what is not enforced, and what came of looking at its samples."""

    def __init__(self, checks: AnswerChecks, parts: Sequence[Unenforced]) -> None:
        """Some `parts`."""
        self._checks, self._parts = checks, parts
        self._remarks = {name: "" for each in parts for name in each.names}
        self._is_over = not checks.has_library
        """Nothing is looked at any more: it cannot be, or a sample has taken all the time."""
        if self._is_over:
            self._remarks |= {each.field: f"not checked: {REMEDY}" for each in parts}

    @property
    def names(self) -> list[str]:
        """What is not enforced; first what there is something to say of."""
        said = [shown(name, remark) for name, remark in self._remarks.items() if remark]
        return said + [name for name, remark in self._remarks.items() if not remark]

    async def open(self) -> None:
        """Have the process that checks ready when the answer is; does not wait for it."""
        if not self._is_over:
            with suppress(OSError):  # who looks is told
                await asyncio.to_thread(self._checks.open)

    async def look(self, sample: Completion, field: str, text: str) -> None:
        """Whether a sample that has ended keeps to what is not enforced: `text` of it to the schema
        of `field`. Its warnings say so. Nothing is looked at where it was cut. Waits as long as a
        check may take, those before it counted; never raises."""
        if sample.finish_reason != "stop" or isinstance(sample.stop_cause, str):
            return
        for each in self._parts:
            if each.field == field and not self._is_over:
                remarks = self._remarks_of(each, await self._verdict(each.part, text))
                self._remarks |= remarks
                said = (shown(name, remark) for name, remark in remarks.items())
                sample.warnings += [each for each in said if each not in sample.warnings]

    def _remarks_of(self, each: Unenforced, verdict: Verdict) -> dict[str, str]:
        if verdict.ended:
            self._is_over = True
            return {each.field: LATE}
        if verdict.busy or verdict.error is not None:
            reason = verdict.busy if verdict.error is None else verdict.error[0]
            return {each.field: f"not checked: {reason}"}
        return {each.field + name: BROKEN for name in verdict.said}

    async def _verdict(self, part: LeftOut, text: str) -> Verdict:
        loop, seconds = asyncio.get_running_loop(), self._checks.limits.most_seconds
        found: asyncio.Future[Verdict] = loop.create_future()

        def told(verdict: Verdict) -> None:
            with suppress(RuntimeError):  # the loop is closed, and no task waits
                loop.call_soon_threadsafe(_fill, found, verdict)

        try:
            question = Question(part.schema, part.names, text, part.begin)
            async with asyncio.timeout(seconds):
                await asyncio.to_thread(self._checks.submit, question, told)
                return await found
        except TimeoutError:
            return Verdict(0, ended=f"takes longer than {seconds:g} s")
        except OSError as error:
            return Verdict(0, busy=f"the process that checks answers can not start: {error}")


def shown(name: str, remark: str) -> str:
    """A part, and what there is to say of it."""
    return f"{name} ({remark})"


def _fill(found: asyncio.Future[Verdict], verdict: Verdict) -> None:
    if not found.done():
        found.set_result(verdict)

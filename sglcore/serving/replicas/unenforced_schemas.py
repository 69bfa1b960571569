"""Parts of an answer's schemas that are not enforced, and the check of an ended answer for
violations of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from sglcore.engine.outputs import Completion
from sglcore.engine.structured_output.answer_check import REMEDY, AnswerChecks, Question
from sglcore.engine.structured_output.guidance_schema import LeftOut, left_out_of
from sglcore.engine.structured_output.killable_checks import Verdict
from sglcore.sampling.grammar_spec import Grammar

BROKEN = "the answer does not keep to it"
LATE = "not checked in time"


@dataclass(frozen=True, slots=True)
class Unenforced:
    """The parts of one schema in a request that are not enforced (`part`), and the field of the
    request that has the schema."""

    field: str
    """The field of the request that contains the schema."""
    part: LeftOut

    @property
    def names(self) -> list[str]:
        """The parts, each as the field followed by a JSON pointer, as clients see them."""
        return [self.field + name for name in self.part.names]


def unenforced(field: str, grammar: Grammar | None) -> list[Unenforced]:
    """Return the parts of a grammar's schemas that are not enforced; empty for None. `field`: the
    request's field with the grammar."""
    return [Unenforced(field, part) for part in left_out_of(grammar)]


class AnswerCheck:
    """The check of one request's samples against the parts of its schemas that are not enforced:
    `look` checks a sample that ended by itself; `names` lists all parts, each with what was found
    against it so far: a violation, or why it could not be checked."""

    def __init__(self, checks: AnswerChecks, parts: Sequence[Unenforced]) -> None:
        """`parts`: at least one. Without the library for checks, samples are not checked, and
        `names` says so."""
        self._checks, self._parts = checks, parts
        self._remarks = {name: "" for each in parts for name in each.names}
        self._is_over = not checks.has_library
        """Whether no further sample is checked: checks are impossible, or a sample has used up the
        time."""
        if self._is_over:
            self._remarks |= {each.field: f"not checked: {REMEDY}" for each in parts}

    @property
    def names(self) -> list[str]:
        """The parts that are not enforced, as texts, those with a finding first, which is in
        parentheses after the part."""
        said = [shown(name, remark) for name, remark in self._remarks.items() if remark]
        return said + [name for name, remark in self._remarks.items() if not remark]

    async def open(self) -> None:
        """Start the checking process, in a thread, so that it is ready when the answer is; does not
        wait until it is. Errors are ignored: the check reports them."""
        if not self._is_over:
            with suppress(OSError):  # the check reports it
                await asyncio.to_thread(self._checks.open)

    async def look(self, sample: Completion, field: str, text: str) -> None:
        """Check a sample that has ended: its `text` against the parts of the schema in `field` that
        are not enforced; other fields' parts are left. Findings, also that it could not be checked,
        are appended to `sample.warnings`. Only a sample that ended by itself is checked, not one
        that a stop string or limit cut. Waits for the check, and for checks before it, up to a time
        limit; never raises."""
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
            return Verdict(0, busy=f"the process that checks answers cannot start: {error}")


def shown(name: str, remark: str) -> str:
    """Return the text for a part and a remark about it: `NAME (REMARK)`."""
    return f"{name} ({remark})"


def _fill(found: asyncio.Future[Verdict], verdict: Verdict) -> None:
    if not found.done():
        found.set_result(verdict)

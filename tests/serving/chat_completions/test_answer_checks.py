"""The check of an answer against the parts of its schemas that are not enforced, over a checker
that the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.engine.outputs import Completion
from sglcore.engine.structured_output.answer_check import REMEDY
from sglcore.engine.structured_output.guidance_schema import LeftOut
from sglcore.engine.structured_output.killable_checks import Verdict
from sglcore.serving.replicas.unenforced_schemas import BROKEN, LATE, AnswerCheck, Unenforced

FIRST = Unenforced("a", LeftOut('{"n": 1}', ("#/x", "#/y"), "<t>"))
SECOND = Unenforced("b", LeftOut('{"n": 2}', ("#/z",)))
ALL = ["a#/x", "a#/y", "b#/z"]


class Played:
    """A checker that answers each question with the next verdict."""

    def __init__(self, *verdicts: Any, has_library: bool = True, opens: bool = True) -> None:
        self.verdicts, self.has_library, self._opens = list(verdicts), has_library, opens
        self.asked: list[Any] = []
        self.opened = 0
        self.limits = SimpleNamespace(most_seconds=0.05)

    def open(self) -> None:
        self.opened += 1
        if not self._opens:
            raise OSError("planted")

    def submit(self, question: Any, told: Any) -> None:
        self.asked.append(question)
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        if verdict is not None:
            told(verdict)
            told(Verdict(0, said=("#/late",)))


def sample(reason: Any = "stop", cause: Any = None) -> Completion:
    made = Completion(0, 7)
    made.finish_reason, made.stop_cause = reason, cause
    return made


def looked(played: Played, *samples: tuple[Completion, str]) -> AnswerCheck:
    """The check after these samples, each against the schema of a field."""
    check = AnswerCheck(played, (FIRST, SECOND))  # pyright: ignore[reportArgumentType]

    faults: list[Any] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, fault: faults.append(fault))
        for each, field in samples:
            await check.look(each, field, "text")
        await asyncio.sleep(0)

    asyncio.run(play())
    assert not faults, "a second verdict is no error"
    return check


def test_a_finding_is_told_of_the_sample_and_first_in_the_header() -> None:
    played, one, two = Played(Verdict(0, said=("#/y",)), Verdict(0)), sample(), sample()
    check = looked(played, (one, "a"), (two, "a"))
    assert one.warnings == [f"a#/y ({BROKEN})"] and two.warnings == []
    assert check.names == [f"a#/y ({BROKEN})", "a#/x", "b#/z"]
    question = played.asked[0]
    assert (question.schema, question.left_out) == ('{"n": 1}', ("#/x", "#/y"))
    assert (question.text, question.begin) == ("text", "<t>")


def test_only_the_schema_of_the_answers_own_field_is_asked_for() -> None:
    played = Played(Verdict(0, said=("#/z",)))
    check = looked(played, (sample(), "b"), (sample(), "c"))
    assert [each.schema for each in played.asked] == ['{"n": 2}'] and check.names == [
        f"b#/z ({BROKEN})",
        "a#/x",
        "a#/y",
    ]


@pytest.mark.parametrize(
    ("reason", "cause", "is_asked"),
    [("stop", None, True), ("stop", 7, True), ("stop", "x", False), ("length", None, False), ("error", None, False)],
)
def test_an_answer_that_was_cut_is_not_checked(reason: Any, cause: Any, is_asked: bool) -> None:
    played = Played(Verdict(0))
    assert looked(played, (sample(reason, cause), "a")).names == ALL and len(played.asked) == is_asked


def test_the_same_finding_is_told_of_a_sample_once() -> None:
    one = sample()
    looked(Played(Verdict(0, said=("#/x",)), Verdict(0, said=("#/x", "#/y"))), (one, "a"), (one, "a"))
    assert one.warnings == [f"a#/x ({BROKEN})", f"a#/y ({BROKEN})"]


@pytest.mark.parametrize(
    ("verdict", "said", "goes_on"),
    [
        (Verdict(0, ended="it took too long"), LATE, False),
        (None, LATE, False),
        (Verdict(0, busy="others are checked"), "not checked: others are checked", True),
        (Verdict(0, error=("the answer is no JSON", "", "")), "not checked: the answer is no JSON", True),
        (OSError("no process"), "not checked: the process that checks answers cannot start: no process", True),
    ],
)
def test_a_check_that_can_not_be_made_is_told_with_its_reason_and_a_late_one_is_the_last(
    verdict: Any, said: str, goes_on: bool
) -> None:
    played, one, two = Played(verdict, Verdict(0)), sample(), sample()
    check = looked(played, (one, "a"), (two, "a"))
    assert one.warnings == [f"a ({said})"] and two.warnings == []
    assert check.names == [f"a ({said})", *ALL] and len(played.asked) == 1 + goes_on


@pytest.mark.parametrize(("has_library", "opens"), [(True, True), (True, False), (False, True)])
def test_the_checker_is_opened_before_there_is_an_answer_unless_it_is_not_installed(
    has_library: bool, opens: bool
) -> None:
    played = Played(has_library=has_library, opens=opens)
    check = AnswerCheck(played, (FIRST, SECOND))  # pyright: ignore[reportArgumentType]
    asyncio.run(check.open())
    assert played.opened == has_library
    said = [] if has_library else [f"{field} (not checked: {REMEDY})" for field in "ab"]
    assert check.names == [*said, *ALL]

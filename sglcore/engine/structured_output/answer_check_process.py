"""The process that checks finished answers for `AnswerChecks` (`answer_check.py`), which starts it;
`killable_checks_process.py` has its loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from sglcore.engine.process_end import leave
from sglcore.engine.structured_output.answer_check import Question
from sglcore.engine.structured_output.killable_checks import CheckLimits, Verdict
from sglcore.engine.structured_output.killable_checks_process import Checker, first_line
from sglcore.engine.structured_output.schema_validation import not_kept


def main() -> int:
    """Check the Questions in the CheckJobs on standard input until it ends, and write a Verdict to
    standard output for each as soon as it is known, in any order; returns the exit code. The first
    line of the input has the CheckLimits. Checks that still run at the end are killed."""
    first, rest = first_line()
    if first:
        Checker(checked, msgspec.json.decode(first, type=CheckLimits), rest).run()
    return 0


def checked(work: bytes) -> Verdict:
    """Return the verdict, numbered 0, on a Question, given as JSON: in `said` the left-out parts
    that the answer violates, or in `error` why they cannot be checked. Raises MemoryError only."""
    question = msgspec.json.decode(work, type=Question)
    try:
        values = list(_values(question))
    except (ValueError, RecursionError):
        return Verdict(0, error=("the answer is no JSON", "", ""))
    try:
        schema = json.loads(question.schema)
        broken = {name for value in values for name in not_kept(schema, value, question.left_out)}
    except MemoryError:
        raise
    except Exception as failed:
        return Verdict(0, error=(f"{type(failed).__name__}: {failed}", "", ""))
    return Verdict(0, said=tuple(name for name in question.left_out if name in broken))


def _values(question: Question) -> Iterator[Any]:
    if not question.begin:
        yield json.loads(question.text)
        return
    _, found, rest = question.text.partition(question.begin)
    while found:
        rest = rest.lstrip()
        value, end = json.JSONDecoder().raw_decode(rest)
        yield value
        _, found, rest = rest[end:].partition(question.begin)


if __name__ == "__main__":
    leave(main())

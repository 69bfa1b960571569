"""The tests of the kit. A vendor's test file is one import: `from sglcore.conformance.suite import
*`.

`plugin.py`, which comes with the wheel, makes one test for each case of each law.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglcore.conformance.fixture import stale_tolerances
from sglcore.conformance.gaps import closed_gap, gap_for, read_missing, skip_for, stale_gaps, stale_skips, wrong_skip
from sglcore.conformance.kit_run import Kit, Outcome, catches, record_run, replay_run, run_case
from sglcore.conformance.law import LEVELS, run_name
from sglcore.conformance.recorded_steps import read_record, write_record

if TYPE_CHECKING:
    from sglcore.conformance.plugin import LawCase, Run

__all__ = ["pytest_plugins", "test_gaps_are_known_laws_and_have_not_expired", "test_law", "test_recorded_steps"]

pytest_plugins = ("sglcore.conformance.plugin",)
"""For a checkout that was not installed; the wheel's entry point names the same plugin."""

Kits = Callable[["Run"], Kit]


def test_gaps_are_known_laws_and_have_not_expired(gap_run: Run) -> None:
    """Fail if something is wrong with the gaps themselves or with the tolerances, such as an
    expired gap. Runs nothing on the device."""
    from sglcore.conformance.catalogue import LAWS

    known = [run_name(law, case) for law in LAWS for case in law.cases(gap_run.target)]
    wrong = stale_gaps(gap_run.gaps, known, datetime.date.today())
    wrong += stale_skips(gap_run.skips, known)
    read_missing(gap_run.target.folder)
    wrong += stale_tolerances(gap_run.target.fixture(), LAWS)
    gap_run.problems.extend(wrong)
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_law(law_case: LawCase, conformance_kits: Kits) -> None:
    """Check one case of a law: it passes, or it fails and has a gap (an expected failure); a gap of
    a case that passes is a failure. With mutants requested, the law must catch a broken device,
    which counts as an expected failure."""
    _need_device(law_case.run, law_case.law.level)
    kit = conformance_kits(law_case.run)
    if law_case.mutant is not None:
        caught, text = catches(kit, law_case.law, law_case.law.mutants[law_case.mutant])
        if caught is None:
            pytest.skip(text)
        if not caught:
            pytest.fail(f"the law does not catch the mutant: {text}", pytrace=False)
        pytest.xfail(f"caught: {text.strip().splitlines()[-1]}")
    outcome = run_case(kit, law_case.law, law_case.case)
    law_case.run.outcomes.append(outcome)
    _report(law_case.run, outcome)


def test_recorded_steps(run_to_record: Run, conformance_kits: Kits, pytestconfig: pytest.Config) -> None:
    """Write the steps of a run on this device to the file of `--conform-record`, or feed it the
    steps in the file of `--conform-replay` and compare; fails where they differ."""
    _need_device(run_to_record, LEVELS[1])
    kit = conformance_kits(run_to_record)
    target: Path | None = pytestconfig.getoption("--conform-record", default=None)
    source: Path | None = pytestconfig.getoption("--conform-replay", default=None)
    if target is not None:
        write_record(target, record_run(kit))
    if source is not None:
        seen = replay_run(kit, read_record(source))
        print(
            f"{seen.tokens} tokens compared, {seen.parted} requests diverged, largest difference {seen.max_error:.3g}"
        )


def _need_device(run: Run, level: str) -> None:
    """Fail the test if a person named a device that can not run laws of this level here; skip it if
    the suite chose the device itself; otherwise do nothing."""
    reason = run.reason_against(level)
    if reason and run.was_named:
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)


def _report(run: Run, outcome: Outcome) -> None:
    gap, row = gap_for(run.gaps, outcome.name), skip_for(run.skips, outcome.name)
    if wrong := wrong_skip(run.skips, outcome.name, outcome.verdict == "skipped", outcome.text):
        run.problems.append(wrong)
        pytest.fail(wrong, pytrace=False)
    if outcome.verdict == "skipped":
        pytest.skip(outcome.text if row is None else f"{outcome.text}; {row.text}")
    if outcome.verdict == "failed":
        if gap is None:
            pytest.fail(outcome.text, pytrace=False)
        pytest.xfail(f"{gap.reason} ({gap.link})")
    if gap is not None:
        run.problems.append(closed_gap(gap, outcome.name))
        pytest.fail(run.problems[-1], pytrace=False)

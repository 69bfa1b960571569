"""Every law holds for the reference, and states its needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglcore.conformance.catalogue import LAWS, laws_up_to
from sglcore.conformance.kit_run import Kit, run_case
from sglcore.conformance.law import LEVELS, Law
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.core.errors import ConfigError

CASES = [(law, case) for law in LAWS for case in law.cases(REFERENCE)]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "bring_up.txt").write_text(REFERENCE.order().text())
    made = Kit(replace(REFERENCE, folder=folder), tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize(("law", "case"), CASES, ids=[f"{law.name}-{case}" for law, case in CASES])
def test_the_reference_holds(law: Law, case: str, kit: Kit) -> None:
    outcome = run_case(kit, law, case)
    assert (outcome.verdict, outcome.text) == ("passed", "")


def test_every_law_has_a_sentence_a_mutant_and_a_name_of_its_own() -> None:
    assert len({law.name for law in LAWS}) == len(LAWS)
    for law in LAWS:
        assert law.says.endswith(".") and law.mutants, law.name
        assert law.cases(REFERENCE), law.name


def test_every_level_has_laws_and_includes_those_before_it() -> None:
    assert {law.level for law in LAWS} == set(LEVELS)
    for level in LEVELS:
        assert {law.level for law in laws_up_to(level)} == set(LEVELS[: LEVELS.index(level) + 1])


def test_an_unknown_law_is_an_error_that_lists_the_laws() -> None:
    with pytest.raises(ConfigError, match=r"no law nonsense; wanted one of refs_resolve"):
        laws_up_to("C4", ["nonsense"])


def test_a_law_whose_needs_are_not_met_is_skipped_with_the_capability(kit: Kit) -> None:
    without = Kit(replace(REFERENCE, package=replace(REFERENCE.package, graphs={})), kit.folder)
    law = next(law for law in LAWS if law.name == "replay_is_eager")
    assert law.cases(without.target) == ()
    outcome = run_case(without, law, "full/dense")
    assert (outcome.verdict, outcome.text) == ("skipped", "the device has no graphs")


def test_what_a_device_raises_is_a_broken_law_with_its_traceback(kit: Kit) -> None:
    broken = replace(REFERENCE, package=replace(REFERENCE.package, bring_up="nowhere:AT_ALL"))
    law = next(law for law in LAWS if law.name == "tiny")
    outcome = run_case(Kit(broken, kit.folder), law, "dense")
    assert outcome.verdict == "failed" and "there is no module 'nowhere'" in outcome.text

"""Each law catches each mutant that it names; a law that nothing can break proves nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.kit_run import Kit, catches
from sglcore.conformance.law import Law
from sglcore.conformance.mutant import Mutant, PlantingError
from sglcore.conformance.mutants.mutants_attention import HALF_SCORES
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.conformance.target import Target

PAIRS = [(law, mutant) for law in LAWS for mutant in law.mutants]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The reference with the text of its bring-up, so that no law is skipped."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "bring_up.txt").write_text(REFERENCE.order().text())
    return replace(REFERENCE, folder=folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("law", "mutant"), PAIRS, ids=[f"{law.name}-{mutant.name}" for law, mutant in PAIRS])
def test_the_law_catches(law: Law, mutant: Mutant, target: Target, models: Path) -> None:
    caught, text = catches(Kit(target, models), law, mutant)
    assert caught, text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_scores_are_caught_where_all_else_is_half_too(dtype: str, target: Target, models: Path) -> None:
    law = next(law for law in LAWS if law.name == "attention_is_reference")
    mutant = replace(HALF_SCORES, facts=lambda facts: replace(facts, dtypes=(dtype,)))
    caught, text = catches(Kit(target, models), law, mutant)
    assert caught and dtype in text, text


def test_a_mutant_that_harms_nothing_is_not_caught(target: Target, models: Path) -> None:
    harmless = Mutant(name="none", says="", steps=MappingProxyType({"worker": lambda worker: worker}))
    law = next(law for law in LAWS if law.name == "tiny")
    caught, text = catches(Kit(target, models), law, harmless)
    assert (caught, text) == (False, "none passes tiny[dense], tiny[window], tiny[moe]")


def test_a_defect_that_can_not_be_planted_is_no_catch(target: Target, models: Path) -> None:
    def fails(worker: object) -> object:
        raise TypeError("it has no such part")

    clumsy = Mutant(name="clumsy", says="", steps=MappingProxyType({"worker": fails}))
    law = next(law for law in LAWS if law.name == "tiny")
    with pytest.raises(PlantingError, match="what 'worker' built"):
        catches(Kit(target, models), law, clumsy)
    nowhere = Mutant(name="nowhere", says="", steps=MappingProxyType({"no such step": fails}))
    with pytest.raises(PlantingError, match="no step no such step"):
        catches(Kit(target, models), law, nowhere)

"""The kit on a device with an opaque worker: it starts in one step, which is none of the torch
runtime's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.catalogue import LAWS
from sglcore.conformance.kit_run import Kit, Outcome, catches, run_case
from sglcore.conformance.law import Law, LawBroken
from sglcore.conformance.laws.laws_package import _states_sizes
from sglcore.conformance.mutant import Mutant
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.conformance.target import Target
from sglcore.core.ledger import DecisionLedger
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.worker.model_worker import ModelWorker

WITHOUT = "the device has no torch_runtime"
BEYOND = frozenset({"torch_runtime", "proposals", "rows", "slices"})
SERVED = tuple(law for law in LAWS if law.level in ("C1", "C2", "C4") and law.needs.isdisjoint(BEYOND))
OPEN_TO_ALL = ("opens_and_closes", "two_runners", "stats_are_true")


def worker(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    ledger: DecisionLedger,
    progress: Any,
    model_path: Path,
) -> ModelWorker:
    """The reference, started in one step."""
    given = {"config": config, "package": package, "facts": facts, "ledger": ledger}
    return REFERENCE.order().run({**given, "progress": progress, "model_path": model_path})["worker"]


ORDER = BringUp((worker,))
BOX = Target(replace(REFERENCE.package, bring_up=f"{__name__}:ORDER"), "sglcore")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    made = Kit(BOX, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def run(kit: Kit, law: Law) -> list[Outcome]:
    """Run every case of a law."""
    return [run_case(kit, law, case) for case in law.cases(BOX)]


def law_named(name: str) -> Law:
    """Return one law of the kit."""
    return next(law for law in LAWS if law.name == name)


def test_it_is_not_taken_for_a_torch_runtime() -> None:
    assert "torch_runtime" not in BOX.capabilities()


@pytest.mark.parametrize("law", SERVED, ids=lambda law: law.name)
def test_a_law_of_the_worker_holds_for_it(law: Law, kit: Kit) -> None:
    assert {outcome.verdict for outcome in run(kit, law)} == {"passed"}


def test_a_law_about_kernels_is_skipped_and_says_why(kit: Kit) -> None:
    outcomes = run(kit, law_named("kernel_is_reference"))
    assert {(outcome.verdict, outcome.text) for outcome in outcomes} == {("skipped", WITHOUT)}
    assert not run(kit, law_named("attention_is_reference"))


@pytest.mark.parametrize("name", OPEN_TO_ALL)
def test_the_law_catches_what_can_be_planted_in_it(name: str, kit: Kit) -> None:
    law = law_named(name)
    found = {mutant.name: catches(kit, law, mutant)[0] for mutant in law.mutants if not mutant.needs}
    assert found and all(found.values()), found


def test_a_defect_that_needs_another_runtime_is_not_planted(kit: Kit) -> None:
    law = law_named("two_runners")
    needy = next(mutant for mutant in law.mutants if mutant.needs)
    assert catches(kit, law, needy) == (None, f"{needy.name} cannot be planted: {WITHOUT}")


def test_a_defect_needs_nothing_unless_it_says_so() -> None:
    assert Mutant(name="none", says="").needs == frozenset()


class Mute:
    """A backend without facts."""


class Vague:
    """A backend with one size where a tuple of sizes is required."""

    facts = type("Facts", (), {"head_dims": 64, "page_sizes": None, "dtypes": ("float32",)})


@pytest.mark.parametrize(
    ("backend", "text"), [(Mute, "does not state the sizes that it takes"), (Vague, "wanted tuples, or None")]
)
def test_a_backend_must_say_which_sizes_it_takes(backend: type, text: str) -> None:
    with pytest.raises(LawBroken, match=text):
        _states_sizes("own", backend)

"""A law: one sentence about a device, how it is checked, how much error it allows, and the broken
devices it catches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglcore.conformance.kit_run import Trial
    from sglcore.conformance.mutant import Mutant
    from sglcore.conformance.target import Target

LEVELS = ("C0", "C1", "C2", "C3", "C4")
"""Package, tiny run, runner, kernels and attention, serving. A level includes those before it."""

EXACT: Mapping[str, float] = MappingProxyType({})
"""The tolerance of a law that compares no floating-point numbers."""

LOGPROBS: Mapping[str, float] = MappingProxyType({"float32": 2e-4, "bfloat16": 0.15, "float16": 0.03})
"""Nats by which a log-probability of the kit's models may differ from the reference, which computes
in float32."""


class LawBroken(AssertionError):
    """Raised by a law's check: the device does not hold the law; the text says where and by how
    much."""


class NotApplicable(Exception):
    """Raised by a law's check that has nothing to check here, so that the case is skipped; the text
    says why."""


def one_case(target: Target) -> tuple[str, ...]:
    """Return the only case, "", of a law without variants."""
    return ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """One conformance check of a device: its name and level, what it demands (`says`), the function
    that checks it, the mutants that it must find, the capabilities that it needs, the error that it
    allows by dtype, and its cases."""

    name: str
    """Its name in results and gaps."""
    level: str
    """The level that includes it, one of LEVELS."""
    says: str
    """What it demands, in one sentence."""
    check: Callable[[Trial], None]
    """`check(trial)` raises LawBroken, or NotApplicable. Any other exception is a broken law
    too."""
    mutants: tuple[Mutant, ...]
    """Planted defects that it must find."""
    needs: frozenset[str] = frozenset()
    """Capabilities that it needs, by their names in `Target.capabilities`."""
    tolerance: Mapping[str, float] = field(default_factory=lambda: EXACT)
    """The allowed error, by the dtype of the model that runs."""
    cases: Callable[[Target], tuple[str, ...]] = one_case
    """Returns the names of its variants on a device; "" alone for a law without variants."""
    interpreted: frozenset[str] | None = None
    """Cases that run the device's own kernels even where those are interpreted; None: all. The
    other cases check the order of work and run the reference's kernels there, because an
    interpreted step takes a second."""

    def missing(self, capabilities: frozenset[str]) -> str:
        """Return the capabilities that this law needs and a device lacks, given those it has, as
        text with commas; empty if it lacks none."""
        return ", ".join(sorted(self.needs - capabilities))


def run_name(law: Law, case: str) -> str:
    """Return the name of one case of a law, as results and gaps have it."""
    return f"{law.name}[{case}]" if case else law.name


def up_to(level: str) -> tuple[str, ...]:
    """Return the levels that `level` ("C0" to "C4") includes, ascending, itself last. Raises
    ValueError for another text."""
    return LEVELS[: LEVELS.index(level) + 1]

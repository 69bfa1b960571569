"""A law: one sentence about a device, how it is checked, how much error it allows, and the broken devices it catches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglcore.conformance.mutant import Mutant
    from sglcore.conformance.target import Target
    from sglcore.conformance.trial import Trial

LEVELS = ("C0", "C1", "C2", "C3", "C4")
"""Package, tiny run, runner, kernels and attention, serving. A level includes those before it."""

EXACT: Mapping[str, float] = MappingProxyType({})
"""The tolerance of a law that compares no floating-point numbers."""

LOGPROBS: Mapping[str, float] = MappingProxyType({"float32": 2e-4, "bfloat16": 0.15, "float16": 0.03})
"""Nats by which a log-probability of the kit's models may differ from the reference, which computes in float32."""


class LawBroken(AssertionError):
    """The device does not hold a law; the text says where and by how much."""


class NotApplicable(Exception):
    """A law has nothing to check here; the text states the missing capability."""


def one_case(target: Target) -> tuple[str, ...]:
    """A law without variants."""
    return ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """`check(trial)` raises LawBroken, or NotApplicable; what else it raises is a broken law too. `needs` are names from
    `Target.capabilities`. `tolerance` is by dtype of the model that runs. `cases` are its variants on a device.
    `interpreted` are the cases that run the device's own kernels even where those are interpreted; None: all. The others
    are about the order of work, and take the reference's kernels there, because an interpreted step takes a second."""

    name: str
    level: str
    says: str
    check: Callable[[Trial], None]
    mutants: tuple[Mutant, ...]
    needs: frozenset[str] = frozenset()
    tolerance: Mapping[str, float] = field(default_factory=lambda: EXACT)
    cases: Callable[[Target], tuple[str, ...]] = one_case
    interpreted: frozenset[str] | None = None

    def missing(self, capabilities: frozenset[str]) -> str:
        """The capabilities that this law needs and a device lacks, as text; empty if it lacks none."""
        return ", ".join(sorted(self.needs - capabilities))


def run_name(law: Law, case: str) -> str:
    """How results and gaps name one case of a law."""
    return f"{law.name}[{case}]" if case else law.name


def up_to(level: str) -> tuple[str, ...]:
    """The levels that a level includes."""
    return LEVELS[: LEVELS.index(level) + 1]

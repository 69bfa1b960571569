"""A mutant: one planted defect. A law that lets its mutant pass proves nothing.

A defect is planted in the package's declaration, or in what a step of the bring-up built, so that
it works on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from sglcore.device.bring_up import Again, BringUp, Step
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage

T = TypeVar("T")
TORCH = frozenset({"torch_runtime"})
"""Capabilities of a device that runs on the torch runtime."""


class PlantingError(BaseException):
    """A defect could not be planted. It is no outcome of a law, so it is a BaseException that
    passes every `except Exception`."""


Change = Callable[[Any], Any]
"""Takes what a step built; returns what the start continues with."""


def _same(declared: T) -> T:
    return declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted defect, what is wrong (`says`), and where it is planted: in the package's
    declaration, its facts, the order of the bring-up, or what its steps build."""

    name: str
    """Its name in test ids and messages."""
    says: str
    """What is wrong, in one sentence."""
    package: Callable[[DevicePackage], DevicePackage] = _same
    """Changes the declaration of the package."""
    facts: Callable[[Facts], Facts] = _same
    """Changes the facts that the package returns for its device."""
    steps: Mapping[str, Change] = field(default_factory=lambda: MappingProxyType({}))
    """By name of a bring-up step, changes what the step builds."""
    order: Callable[[BringUp], BringUp] | None = None
    """Changes the order of the bring-up. None: it does not."""
    needs: frozenset[str] = frozenset()
    """Capabilities that a device needs so that the defect can be planted, by the names that laws
    use."""
    case: str = ""
    """The case of its law that is tried first, because it is most likely to find the defect; empty:
    no preference."""


def in_runtime(name: str, says: str, facts: Callable[[Facts], Facts] = _same, **steps: Change) -> Mutant:
    """Return a mutant for devices of the torch runtime. `facts` changes the device's facts;
    `steps`: for each bring-up step with a defect, by its name, the `Change` to what it builds."""
    return Mutant(name=name, says=says, facts=facts, steps=MappingProxyType(steps), needs=TORCH)


def words_of(defect: Callable[..., Any]) -> tuple[str, str]:
    """Return the name (with spaces) and the text of a mutant: the name and docstring of the
    function that makes the defect."""
    return getattr(defect, "__name__").replace("_", " "), (defect.__doc__ or "").strip()  # noqa: B009


def wrap_steps(order: BringUp, changes: Mapping[str, Change]) -> BringUp:
    """Return the order in which each step in `changes` continues with its changed result. Raises
    PlantingError for a step that the order does not have or that other steps make again (`Again`),
    and when the step runs, if the change fails.
    """
    missing = changes.keys() - {step.provides for step in order.steps}
    if missing:
        raise PlantingError(f"the order has no step {', '.join(sorted(missing))}")
    return BringUp(_wrapped(step, changes[step.provides]) if step.provides in changes else step for step in order.steps)


def _wrapped(step: Step | Again, change: Change) -> Step:
    if isinstance(step, Again):
        raise PlantingError(f"{step.provides!r} is made again by other steps: change their results")

    def changed(**given: Any) -> object:
        built = step.function(**given)
        try:
            return change(built)
        except Exception as error:
            raise PlantingError(f"the defect could not be planted in what {step.provides!r} built") from error

    return replace(step, function=changed)


def become(thing: T, subclass: Callable[[Any], type]) -> T:
    """Turn one object into an instance of `subclass(its class)`, in place, and return it. If its
    class has `__slots__`, the subclass must have empty ones."""
    thing.__class__ = subclass(type(thing))
    return thing

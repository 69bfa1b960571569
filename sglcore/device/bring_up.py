"""Bring-up: an explicit order of steps. The needs of all steps are checked before any of them runs.

A step is a function. Its name is what it provides; its parameters are what it needs. A package
edits the order with `insert`, `replace` and `remove`; each returns a new order.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from sglcore.core.errors import BringUpError

StepFunction: TypeAlias = Callable[..., object]


@runtime_checkable
class Closeable(Protocol):
    """Something that a step built and that must be released if a later step fails."""

    def close(self) -> None:
        """Release all resources; called once."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """A function of a bring-up order. `provides`: the name of its result. `needs`: its parameters
    without defaults; each must be given, or be the result of an earlier step. `optional`: those
    with defaults; their values may be absent, but no later step may provide them.
    """

    provides: str
    function: StepFunction
    needs: tuple[str, ...]
    optional: tuple[str, ...]

    @staticmethod
    def of(function: StepFunction, provides: str = "") -> Step:
        """Return the step of a function, which provides `provides` (empty: a value of the
        function's name) and needs its parameters. Raises `BringUpError` for a parameter that is
        positional-only, `*args` or `**kwargs`.
        """
        name = getattr(function, "__name__")  # noqa: B009  a Callable need not declare its name to the type checker
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise BringUpError(
                    f"step {name!r} has the parameter {str(parameter)!r}", wanted="parameters with names"
                )
        return Step(
            provides=provides or name,
            function=function,
            needs=tuple(p.name for p in parameters if p.default is p.empty),
            optional=tuple(p.name for p in parameters if p.default is not p.empty),
        )

    def call(self, known: Mapping[str, Any]) -> Any:
        """Call the function with the values in `known` that it needs, and with the optional ones
        that are there. Returns its result; KeyError if a need is missing.
        """
        wanted = (*self.needs, *(name for name in self.optional if name in known))
        return self.function(**{name: known[name] for name in wanted})

    def line(self, width: int = 0) -> str:
        """Return one line: what the step provides, padded to `width` characters, with the function
        if its name differs, and the needs; an optional one ends in "?".
        """
        name = getattr(self.function, "__name__")  # noqa: B009
        label = self.provides if name == self.provides else f"{self.provides} ({name})"
        needs = ", ".join((*self.needs, *(f"{name}?" for name in self.optional)))
        return f"{label:<{width}}  <- {needs or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Again:
    """A step of a bring-up order that runs the functions of earlier `steps` again, as a package's
    order has them, with other inputs: `instead` maps a need to the name of the value that replaces
    it. Provides the result of the last step, or None if one of these values is None.
    """

    provides: str
    steps: tuple[str, ...]
    instead: Mapping[str, str]

    optional: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the replacement values."""
        return tuple(self.instead.values())

    def line(self, width: int = 0) -> str:
        """Return one line: what it provides with the steps, padded to `width` characters, and the
        replacements.
        """
        label = f"{self.provides} ({', '.join(self.steps)} again)"
        return f"{label:<{width}}  <- {', '.join(f'{need}={thing}' for need, thing in self.instead.items())}"

    def run(self, order: BringUp, known: Mapping[str, Any]) -> Any:
        """Run the steps of `order` again with values of `known`, which is not changed. Returns the
        result of the last step; None, without running any, if a replacement value is None."""
        given = {**known, **{need: known[thing] for need, thing in self.instead.items()}}
        if any(given[need] is None for need in self.instead):
            return None
        for name in self.steps:
            step = order.steps[order._index(name)]
            assert isinstance(step, Step)
            given[name] = step.call(given)
        return given[self.steps[-1]]


class BringUp:
    """An immutable order of start-up steps; `run` starts a device by it."""

    __slots__ = ("steps",)

    steps: tuple[Step | Again, ...]

    def __init__(self, steps: Iterable[StepFunction | Step | Again]) -> None:
        """A function in `steps` becomes a step by `Step.of`. Raises `BringUpError` if two steps
        provide the same value. Needs are checked by `check`."""
        self.steps = tuple(step if isinstance(step, (Step, Again)) else Step.of(step) for step in steps)
        names = [step.provides for step in self.steps]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BringUpError(
                f"two steps provide {', '.join(twice)}", wanted="one step for each", remedy="use replace"
            )

    def insert(
        self, step: StepFunction, *, before: StepFunction | str | None = None, after: StepFunction | str | None = None
    ) -> BringUp:
        """Return a new order with one more step directly before or after a step of this one.
        Exactly one of `before` and `after` is given: the step's function or what it provides.
        Raises `BringUpError` if not so, if there is no such step, or if the new step provides what
        another one provides.
        """
        if before is not None and after is None:
            place = self._index(before)
        elif after is not None and before is None:
            place = self._index(after) + 1
        else:
            raise BringUpError("insert needs a place in the order", wanted="either before= or after=")
        return BringUp((*self.steps[:place], Step.of(step), *self.steps[place:]))

    def replace(self, old: StepFunction | str, new: StepFunction) -> BringUp:
        """Return a new order in which the function `new` provides what the step `old` (its function
        or what it provides) provided; the name of the function may differ. Raises `BringUpError` if
        there is no such step.
        """
        place = self._index(old)
        step = Step.of(new, provides=self.steps[place].provides)
        return BringUp((*self.steps[:place], step, *self.steps[place + 1 :]))

    def remove(self, step: StepFunction | str) -> BringUp:
        """Return a new order without one step, named by its function or what it provides. Raises
        `BringUpError` if there is no such step."""
        place = self._index(step)
        return BringUp((*self.steps[:place], *self.steps[place + 1 :]))

    def check(self, given: Collection[str]) -> None:
        """Raise `BringUpError` unless every need of every step is in `given` or provided by an
        earlier step. Also if a step provides a value that is in `given`, or a later step provides a
        value that is optional for an earlier one.
        """
        known = set(given)
        for place, step in enumerate(self.steps):
            if step.provides in known:
                raise BringUpError(
                    f"step {step.provides!r} provides a value that is already given", wanted="another name"
                )
            later = {other.provides for other in self.steps[place:]}
            for need in (*step.needs, *(name for name in step.optional if name in later)):
                if need not in known:
                    raise _missing(step, need, need in later, known)
            known.add(step.provides)

    def run(self, given: Mapping[str, object], report: Callable[[str, float], None] | None = None) -> Mapping[str, Any]:
        """Check the order, then call every step. Returns the built values by name, in order,
        without those of `given`. `report` is called after each step with the name of its value and
        its time in seconds.

        Raises what `check` raises. If a step fails, the values built before it are closed in
        reverse order. The exception keeps its traceback and gets a note with the name of the step.
        """
        self.check(given.keys())
        known = dict(given)
        built: dict[str, Any] = {}
        for step in self.steps:
            start = time.perf_counter()
            try:
                made = step.call(known) if isinstance(step, Step) else step.run(self, known)
            except BaseException as error:
                error.add_note(f"in the bring-up step {step.line()}")
                _close_in_reverse(built, error)
                raise
            known[step.provides] = built[step.provides] = made
            if report is not None:
                report(step.provides, time.perf_counter() - start)
        return MappingProxyType(built)

    def text(self) -> str:
        """Return the order with the needs of each step, one line per step."""
        width = max((len(step.line().split("  <-")[0]) for step in self.steps), default=0)
        return "".join(f"{step.line(width)}\n" for step in self.steps)

    def _index(self, step: StepFunction | str) -> int:
        for place, other in enumerate(self.steps):
            if step == other.provides or (isinstance(other, Step) and step is other.function):
                return place
        name = step if isinstance(step, str) else getattr(step, "__name__")  # noqa: B009
        steps = ", ".join(other.provides for other in self.steps)
        raise BringUpError(f"there is no step {name!r} in this order", wanted=f"one of {steps or 'none'}")


def _close_in_reverse(built: Mapping[str, object], failure: BaseException) -> None:
    """Close every `Closeable` once, the last built first. Errors become notes on the failure."""
    closed: set[int] = set()
    for name, thing in reversed(tuple(built.items())):
        if not isinstance(thing, Closeable) or id(thing) in closed:
            continue
        closed.add(id(thing))
        try:
            thing.close()
        except Exception as error:
            failure.add_note(f"closing {name!r} failed too: {error!r}")


def _missing(step: Step | Again, need: str, is_later: bool, known: Collection[str]) -> BringUpError:
    found = f"step {step.provides!r} needs {need!r}"
    if need == step.provides:
        return BringUpError(f"{found}, which it provides itself", remedy=f"give {need!r}, or rename the parameter")
    if is_later:
        remedy = f"move step {need!r} before {step.provides!r}"
        return BringUpError(f"{found}, which a later step provides", wanted="it earlier", remedy=remedy)
    return BringUpError(f"{found}, which nothing provides", wanted=f"one of {', '.join(sorted(known)) or 'none'}")

"""Bring-up: an explicit order of steps. The needs of all steps are checked before any of them runs.

A step is a function. Its name is what it provides; its parameters are what it needs. The steps of
an optional feature are a nested order. A package edits the order with `insert`, `replace` and
`remove`, steps of nested orders by the same names; each returns a new order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from sglcore.core.errors import BringUpError
from sglcore.device.bring_up_steps import (
    Again,
    AnyStep,
    NestedOrder,
    Step,
    StepFunction,
    as_step,
    exported,
    is_hidden,
    nest,
)


@runtime_checkable
class Closeable(Protocol):
    """Something that a step built and that must be released if a later step fails."""

    def close(self) -> None:
        """Release all resources; called once."""
        ...


class BringUp:
    """An immutable order of start-up steps; `run` starts a device by it. `steps` has all steps in
    the order in which they run, with those of the nested orders.
    """

    __slots__ = ("steps",)

    steps: tuple[AnyStep, ...]

    def __init__(self, steps: Iterable[StepFunction | AnyStep], nested: Iterable[NestedOrder] = ()) -> None:
        """A function in `steps` becomes a step by `Step.of`. Steps of a nested order run after the
        step that they follow; with several there, those of the first nested order come first.
        Raises `BringUpError` if two steps provide the same value, and for a nested order that does
        not fit (`nest`). Needs are checked by `check`."""
        made = tuple(map(as_step, steps))
        for order in nested:
            made = nest(made, order)
        self.steps = made
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
        Exactly one of `before` and `after` is given: the step's function, what it provides, or its
        path ("speculation/draft"). Next to a step of a nested order, the new one is in that order.

        The new step may need any earlier result: what it needs of nested orders is exported, and so
        is its own result if a step outside its nested order needs it. Raises `BringUpError` unless
        one place is given, if there is no such step, or if the new step provides what another one
        provides.
        """
        if before is not None and after is None:
            other = place = self._index(before)
        elif after is not None and before is None:
            other = self._index(after)
            place = other + 1
        else:
            raise BringUpError("insert needs a place in the order", wanted="either before= or after=")
        new = replace(Step.of(step), nested_in=self.steps[other].nested_in)
        return BringUp(exported((*self.steps[:place], new, *self.steps[place:]), new))

    def replace(self, old: StepFunction | str, new: StepFunction) -> BringUp:
        """Return a new order in which the function `new` provides what the step `old` (its
        function, what it provides, or its path) provided, in the same place and nested order; the
        name of the function may differ. What it needs of nested orders is exported. Raises
        `BringUpError` if there is no such step.
        """
        place = self._index(old)
        was = self.steps[place]
        step = replace(Step.of(new, was.provides), nested_in=was.nested_in, is_exported=was.is_exported)
        return BringUp(exported((*self.steps[:place], step, *self.steps[place + 1 :]), step))

    def remove(self, step: StepFunction | str) -> BringUp:
        """Return a new order without one step, named by its function, what it provides, or its
        path. Raises `BringUpError` if there is no such step."""
        place = self._index(step)
        return BringUp((*self.steps[:place], *self.steps[place + 1 :]))

    def check(self, given: Collection[str]) -> None:
        """Raise `BringUpError` unless every need of every step is in `given` or provided by an
        earlier step, which exports it if it is in another nested order. Also if a step provides a
        value that is in `given`, if a later step provides a value that is optional for an earlier
        one, or if a step runs functions again that are not those of earlier steps.
        """
        known = set(given)
        made: dict[str, AnyStep] = {}
        for place, step in enumerate(self.steps):
            if step.provides in known:
                raise BringUpError(f"step {step.path!r} provides a value that is already given", wanted="another name")
            later = {other.provides: other for other in self.steps[place:]}
            needs = (*step.needs, *(name for name in step.optional if name in later or name in known))
            for need in needs:
                if need not in known:
                    raise _missing(step, need, later.get(need), known)
                if need in made and is_hidden(made[need], step):
                    raise _hidden(step, made[need])
            if isinstance(step, Again):
                _check_again(step, made)
            known.add(step.provides)
            made[step.provides] = step

    def run(self, given: Mapping[str, object], report: Callable[[str, float], None] | None = None) -> Mapping[str, Any]:
        """Check the order, then call every step. Returns the built values by name, in order,
        without those of `given`. `report` is called after each step with the name of its value and
        its time in seconds.

        Raises what `check` raises. If a step fails, the values built before it are closed in
        reverse order. The exception keeps its traceback and gets a note with the path of the step.
        """
        self.check(given.keys())
        known = dict(given)
        built: dict[str, Any] = {}
        steps = {step.provides: step for step in self.steps}
        for step in self.steps:
            start = time.perf_counter()
            try:
                made = step.call(known) if isinstance(step, Step) else step.run(steps, known)
            except BaseException as error:
                where = f"{step.nested_in}/" if step.nested_in else ""
                error.add_note(f"in the bring-up step {where}{step.line()}")
                _close_in_reverse({steps[name].path: thing for name, thing in built.items()}, error)
                raise
            known[step.provides] = built[step.provides] = made
            if report is not None:
                report(step.provides, time.perf_counter() - start)
        return MappingProxyType(built)

    def text(self) -> str:
        """Return the outer order with the needs of each step, one line per step, which also names
        the nested orders that have steps after it; then each nested order with its exports and the
        places of its steps."""
        names = dict.fromkeys(step.nested_in for step in self.steps if step.nested_in)
        return "\n".join((self._outer_text(), *map(self._nested_text, names)))

    def _outer_text(self) -> str:
        width = _width(step for step in self.steps if not step.nested_in)
        lines: list[str] = []
        for name, steps in self._groups():
            if not name:
                lines += [step.line(width) for step in steps]
            elif lines:
                lines[-1] += f", {name}" if "; then " in lines[-1] else f"; then {name}"
            else:
                lines.append(f"the start; then {name}")
        return "".join(f"{line}\n" for line in lines)

    def _nested_text(self, nested: str) -> str:
        own = [step for step in self.steps if step.nested_in == nested]
        lines = [f"{nested} exports {', '.join(step.provides for step in own if step.is_exported) or 'nothing'}\n"]
        place, width = "the start", _width(own)
        for name, steps in self._groups():
            if name == nested:
                lines += [f"  after {place}\n", *(f"    {step.line(width)}\n" for step in steps)]
            elif not name:
                place = steps[-1].provides
        return "".join(lines)

    def _groups(self) -> list[tuple[str, list[AnyStep]]]:
        """Return steps of the same order that run in succession, with the name of the order."""
        return [(name, list(steps)) for name, steps in groupby(self.steps, lambda step: step.nested_in)]

    def _index(self, step: StepFunction | str) -> int:
        for place, other in enumerate(self.steps):
            if step in (other.provides, other.path) or (isinstance(other, Step) and step is other.function):
                return place
        name = step if isinstance(step, str) else getattr(step, "__name__")  # noqa: B009
        steps = ", ".join(other.path for other in self.steps)
        raise BringUpError(f"there is no step {name!r} in this order", wanted=f"one of {steps or 'none'}")


def _width(steps: Iterable[AnyStep]) -> int:
    return max((len(step.line().split("  <-")[0]) for step in steps), default=0)


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


def _missing(step: AnyStep, need: str, later: AnyStep | None, known: Collection[str]) -> BringUpError:
    found = f"step {step.path!r} needs {need!r}"
    if need == step.provides:
        return BringUpError(f"{found}, which it provides itself", remedy=f"give {need!r}, or rename the parameter")
    if later is not None:
        remedy = f"move step {later.path!r} before {step.path!r}"
        return BringUpError(f"{found}, which a later step provides", wanted="it earlier", remedy=remedy)
    return BringUpError(f"{found}, which nothing provides", wanted=f"one of {', '.join(sorted(known)) or 'none'}")


def _hidden(step: AnyStep, maker: AnyStep) -> BringUpError:
    return BringUpError(
        f"step {step.path!r} needs {maker.provides!r}, which {maker.nested_in!r} keeps for its own steps",
        wanted="an export",
        remedy=f"add {maker.provides!r} to the exports of the nested order {maker.nested_in!r}",
    )


def _check_again(step: Again, made: Mapping[str, AnyStep]) -> None:
    """Raise `BringUpError` unless the functions that `step` runs again are those of steps that
    `made`, the earlier steps by name, has."""
    functions = [name for name, other in made.items() if isinstance(other, Step)]
    for name in step.steps:
        if name not in functions:
            raise BringUpError(
                f"step {step.path!r} runs {name!r} again, which is no function of an earlier step",
                wanted=f"some of {', '.join(functions) or 'none'}",
            )

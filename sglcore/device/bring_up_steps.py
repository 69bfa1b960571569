"""The steps of a bring-up order, and the nested order of an optional feature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from sglcore.core.errors import BringUpError

StepFunction: TypeAlias = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Step:
    """A function of a bring-up order. `provides`: the name of its result. `needs`: its parameters
    without defaults; each must be given, or be the result of an earlier step. `optional`: those
    with defaults; their values may be absent, but no later step may provide them. `nested_in`: the
    name of its nested order; empty: it is a step of the outer order. `is_exported`: steps outside
    the nested order may need its result, too.
    """

    provides: str
    function: StepFunction
    needs: tuple[str, ...]
    optional: tuple[str, ...]
    nested_in: str = ""
    is_exported: bool = False

    @property
    def path(self) -> str:
        """What it provides, after the name of its nested order, as "speculation/draft"."""
        return _path(self)

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
    it. Provides the result of the last step, or None if one of these values is None. `nested_in`
    and `is_exported` are those of a `Step`.
    """

    provides: str
    steps: tuple[str, ...]
    instead: Mapping[str, str]
    nested_in: str = ""
    is_exported: bool = False

    optional: ClassVar[tuple[str, ...]] = ()

    @property
    def path(self) -> str:
        """What it provides, after the name of its nested order."""
        return _path(self)

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

    def run(self, steps: Mapping[str, AnyStep], known: Mapping[str, Any]) -> Any:
        """Run the steps again, which `steps` has by name, with values of `known`, which is not
        changed. Returns the result of the last step; None, without running any, if a replacement
        value is None.
        """
        given = {**known, **{need: known[thing] for need, thing in self.instead.items()}}
        if any(given[need] is None for need in self.instead):
            return None
        for name in self.steps:
            step = steps[name]
            assert isinstance(step, Step)
            given[name] = step.call(given)
        return given[self.steps[-1]]


AnyStep: TypeAlias = Step | Again


def as_step(step: StepFunction | AnyStep) -> AnyStep:
    """Return the step itself, or the step of a function (`Step.of`)."""
    return step if isinstance(step, (Step, Again)) else Step.of(step)


def _path(step: AnyStep) -> str:
    return f"{step.nested_in}/{step.provides}" if step.nested_in else step.provides


def is_hidden(step: AnyStep, reader: AnyStep) -> bool:
    """Return whether the result of `step` belongs to a nested order that does not export it and
    that `reader` is not in."""
    return step.nested_in not in ("", reader.nested_in) and not step.is_exported


@dataclass(frozen=True, slots=True)
class NestedOrder:
    """The order of one optional feature, nested in an outer order. `name`: the feature. `places`:
    its steps in the order in which they run, by the name of the outer step that they follow.
    `exports`: the results that steps outside it may need; others are for its own steps.

    An outer order that has it runs both as one: the needs of all steps are checked before any of
    them runs, and a failure closes the results of both in reverse.
    """

    name: str
    places: Mapping[str, Sequence[StepFunction | AnyStep]]
    exports: tuple[str, ...] = ()

    def steps(self) -> Mapping[str, tuple[AnyStep, ...]]:
        """Return its steps by the name of the outer step that they follow. Raises `BringUpError`
        for an export that none of them provides.
        """
        made = {place: tuple(map(self._own, steps)) for place, steps in self.places.items()}
        names = [step.provides for steps in made.values() for step in steps]
        unknown = [name for name in self.exports if name not in names]
        if unknown:
            raise BringUpError(
                f"the nested order {self.name!r} exports {', '.join(unknown)}, which none of its steps provides",
                wanted=f"some of {', '.join(names) or 'none'}",
            )
        return made

    def _own(self, step: StepFunction | AnyStep) -> AnyStep:
        made = as_step(step)
        return replace(made, nested_in=self.name, is_exported=made.provides in self.exports)


def nest(outer: Sequence[AnyStep], order: NestedOrder) -> tuple[AnyStep, ...]:
    """Return the steps of `outer` with those of a nested order, each after the outer step that it
    follows and after what other nested orders have there. Raises `BringUpError` if there is no such
    outer step, or if `outer` has a nested order of this name.
    """
    made = list(outer)
    if any(step.nested_in == order.name for step in made):
        raise BringUpError(f"two nested orders have the name {order.name!r}", wanted="another name")
    for place, steps in order.steps().items():
        outers = [index for index, step in enumerate(made) if not step.nested_in]
        here = [made[index].provides for index in outers]
        if place not in here:
            raise BringUpError(
                f"the nested order {order.name!r} has steps after {place!r}, which is no step of the outer order",
                wanted=f"one of {', '.join(here) or 'none'}",
            )
        end = [*outers, len(made)][here.index(place) + 1]
        made[end:end] = steps
    return tuple(made)


def exported(steps: Iterable[AnyStep], new: AnyStep) -> Iterator[AnyStep]:
    """Yield the steps with what an edit that adds the step `new` exports: the results that it needs
    of nested orders, and its own if it is nested and a step outside needs it."""
    steps = tuple(steps)
    for step in steps:
        readers = (reader for reader in (steps if step is new else (new,)) if is_hidden(step, reader))
        is_read = any(step.provides in (*reader.needs, *reader.optional) for reader in readers)
        yield replace(step, is_exported=True) if is_read else step

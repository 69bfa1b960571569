"""A model as a program: operations in order, in stages; a stage ends where a wait for another rank would begin.

An operation is a function of values. It says which values it takes (and so consumes), which it only reads, and which
it gives; a program is checked when it is made, so that no value is missing, given twice, or left over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from sglcore.runtime.graphs.backend import Break


class ProgramError(Exception):
    """A value of a program that is missing, given twice, or left over."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`function(*takes, *reads)` returns the one value of `gives`, or a tuple of them. Taken values are then gone.

    One that `breaks` is never captured in a graph: it gives one value, of the shape and dtype of the first it takes.
    """

    name: str
    function: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    reads: tuple[str, ...] = ()
    breaks: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Operations between two places where ranks may wait for each other."""

    name: str
    operations: tuple[Operation, ...]


class StageState:
    """The values between operations: each is put once and taken once. `shared` ones are read by all and never taken."""

    __slots__ = ("_shared", "_values")

    def __init__(self, **shared: Any) -> None:
        self._shared = shared
        self._values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Set a value; raises `ProgramError` if it is still there from before."""
        if name in self._values:
            raise ProgramError(f"{name!r} is given, but its last value was never taken")
        self._values[name] = value

    def take(self, name: str) -> Any:
        """Remove a value and return it; raises `ProgramError` if there is none."""
        if name not in self._values:
            raise ProgramError(
                f"{name!r} is taken, but nothing gave it; there are: {', '.join(self._values) or 'none'}"
            )
        return self._values.pop(name)

    def read(self, name: str) -> Any:
        """A shared value; raises `ProgramError` if there is none."""
        if name not in self._shared:
            raise ProgramError(
                f"{name!r} is read, but it is not shared; there are: {', '.join(self._shared) or 'none'}"
            )
        return self._shared[name]

    def expect(self, names: tuple[str, ...]) -> None:
        """Raise `ProgramError` unless exactly these values are there."""
        if len(self._values) != len(names) or not all(name in self._values for name in names):
            left = [name for name in self._values if name not in names]
            raise ProgramError(f"left over: {', '.join(left) or 'none'}; there should be: {', '.join(names) or 'none'}")


class Program:
    """The stages of one layer, from the values `takes` to `gives`; raises `ProgramError` if they do not fit."""

    __slots__ = ("gives", "stages", "takes")

    def __init__(self, stages: Sequence[Stage], takes: Sequence[str], gives: Sequence[str]) -> None:
        self.stages = tuple(stages)
        self.takes = tuple(takes)
        self.gives = tuple(gives)
        state = StageState()
        for name in takes:
            state.put(name, None)
        for stage in self.stages:
            for operation in stage.operations:
                _check(operation, stage, state)
        state.expect(self.gives)


def _check(operation: Operation, stage: Stage, state: StageState) -> None:
    try:
        for name in operation.takes:
            state.take(name)
        for name in operation.gives:
            state.put(name, None)
    except ProgramError as error:
        raise ProgramError(f"operation {operation.name!r} of stage {stage.name!r}: {error}") from None


def run_stage(stage: Stage, state: StageState) -> None:
    """Run the operations of one stage in order."""
    take, read, put = state.take, state.read, state.put
    for operation in stage.operations:
        result = operation.function(
            *[take(name) for name in operation.takes], *[read(name) for name in operation.reads]
        )
        gives = operation.gives
        if len(gives) == 1:
            put(gives[0], result)
        else:
            for name, value in zip(gives, result, strict=True):
                put(name, value)


def run(program: Program, state: StageState) -> None:
    """Run one layer; raises `ProgramError` if values other than its own are in the state."""
    for stage in program.stages:
        run_stage(stage, state)
    state.expect(program.gives)


def run_layers(programs: Sequence[Program], state: StageState, first: int, last: int) -> None:
    """Run the layers first <= i < last."""
    for index in range(first, last):
        run(programs[index], state)


def walk_layers(programs: Sequence[Program], state: StageState) -> Generator[Break, Any, None]:
    """Run all layers, stopping at each operation that breaks; what is sent back is the value it gives."""
    for program in programs:
        for stage in program.stages:
            started = 0
            for place, operation in enumerate(stage.operations):
                if not operation.breaks:
                    continue
                run_stage(Stage(stage.name, stage.operations[started:place]), state)
                inputs = *map(state.take, operation.takes), *map(state.read, operation.reads)
                state.put(operation.gives[0], (yield Break(operation.function, inputs)))
                started = place + 1
            run_stage(Stage(stage.name, stage.operations[started:]), state)
        state.expect(program.gives)


def stagger(programs: Sequence[Program], states: tuple[StageState, StageState], delta: int) -> None:
    """Run two batches through all layers, the second `delta` stages behind.

    In each step the first batch goes first: with delta 0 the second may attend to what the first stores in that stage.
    """
    stages = [stage for program in programs for stage in program.stages]
    ahead, behind = states
    for step in range(len(stages) + delta):
        if step < len(stages):
            run_stage(stages[step], ahead)
        if step >= delta:
            run_stage(stages[step - delta], behind)

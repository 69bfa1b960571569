"""Programs: values given once and taken once, drivers that walk the same list, and what a compiler makes of them."""

from __future__ import annotations

import pytest
import torch

from sglcore.layers.program import Operation, Program, ProgramError, Stage, StageState, run, run_layers, stagger

LAYERS = 3


def op(name: str, takes: tuple[str, ...], gives: tuple[str, ...], function=lambda *values: values) -> Operation:
    """An operation that hands on what it gets."""
    return Operation(name, function if len(gives) != 1 else lambda *values: function(*values)[0], takes, gives)


def program_of(*operations: Operation, takes=("hidden",), gives=("hidden",)) -> Program:
    """One stage."""
    return Program((Stage("only", operations),), takes, gives)


def state_with(**values) -> StageState:
    """A state that holds values."""
    state = StageState(scale=2.0)
    for name, value in values.items():
        state.put(name, value)
    return state


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        ([op("a", ("residual",), ("hidden",))], "'a' of stage 'only': 'residual' is taken, but nothing gave it"),
        ([op("a", (), ("hidden",))], "'a' of stage 'only': 'hidden' is given, but its last value was never taken"),
        ([op("a", ("hidden",), ("hidden", "logits"))], "left over: logits; there should be: hidden"),
        ([op("a", ("hidden",), ())], "left over: none; there should be: hidden"),
        ([op("a", ("hidden",), ("x",)), op("b", ("x", "x"), ("hidden",))], "'b' of stage 'only': 'x' is taken"),
    ],
)
def test_a_program_that_does_not_fit_is_an_error_when_it_is_made(operations, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        program_of(*operations)


def test_a_value_that_no_operation_knows_is_an_error_when_it_runs() -> None:
    program = program_of(op("a", ("hidden",), ("hidden",)))
    with pytest.raises(ProgramError, match="left over: spare"):
        run(program, state_with(hidden=1, spare=2))
    with pytest.raises(ProgramError, match="'hidden' is taken, but nothing gave it"):
        run(program, state_with())


def test_shared_values_are_read_and_stay() -> None:
    double = Operation("double", lambda x, scale: x * scale, ("hidden",), ("hidden",), ("scale",))
    state = state_with(hidden=1.0)
    run_layers([program_of(double)] * LAYERS, state, 0, LAYERS)
    assert state.take("hidden") == 8.0
    with pytest.raises(ProgramError, match="'mask' is read, but it is not shared; there are: scale"):
        state.read("mask")


def test_a_part_of_the_layers_continues_where_another_stopped() -> None:
    programs = [program_of(op("a", ("hidden",), ("hidden",), lambda x, i=i: (x * 10 + i,))) for i in range(1, 5)]
    state = state_with(hidden=0)
    run_layers(programs, state, 0, 2)
    run_layers(programs, state, 2, 4)
    assert state.take("hidden") == 1234


def traced_programs(log: list[tuple[str, int]]) -> list[Program]:
    """Layers of two stages that write down who ran; the second stage of each adds what both batches did so far."""

    def layer(index: int) -> Program:
        def store(name: str, seen: tuple) -> tuple:
            log.append((name, 2 * index))
            return name, seen

        def look(name: str, seen: tuple) -> tuple:
            others = sum(1 for who, stage in log if who != name and stage == 2 * index)
            log.append((name, 2 * index + 1))
            return name, (*seen, others)

        names = ("hidden", "residual")
        stages = (Stage("store", (op("s", names, names, store),)), Stage("look", (op("l", names, names, look),)))
        return Program(stages, names, names)

    return [layer(index) for index in range(LAYERS)]


@pytest.mark.parametrize("delta", [0, 1, 2, 3])
def test_staggered_batches_run_all_stages_in_order_and_the_first_is_always_ahead(delta: int) -> None:
    log: list[tuple[str, int]] = []
    first, second = state_with(hidden="a", residual=()), state_with(hidden="b", residual=())
    stagger(traced_programs(log), (first, second), delta)
    for name in "ab":
        assert [stage for who, stage in log if who == name] == list(range(2 * LAYERS))
    for stage in range(2 * LAYERS):
        assert log.index(("a", stage)) < log.index(("b", stage))
    assert first.take("hidden") == "a" and second.take("residual") == (1,) * LAYERS
    for stage in range(delta, 2 * LAYERS):
        assert log.index(("a", stage)) < log.index(("b", stage - delta)) or delta == 0


def test_a_program_compiles_into_one_graph() -> None:
    def split(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x

    first = Operation("split", split, ("hidden",), ("hidden", "residual"), ("scale",))
    second = Operation("add", torch.add, ("hidden", "residual"), ("hidden",))
    program = Program((Stage("one", (first,)), Stage("two", (second,))), ("hidden",), ("hidden",))

    def forward(x: torch.Tensor) -> torch.Tensor:
        state = StageState(scale=2.0)
        state.put("hidden", x)
        run_layers([program] * LAYERS, state, 0, LAYERS)
        return state.take("hidden")

    x = torch.arange(5.0)
    assert torch.equal(torch.compile(forward, fullgraph=True, backend="eager")(x), x * 27)

"""Positions of transformers' classes: no walk uses more than a class defines, and the angles of
each are made from it alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend import shape_walk
from sglcore.models.transformers_backend.kernel_replacement import Replaced
from sglcore.models.transformers_backend.rope_tables import check_angles
from sglcore.models.transformers_backend.rotary_adapter import Angles, Rotary, RotaryTrace
from sglcore.models.transformers_backend.shape_walk import DoesNotRun
from tests.models.transformers.test_transformers_replacements import AnglesOfAStep
from tests.models.transformers_cases import compare, sizes_of, tiny_model

KINDS = {
    "gpt_neo": "max_position_embeddings",
    "mpt": "max_seq_len",
    "opt": "max_position_embeddings",
    "gptj": "n_positions",
    "xglm": "max_position_embeddings",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_context_is_served_as_a_long_one_is(kind: str, tmp_path: Path) -> None:
    assert compare(tiny_model(kind, {**sizes_of(kind), KINDS[kind]: 100}), tmp_path) < 1e-4


def test_a_walk_beyond_the_positions_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shape_walk, "_POSITIONS", ())
    with pytest.raises(DoesNotRun, match="does not run on shapes alone"):
        compare(tiny_model("mpt", {**sizes_of("mpt"), "max_seq_len": 100}), tmp_path)


@pytest.mark.parametrize("count", [2, 3, 7, 100, 1000, 1 << 20])
def test_angles_are_asked_for_at_the_middle_and_at_the_end_of_the_context(count: int) -> None:
    call = (torch.zeros(1, 5, 4), torch.arange(5)[None]), {}
    asked: set[float] = set()

    def seen(places: Tensor) -> Tensor:
        asked.update(places.flatten().tolist())
        return places

    check_angles(AnglesOfAStep(seen), call, count)
    assert {0, count // 2, count - 1} <= asked and max(asked) == count - 1
    for place in {count // 2, count - 1}:

        def changed(places: Tensor, place: int = place) -> Tensor:
            is_reversed = places[0, :1] > places[0, -1:]
            return torch.where(is_reversed & (places == place), places + 1, places)

        with pytest.raises(ConfigError, match=f"if the other positions differ, up to {count - 1}"):
            check_angles(AnglesOfAStep(changed), call, count)


class DoubledOtherwise(AnglesOfAStep):
    """Angles with each number next to itself from position 40 on, and in halves before."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [1, T] to cosines and sines [1, T, 4]."""
        is_late = position_ids[..., None] >= 40
        cos, sin = (
            torch.where(is_late, each.repeat_interleave(2, -1)[..., :4], each)
            for each in super().forward(x, position_ids)
        )
        return cos, sin


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("count", [40, 41])
def test_angles_that_rows_were_put_in_order_for_are_those_of_the_walk(count: int, has_order: bool) -> None:
    call = (torch.zeros(1, 5, 4), torch.arange(5)[None]), {}
    rotary = Rotary(DoubledOtherwise(lambda places: places), {"key": call}, 4)
    rotary.has_order = has_order
    build: Any = SimpleNamespace(max_positions=count, weights=torch.empty(0))
    if has_order and count == 41:
        with pytest.raises(ConfigError, match="DoubledOtherwise makes other angles than in the walk; use another mo"):
            rotary.place(build)
        return
    rotary.place(build)
    assert rotary.has_tables is (count == 40)


class DoubledByKind(AnglesOfAStep):
    """Angles with each number next to itself for one kind of layers, and in halves for others."""

    def forward(self, x: Tensor, position_ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Positions [1, T] to cosines and sines [1, T, 4]."""
        cos, sin = super().forward(x, position_ids)
        return (cos[..., [0, 0, 1, 1]], sin[..., [0, 0, 1, 1]]) if kind == "local" else (cos, sin)


def test_a_call_that_gets_no_table_is_computed_by_the_class_and_the_others_by_theirs() -> None:
    own, trace, x, places = DoubledByKind(lambda places: places), RotaryTrace(), torch.zeros(1, 5, 4), torch.arange(5)
    with trace.watching([own]):
        for kind in ("main", "local"):
            own(x, places[None], kind)
    rotary, build = Rotary(own, trace.calls[own], 4), SimpleNamespace(max_positions=9, weights=torch.empty(0))
    assert rotary.has_tables
    rotary.place(cast("Any", build))
    assert not rotary.has_tables
    assert all(type(each) is Angles for each in rotary(x, places[None], "main"))
    for found, wanted in zip(rotary(x, places[None], "local"), own(x, places[None], "local"), strict=True):
        assert torch.equal(found, wanted)


class OfAStepByKind(AnglesOfAStep):
    """Angles that depend on the positions of a step for one kind of layers alone."""

    def forward(self, x: Tensor, position_ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Positions [1, T] to cosines and sines [1, T, 4]."""
        return super().forward(x, position_ids - (position_ids.min() if kind == "wrong" else 0))


@pytest.mark.parametrize("kinds", [("wrong",), ("wrong", "right"), ("right", "wrong"), ("right", "other", "wrong")])
def test_angles_of_every_kind_of_layers_are_checked(kinds: tuple[str, ...]) -> None:
    own, trace, build = OfAStepByKind(lambda places: places), RotaryTrace(), SimpleNamespace(max_positions=100)
    with trace.watching([own]):
        for kind in kinds:
            own(torch.zeros(1, 5, 4), torch.arange(5)[None], kind)
    assert len(trace.calls[own]) == len(kinds)
    with pytest.raises(ConfigError, match="OfAStepByKind gives a position other angles"):
        Replaced(angles=trace.calls).place(cast("Any", build))


class Makes(nn.Module):
    """A module with a buffer that makes something of positions."""

    def __init__(self, formula: Callable[..., Any], is_stored: bool = False, **more: nn.Module) -> None:
        super().__init__()
        self.formula = formula
        self.register_buffer("frequencies", torch.ones(2), persistent=is_stored)
        for name, each in more.items():
            setattr(self, name, each)

    def forward(self, x: Tensor, places: Tensor, *more: Any) -> Any:
        """Positions [1, T]."""
        return self.formula(places[..., None] * torch.ones(4))


@pytest.mark.parametrize(
    ("own", "more", "is_recorded"),
    [
        (Makes(lambda made: (made, made)), (), True),
        (Makes(lambda made: (made, made)), ("main", 3), True),
        (Makes(lambda made: (made, made)), (torch.ones(1, 5),), True),
        (Makes(lambda made: (made, made)), (torch.ones(1, 5).long(),), False),
        (Makes(lambda made: [made, made]), (), False),
        (Makes(lambda made: (made, made, made)), (), False),
        (Makes(lambda made: (made, 1.0)), (), False),
        (Makes(lambda made: (made, made[0])), (), False),
        (Makes(lambda made: (made[:, 1:], made[:, 1:])), (), False),
        (Makes(lambda made: (made, made), is_stored=True), (), False),
        (Makes(lambda made: (made, made), part=nn.Identity()), (), False),
    ],
)
def test_cosines_and_sines_are_two_tensors_made_of_one_tensor_of_positions(
    own: nn.Module, more: tuple[Any, ...], is_recorded: bool
) -> None:
    trace, given = RotaryTrace(), (torch.zeros(1, 5, 4), torch.arange(5)[None], *more)
    with trace.watching([own]):
        found = own(*given)
    assert list(trace.made) == [own] * is_recorded and not own._forward_hooks
    if is_recorded:
        assert [id(each) for each in found] == [id(each) for each in trace.made[own]]
        ((args, named),) = trace.calls[own].values()
        assert all(each is other for each, other in zip(args, given, strict=True)) and named == {}

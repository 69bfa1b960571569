"""Layers of transformers' classes that attend to another layer's keys and values: the engine stores
these once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.models.transformers_backend import transformers_model
from sglcore.models.transformers_backend.attention_adapter import attention_layers
from sglcore.models.transformers_backend.shape_walk import AttentionCall, walk
from tests.models.transformers.test_transformers_models import empty, sizes_of
from tests.models.transformers_cases import compare, compare_served, load, tiny_model


def tiny(kind: str) -> Any:
    """A model as in the sweep: four layers; the last two have no keys of their own."""
    return tiny_model(kind, sizes_of(kind))


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_keys_that_layers_share_are_kept_once(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    assert [layer.sliding_window for layer in load(model, tmp_path).attention_layers] == [6, None]
    assert max(compare(model, tmp_path), compare_served(model, tmp_path)) <= 2e-4


def shared(calls: tuple[AttentionCall, ...], reader: int, source: int) -> tuple[AttentionCall, ...]:
    """The calls, with call `reader` attending to the keys and values of call `source`."""
    return tuple(replace(each, cells=source) if place == reader else each for place, each in enumerate(calls))


def change_calls(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Make models use changed attention calls."""
    patch.setattr(
        transformers_model,
        "attention_layers",
        lambda model, calls, *given: attention_layers(model, change(calls), *given),
    )


@pytest.mark.parametrize(
    "defect",
    [
        lambda calls: shared(calls, 2, 1),  # KV of a layer without a sliding window
        lambda calls: shared(shared(calls, 1, 0), 3, 0),  # read by a layer that has its own keys
    ],
    ids=["another layer's", "where there are others"],
)
def test_cells_of_another_layer_are_found(
    defect: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_calls(monkeypatch, defect)
    assert compare(tiny("gemma4_text"), tmp_path) > 0.01


def test_layers_behind_one_that_reads_are_numbered_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_calls(monkeypatch, lambda calls: shared(shared(calls, 1, 0), 3, 3))
    assert [layer.layer_id for layer in load(tiny("gemma4_text"), tmp_path).attention_layers] == [0, 1]


def writes_to(place: int) -> Callable[[Any], None]:
    """A pre-hook by which a layer doubles the shared keys (0) or values (1)."""

    def write(module: Any, args: Any, given: dict[str, Any]) -> None:
        for keys_and_values in given["shared_kv_states"].values():
            torch.mul(keys_and_values[place], 2, out=keys_and_values[place])

    return lambda attention: attention.register_forward_pre_hook(write, with_kwargs=True)


@pytest.mark.parametrize(
    ("change", "cells"),
    [
        (lambda attention: None, 1),
        (writes_to(0), 3),
        (writes_to(1), 3),
        (lambda attention: setattr(attention, "scaling", 0.5), 3),
    ],
    ids=["as they are", "keys written to", "values written to", "another scale"],
)
def test_only_what_nobody_wrote_to_and_what_is_read_alike_is_the_same(
    change: Callable[[Any], None], cells: int
) -> None:
    model = empty("gemma4_text")
    change(model.model.layers[3].self_attn)
    assert [call.cells for call in walk(model)] == [0, 1, 0, cells]

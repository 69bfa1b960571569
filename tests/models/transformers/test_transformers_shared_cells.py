"""Layers of transformers' classes that attend to another layer's keys and values: the engine stores
these once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sglcore.models.transformers_backend import transformers_model
from sglcore.models.transformers_backend.alibi_slopes import Places
from sglcore.models.transformers_backend.attention_adapter import PagedAttention, Several, attention_layers
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


class Attends(nn.Module):
    """Stands for a layer's attention; calls the attention function with each of `calls`."""

    def __init__(self, config: Any, calls: Callable[[Tensor, Tensor, Tensor], list[dict[str, Any]]]) -> None:
        super().__init__()
        self._config, self._calls = config, calls

    def forward(self, hidden_states: Tensor, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
        """Hidden states [1, T, 64], by four heads."""
        query = hidden_states.view(1, -1, 4, 16).transpose(1, 2)
        for given in self._calls(query, query.clone(), query.clone()):
            named = {"query": query, "attention_mask": attention_mask, **given}
            ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation](self, **named)
        return hidden_states, None


@pytest.mark.parametrize(
    ("calls", "cells"),
    [
        (lambda q, k, v: [{"key": k, "value": v}, {"key": k, "value": v}], [0, 0]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": k, "value": v, "query": q * 2}], [0, 0]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": k, "value": k}], [0, 1]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": v, "value": v}], [0, 1]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": v, "value": k}], [0, 1]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": k, "value": v.clone()}], [0, 1]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": k, "value": v, "softcap": 3.0}], [0, 1]),
        (lambda q, k, v: [{"key": k, "value": v}, {"key": k, "value": v, "query": q[:, :2]}], [0, 1]),
        (lambda q, k, v: [{"key": x, "value": v} for x in (k, q, k, q)], [0, 1, 0, 1]),
    ],
)
def test_calls_share_cells_if_keys_and_values_and_all_else_are_one(calls: Any, cells: list[int]) -> None:
    model = empty("llama")
    model.model.layers[0].self_attn = Attends(model.config, calls)
    assert [each.cells for each in walk(model)][: len(cells)] == cells


def call(module: nn.Module, cells: int, **facts: Any) -> AttentionCall:
    """A call of attention by two heads that reads the keys and values of call `cells`."""
    plain: dict[str, Any] = {"head_dim": 8, "value_dim": 8, "window": None, "softcap": None, "sinks": None}
    return AttentionCall(module, num_heads=2, num_kv_heads=1, scaling=0.5, cells=cells, **{**plain, **facts})


def attached(*calls: AttentionCall, is_encoder: bool = False) -> tuple[Any, list[Several]]:
    """The layers of these calls, and the attentions that begin anew with a forward."""
    weights = SimpleNamespace(device=torch.device("cpu"))
    build: Any = SimpleNamespace(config=SimpleNamespace(is_encoder=is_encoder), weights=weights, dtype=torch.float32)
    return attention_layers(nn.Module(), calls, {}, build, Places(torch.float32))


@pytest.mark.parametrize(
    ("keys", "values", "slopes", "wide"),
    [
        (8, 8, None, 8),
        (12, 8, None, 12),
        (8, 12, None, 12),
        (8, 8, (0.5, 0.25), 16),
        (8, 14, (0.5, 0.25), 32),
        (14, 8, (0.5, 0.25), 32),
    ],
)
@pytest.mark.parametrize("is_encoder", [False, True])
def test_a_layer_is_as_wide_as_the_wider_of_keys_and_values(
    keys: int, values: int, slopes: tuple[float, ...] | None, wide: int, is_encoder: bool
) -> None:
    facts = {"head_dim": keys, "value_dim": values, "window": 7, "softcap": 3.0, "slopes": slopes}
    ((layer,), several) = attached(call(nn.Module(), 0, **facts), is_encoder=is_encoder)
    assert (layer.head_dim, layer.sliding_window, layer.softcap, layer.scaling) == (wide, 7, 3.0, 0.5)
    assert (layer.num_heads, layer.num_kv_heads, layer.cached, several) == (2, 1, not is_encoder, [])
    assert layer.is_exact is (slopes is not None)


def test_calls_that_store_have_layers_in_order_and_the_others_read_theirs() -> None:
    first, second, third = (nn.Module() for _ in range(3))
    calls = call(first, 0), call(second, 1), call(first, 2), call(third, 1), call(third, 0)
    layers, several = attached(*calls)
    assert [layer.layer_id for layer in layers] == [0, 1, 2]
    own: list[Any] = [first.sglcore_attention, third.sglcore_attention]
    assert several == own and type(second.sglcore_attention) is PagedAttention
    found = [[each.layer for each in one._calls] for one in own]
    assert found == [[layers[0], layers[2]], [layers[1], layers[0]]]


class Layer:
    """Stands for an attention layer of two heads and one key head: gives the values for both."""

    num_heads, num_kv_heads, head_dim, cached = 2, 1, 8, True

    def __init__(self, cells: object) -> None:
        self.cells = lambda: cells
        self.given: list[Any] = []

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.given = [q, k, v]
        return torch.zeros_like(q) if v is None else v.repeat(1, 2)


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("cells", [None, (1, 2, 3)])
def test_keys_are_left_out_only_if_another_call_has_stored_them(stores: bool, cells: object) -> None:
    """An encoder keeps none, so each call brings its own."""
    layer, build = Layer(cells), cast("Any", None)
    attend = PagedAttention(cast("Any", layer), None, stores, build, Places(torch.float32), None)
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 5)
    out = attend(query, key, value)
    assert out.shape == (1, 3, 2, 5) and torch.equal(layer.given[0], query[0].transpose(0, 1).reshape(3, 16))
    if not stores and cells is not None:
        assert layer.given[1:] == [None, None]
        return
    assert torch.equal(layer.given[1], key[0, 0]) and torch.equal(layer.given[2][:, :5], value[0, 0])
    assert not layer.given[2][:, 5:].any() and torch.equal(out[0, :, 1], value[0, 0])

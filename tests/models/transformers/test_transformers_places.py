"""Position biases (ALiBi) in scores that transformers' classes compute themselves, expressed as
additional columns of queries and keys."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomBlock

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.models.single_steps import FACTS, Steps
from sglcore.models.transformers_backend.alibi_slopes import (
    COLUMNS,
    FARTHEST,
    Places,
    key_columns,
    query_columns,
    slopes_of,
    wide_head,
)
from sglcore.models.transformers_backend.verified_types import PROVEN
from sglcore.runtime.memory.memory_bring_up import sizes
from sglcore.runtime.memory.pools import PER_HEAD
from tests.models.transformers_cases import compare, load, sizes_of, tiny_model, whole

SLOPES = tuple(2.0 ** -(0.5 * head) for head in range(1, 17))


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_places_of_keys_are_in_the_scores(kind: str, tmp_path: Path) -> None:
    assert kind in PROVEN
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_columns_are_slopes_times_places_in_every_type(dtype: torch.dtype) -> None:
    places = torch.cat((torch.arange(5000), torch.arange(0, FARTHEST, 509), torch.tensor([FARTHEST - 1])))
    keys = key_columns(places).to(dtype)
    assert torch.equal(keys.double() @ torch.tensor([512.0, 1.0, 0.0, 0.0], dtype=torch.float64), places.double())
    found = query_columns(SLOPES, 0.125).to(dtype)[:, 0].double() @ keys.double().T * 0.125
    wanted = torch.tensor(SLOPES, dtype=torch.float64)[:, None] * places
    assert torch.allclose(found, wanted, rtol=2**-15, atol=0)


def test_slopes_are_those_of_a_line() -> None:
    line = torch.tensor(SLOPES)[:, None, None] * (torch.arange(40) - 7)
    assert slopes_of(line, 16, 0.5) == pytest.approx([slope / 2 for slope in SLOPES], rel=1e-6)
    assert slopes_of(line.bfloat16(), 16, 1.0) is None and slopes_of(line**2, 16, 1.0) is None
    assert slopes_of(line.expand(16, 3, 40), 16, 1.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_are_not_rounded_to_the_models_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(tiny_model("bloom", {**sizes_of("bloom"), "num_attention_heads": 2}), tmp_path, dtype)
    assert {layer.head_dim for layer in model.attention_layers} == {64}
    columns = model._decoder.h[0].self_attention.sglcore_attention._columns
    assert torch.equal(columns, query_columns((2**-4, 2**-8), 32**-0.5).to(dtype))


def test_a_step_of_more_tokens_than_the_class_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for part in ("eager_attention", "kernel_replacement"):
        monkeypatch.setattr(f"sglcore.models.transformers_backend.{part}.LENGTHS", (3, 14))
    own = tiny_model("mpt", {**sizes_of("mpt"), "max_seq_len": 16})
    first, second = (torch.arange(3, 16).roll(by) for by in (0, 5))
    found = Steps(load(own, tmp_path)).logprobs({1: first.tolist(), 2: second.tolist()})
    assert torch.allclose(found, torch.cat((whole(own, first), whole(own, second))), atol=2e-4)


def test_slopes_of_other_heads_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def turned(bias: Tensor, heads: int, times: float) -> tuple[float, ...]:
        return (slopes_of(bias, heads, times) or ())[::-1]

    monkeypatch.setattr("sglcore.models.transformers_backend.eager_attention.slopes_of", turned)
    with pytest.raises(ConfigError, match="BloomAttention .* attention differs"):
        load(tiny_model("bloom", sizes_of("bloom")), tmp_path)


def of_near_places(bias: Tensor) -> Tensor:
    return bias.minimum(bias[..., :1000].amax(-1, keepdim=True))


def of_short_texts(bias: Tensor) -> Tensor:
    return bias / (1 if bias.shape[-1] < 512 else 2)


@pytest.mark.parametrize("layers", [(0, 1, 2), (2,)])
@pytest.mark.parametrize(
    ("changed", "found"), [(of_near_places, "no slopes"), (of_short_texts, "a first slope of 0.125")]
)
def test_slopes_that_are_others_with_many_tokens_are_refused(
    changed: Any, found: str, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = BloomBlock.forward

    def forward(self: Any, hidden_states: Tensor, alibi: Tensor, *given: Any, **named: Any) -> Any:
        bias = changed(alibi) if self.self_attention.layer_idx in layers else alibi
        return own(self, hidden_states, bias, *given, **named)

    monkeypatch.setattr(BloomBlock, "forward", forward)
    with pytest.raises(
        ConfigError, match=f"BloomAttention .* its bias has {found} with 4096 keys, and a first slope of 0.25 with 260"
    ):
        load(tiny_model("bloom", {**sizes_of("bloom"), "max_position_embeddings": 8192}), tmp_path)


def test_layers_that_attend_with_few_tokens_alone_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = BloomBlock.forward

    def forward(self: Any, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        if hidden_states.shape[1] > 1000 and self.self_attention.layer_idx == 0:
            return hidden_states, None
        return own(self, hidden_states, *given, **named)

    monkeypatch.setattr(BloomBlock, "forward", forward)
    with pytest.raises(ConfigError, match="BloomForCausalLM .* other layers attend with many tokens than with few"):
        load(tiny_model("bloom", {**sizes_of("bloom"), "max_position_embeddings": 8192}), tmp_path)


def test_layers_whose_biases_are_parts_of_one_tensor_have_each_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = BloomBlock.forward

    def forward(self: Any, hidden_states: Tensor, alibi: Any, *given: Any, **named: Any) -> Any:
        layer, heads = self.self_attention.layer_idx, alibi.shape[0]
        if layer == 0:
            alibi.parts = torch.cat([alibi * (times + 1) for times in range(3)])
        return own(self, hidden_states, alibi.parts[layer * heads : (layer + 1) * heads], *given, **named)

    monkeypatch.setattr(BloomBlock, "forward", forward)
    assert compare(tiny_model("bloom", sizes_of("bloom")), tmp_path) < 2e-4


def places_of_the_step(self: Any, positions: Tensor) -> None:
    self.columns = key_columns(torch.arange(len(positions)))


def places_of_one_digit(self: Any, positions: Tensor) -> None:
    self.columns = key_columns(positions % 8)


@pytest.mark.parametrize("planted", [places_of_the_step, places_of_one_digit])
def test_other_places_are_seen(planted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Places, "begin", planted)
    assert compare(tiny_model("bloom", sizes_of("bloom")), tmp_path) > 1e-2


def test_a_context_whose_places_are_not_exact_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sglcore.models.transformers_backend.transformers_model.FARTHEST", 128)
    with pytest.raises(ConfigError, match="the context is 131072, and positions .* exact up to 128"):
        load(tiny_model("bloom", {**sizes_of("bloom"), "max_position_embeddings": 131072}), tmp_path)


@pytest.mark.parametrize(("context", "is_served"), [(128, True), (129, False)])
def test_the_longest_context_whose_places_are_exact_is_served(
    context: int, is_served: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last position is one less than the length; the length that the error suggests is
    accepted."""
    monkeypatch.setattr("sglcore.models.transformers_backend.transformers_model.FARTHEST", 128)
    model = tiny_model("bloom", {**sizes_of("bloom"), "max_position_embeddings": context})
    with nullcontext() if is_served else pytest.raises(ConfigError, match="set --max-model-len to at most 128"):
        assert load(model, tmp_path).attention_layers


def test_cells_that_round_are_refused(tmp_path: Path) -> None:
    model, none = load(tiny_model("bloom", sizes_of("bloom")), tmp_path), cast("Any", None)
    rounding = replace(PER_HEAD, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="'int8', and keys of this model contain positions"):
        sizes(EngineConfig(kv_cache_dtype="int8"), FACTS, model, none, none, rounding)


@pytest.mark.parametrize(("head_dim", "wanted"), [(1, 8), (12, 16), (13, 32), (60, 64), (61, 128), (64, 128)])
def test_a_head_with_columns_is_the_next_power_of_two(head_dim: int, wanted: int) -> None:
    assert wide_head(head_dim) == wanted and wanted >= head_dim + COLUMNS


@pytest.mark.parametrize(
    ("shape", "heads", "is_line"),
    [
        ((4, 1, 8), 4, True),
        ((1, 4, 1, 8), 4, True),
        ((1, 2, 2, 8), 4, False),
        ((2, 2, 1, 8), 4, True),
        ((2, 4, 1, 8), 4, False),
        ((1, 1, 1, 8), 4, False),
        ((1, 4, 8, 8), 4, False),
    ],
)
def test_a_bias_has_a_row_of_keys_for_each_head(shape: tuple[int, ...], heads: int, is_line: bool) -> None:
    bias = torch.arange(shape[-1]).expand(shape).double()
    assert slopes_of(bias, heads, 0.5) == ((0.5,) * heads if is_line else None)
    assert slopes_of(torch.zeros(shape), heads, 0.5) == ((0.0,) * heads if is_line else None)


@pytest.mark.parametrize("position", [0, 1, 255, 256, 257, 511, 512, 767, 768, FARTHEST - 1])
def test_digits_of_a_position_are_exact_in_bfloat16(position: int) -> None:
    high, low, *again = key_columns(torch.tensor([position])).bfloat16()[0].tolist()
    assert (512 * high + low, again) == (position, [high, low])
    assert -256 <= low <= 255 and 0 <= high <= 256

"""The configuration of a model of transformers, as the engine reads it, and the small model that is
compared in its place."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging

from sglcore.core.errors import ConfigError
from sglcore.models.single_steps import CONTEXT
from sglcore.models.transformers_backend import equivalence_check, small_config
from sglcore.models.transformers_backend.equivalence_check import (
    LENGTH,
    OTHER,
    _loaded,
    _save,
    difference,
    random_model,
    whole,
)
from sglcore.models.transformers_backend.small_config import PARAMETERS, _kind, shrunk
from sglcore.models.transformers_backend.transformers_config import Library, described, transformers_config
from sglcore.models.transformers_backend.transformers_model import _kept
from tests.models.transformers_cases import load, sizes_of, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def fuyu(**text: Any) -> Any:
    """A configuration with a language part that has some values of its own."""
    config: Any = transformers.FuyuConfig(text_config={"model_type": "persimmon", **SIZES})
    for name, value in text.items():
        setattr(config.text_config, name, value)
    return config


def read(config: Any) -> Any:
    """Describe a configuration without a file."""
    return described(Path("nowhere"), {"architectures": ["FuyuForCausalLM"]}, Library(config), "generate")


@pytest.mark.parametrize("tie", [True, False])
def test_whether_ends_are_tied_is_said_by_the_whole_model(tie: bool) -> None:
    config = fuyu(tie_word_embeddings=not tie)
    config.tie_word_embeddings = tie
    assert read(config).tie_word_embeddings is tie


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.float16, "float16"), ("torch.bfloat16", "bfloat16"), (None, "float32")]
)
def test_a_language_part_has_a_dtype_and_sizes_of_its_own(dtype: Any, wanted: str) -> None:
    config = fuyu(dtype=dtype, hidden_size=96, vocab_size=111, num_hidden_layers=3, max_position_embeddings=80)
    config.dtype = torch.float64
    found = read(config)
    assert found.dtype == wanted
    sizes = (found.hidden_size, found.vocab_size, found.num_hidden_layers, found.context_length)
    assert sizes == (96, 111, 3, 80)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "the rope type 'dynamic'"),
        ({"attn_temperature_tuning": True}, "has attn_temperature_tuning"),
        ({"attn_temperature_tuning": False}, None),
    ],
    ids=str,
)
def test_options_for_a_whole_batch_are_refused_in_a_language_part_too(
    text: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    raw = {**fuyu(**text).to_dict(), "architectures": ["FuyuForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        assert transformers_config(tmp_path).context_length == SIZES["max_position_embeddings"]


def test_a_random_model_has_values_in_every_weight_and_runs_plainly() -> None:
    """GPT-2 begins with biases of zero and norms of one, and drops numbers in training."""
    given: Any = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4)
    model = random_model(Library(given))
    assert model.config._attn_implementation == "eager" and not model.training
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert all(0.05 < float(each.detach().std()) < 0.5 for each in model.parameters())


def test_the_class_is_made_plain_whatever_the_files_quantisation(tmp_path: Path) -> None:
    given = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    raw = {**transformers.LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": given}))
    found = transformers_config(tmp_path)
    assert found.raw["quantization_config"] == given
    assert "quantization_config" not in found.library.config.to_dict()


def test_the_same_configuration_makes_several_models_alike() -> None:
    library = Library(transformers.LlamaConfig(**SIZES))
    with torch.device("meta"):
        first = library.model(attn_implementation="eager", dtype=torch.float16)
        second = library.model()
    assert (first.config._attn_implementation, first.dtype) == ("eager", torch.float16)
    assert second.dtype is torch.float32 and second.config is not library.config
    assert library.config.dtype is None


def test_a_model_that_is_small_already_is_compared_itself() -> None:
    library = Library(transformers.LlamaConfig(**{**SIZES, "hidden_size": 512, "vocab_size": 1000}))
    assert shrunk(library) is library
    large = Library(transformers.LlamaConfig(**{**SIZES, "hidden_size": 512, "vocab_size": 10000}))
    assert shrunk(large) is not large


def test_a_small_model_is_no_larger_than_the_most_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(transformers.LlamaConfig())
    with torch.device("meta"):
        count = sum(each.numel() for each in shrunk(library).model().parameters())
    monkeypatch.setattr(small_config, "PARAMETERS", count)
    assert shrunk(library).config.num_hidden_layers == 4
    monkeypatch.setattr(small_config, "PARAMETERS", count - 1)
    said = f"no small model like 'llama' was found to compare: with 4 layers it has {count} parameters, and 0 kinds"
    with pytest.raises(ConfigError, match=said):
        shrunk(library)
    assert count < PARAMETERS


def layer(*parts: nn.Module, bias: bool = True, **options: Any) -> nn.Module:
    """A layer with options, perhaps a bias, and parts in a list."""
    made = nn.Linear(4, 4, bias=bias)
    vars(made).update(options)
    made.parts = nn.ModuleList(parts)
    return made


@pytest.mark.parametrize(
    ("one", "other", "is_one_kind"),
    [
        (layer(is_causal=True), layer(is_causal=False), False),
        (layer(window=None), layer(window=8), False),
        (layer(window=4), layer(window=8), True),
        (layer(scale=0.5), layer(scale=2.0), True),
        (layer(kind="full"), layer(kind="sliding"), False),
        (layer(bias=True), layer(bias=False), False),
        (layer(nn.Linear(4, 4)), layer(nn.Linear(8, 8), nn.Linear(2, 2)), True),
        (layer(nn.Linear(4, 4)), layer(nn.Linear(4, 4, bias=False)), False),
        (layer(nn.Linear(4, 4)), layer(nn.Identity()), False),
        (layer(nn.Linear(4, 4), nn.Identity()), layer(nn.Identity(), nn.Linear(4, 4)), True),
        (nn.Sequential(nn.ReLU(), nn.GELU()), nn.Sequential(nn.GELU(), nn.ReLU()), False),
    ],
)
def test_layers_are_of_one_kind_whatever_their_sizes(one: nn.Module, other: nn.Module, is_one_kind: bool) -> None:
    assert (_kind(one) == _kind(other)) is is_one_kind


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_shown", [False, True])
def test_a_model_is_saved_without_a_progress_bar_and_later_ones_are_as_before(
    is_shown: bool, fails: bool, request: pytest.FixtureRequest
) -> None:
    was_shown = logging.is_progress_bar_enabled()
    request.addfinalizer(logging.enable_progress_bar if was_shown else logging.disable_progress_bar)
    seen: list[bool] = []

    def save(folder: str) -> None:
        seen.append(logging.is_progress_bar_enabled())
        if fails:
            raise OSError(folder)

    (logging.enable_progress_bar if is_shown else logging.disable_progress_bar)()
    model: Any = SimpleNamespace(save_pretrained=save)
    try:
        _save(model, "nowhere")
    except OSError:
        assert fails
    assert seen == [False] and logging.is_progress_bar_enabled() is is_shown


@pytest.mark.parametrize(
    ("dtype", "strict", "wide"),
    [(torch.float32, False, False), (torch.bfloat16, True, False), (torch.float16, True, True)],
)
def test_what_a_class_keeps_in_float32_is_known_by_whole_parts_of_names(
    dtype: torch.dtype, strict: bool, wide: bool
) -> None:
    model: Any = SimpleNamespace(_keep_in_fp32_modules_strict={"gate"}, _keep_in_fp32_modules=["wo", "mlp.norm"])
    keeps = _kept(model, dtype)
    for name in ("gate", "gate.weight", "layers.0.gate", "layers.0.gate.bias"):
        assert keeps(name) is strict
    for name in ("wo", "layers.3.wo.weight", "layers.0.mlp.norm.weight"):
        assert keeps(name) is wide
    for name in ("gate_proj.weight", "layers.0.up_gate.weight", "word.weight", "layers.0.two.weight", "mlp.norms"):
        assert keeps(name) is False
    bare: Any = SimpleNamespace(_keep_in_fp32_modules_strict=None, _keep_in_fp32_modules=None)
    assert not _kept(bare, dtype)("gate.weight")


@pytest.mark.parametrize("length", [LENGTH, OTHER])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("off", [-0.5, 0.5])
def test_one_log_probability_more_or_less_is_a_difference(
    off: float, place: int, length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def changed(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        found = whole(model, tokens)
        found[place, 7] += off if len(tokens) == length else 0.0
        return found

    model = tiny_model("llama", sizes_of("llama"))
    loaded = load(model, tmp_path)
    monkeypatch.setattr(equivalence_check, "whole", changed)
    assert difference(model, loaded) == pytest.approx(abs(off), abs=1e-3)


@pytest.mark.parametrize(("positions", "wanted"), [(48, 48), (CONTEXT, CONTEXT), (4096, CONTEXT)])
def test_a_model_is_compared_in_no_more_positions_than_it_has(
    positions: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(equivalence_check, "load_model", lambda *_, **named: given.update(named))
    raw = {"architectures": ["LlamaForCausalLM"]}
    config = transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": positions})
    _loaded(described(Path("nowhere"), raw, Library(config), "generate"), "module:Name")
    assert (given["max_positions"], given["architectures"]) == (wanted, {"LlamaForCausalLM": "module:Name"})
    assert (given["device"], given["dtype"]) == ("cpu", torch.float32)

"""Parts of the backend for transformers' classes by themselves: what routers, output layers and
rotating functions are known by, and the sizes of the model that is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend.kernel_layers import Rows, as_rows
from sglcore.models.transformers_backend.output_head import PackedHead, replace_ends
from sglcore.models.transformers_backend.rotary_convention import turns
from sglcore.models.transformers_backend.router_detection import CHOOSING, routing_of, telling_logits
from sglcore.models.transformers_backend.small_config import _smaller
from sglcore.models.transformers_backend.transformers_config import transformers_config
from sglcore.models.transformers_backend.weight_names import Naming
from tests.models.transformers.test_transformers_models import empty
from tests.models.transformers.test_transformers_replacements import halves
from tests.models.transformers.test_transformers_routers import Choice, by_sigmoids

# -- routers
# --------------------------------------------------------------------------------------------------


class Rounds(Choice):
    """A router that computes in float32 and rounds its weights to the dtype of its rows."""

    def forward(self, x: Tensor) -> Any:
        """Route x [T, 16]."""
        logits, weights, experts = self.formula(linear(x.float(), self.weight.float()), self.get_buffer(CHOOSING))
        return logits, weights.to(x.dtype), experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.5, 2.826])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_scale_of_rounded_weights_is_not_rounded_itself(scale: float, normalize: bool, dtype: torch.dtype) -> None:
    router = Rounds(lambda logits, bias: by_sigmoids(logits, bias, scale, normalize), CHOOSING)
    form = routing_of(router, dtype)
    assert form is not None and (form.rules.scale, form.rules.normalize) == (scale, normalize)


@pytest.mark.parametrize("experts", [8, 48])
def test_no_router_may_choose_between_equal_logits_in_a_trial(experts: int) -> None:
    """Two right routers may order equals differently."""
    groups = [each for each in range(2, experts // 2 + 1) if experts % each == 0]
    assert all(len(row.unique()) == experts for row in telling_logits(experts, groups))


# -- rotary embedding
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [lambda q, k: (q, k, k), lambda q, k: (q,), lambda q, k: q, lambda q, k: None],
    ids=["three", "queries alone", "a tensor", "nothing"],
)
def test_a_function_that_returns_anything_but_queries_and_keys_is_not_the_kernels(changed: Any) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return changed(*halves(q, k, cos, sin))

    assert not turns(function, 8, 8) and turns(halves, 8, 8)


# -- output layers
# --------------------------------------------------------------------------------------------------


class Halved(nn.Linear):
    """A linear layer of a class's own."""

    def forward(self, input: Tensor) -> Tensor:
        """Half of the product."""
        return super().forward(input) / 2


def with_bias(model: Any) -> None:
    model.lm_head = nn.Linear(64, 97, bias=True, device="meta")


def of_its_own(model: Any) -> None:
    model.lm_head = Halved(64, 97, bias=False, device="meta")


def inside_another(model: Any) -> None:
    own = model.lm_head
    model.lm_head = nn.Sequential(own)
    model.get_output_embeddings = lambda: own


def shared_with_another(model: Any) -> None:
    model.other = nn.Linear(64, 97, bias=False, device="meta")
    model.other.weight = model.lm_head.weight


def none_at_all(model: Any) -> None:
    model.get_output_embeddings = lambda: None


def as_it_is(model: Any) -> None:
    """Change nothing."""


class Shifted(nn.Embedding):
    """An embedding of a class's own."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows plus one."""
        return super().forward(input) + 1


def of_its_own_below(model: Any) -> None:
    model.set_input_embeddings(Shifted(97, 64, device="meta"))


def shared_below(model: Any) -> None:
    model.other = nn.Embedding(97, 64, device="meta")
    model.other.weight = model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "kept", "is_head", "is_embedding"),
    [
        (as_it_is, "", True, True),
        (with_bias, "", False, True),
        (of_its_own, "", False, True),
        (inside_another, "", False, True),
        (shared_with_another, "", False, True),
        (none_at_all, "", False, True),
        (as_it_is, "lm_head.weight", False, True),
        (as_it_is, "model.embed_tokens.weight", True, False),
        (of_its_own_below, "", True, False),
        (shared_below, "", True, False),
    ],
)
def test_an_end_that_is_more_than_its_weight_stays_the_classes_own(
    change: Callable[[Any], None], kept: str, is_head: bool, is_embedding: bool
) -> None:
    model: Any = empty("llama")
    change(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = replace_ends(model, model.state_dict(keep_vars=True), lambda name: name == kept)
    assert (ends.head is not None, ends.embedding is not None) == (is_head, is_embedding)
    assert (type(model.get_output_embeddings()) is PackedHead) is is_head
    assert (type(model.get_input_embeddings()) is Rows) is is_embedding
    assert is_head or model.get_output_embeddings() is head
    assert is_embedding or model.get_input_embeddings() is embedding


def test_rows_for_kernels_are_contiguous_and_copied_only_where_they_are_not() -> None:
    whole = torch.arange(48.0).view(1, 6, 8)
    for x in (whole, whole[:, ::2], whole[..., :4]):
        assert as_rows(x).data_ptr() == x.data_ptr() and torch.equal(as_rows(x), x[0])
    for x in (whole.transpose(1, 2), whole[..., ::2], whole[..., :1].expand(1, 6, 8)):
        assert as_rows(x).stride(1) == 1 and torch.equal(as_rows(x), x[0])


# -- small configurations
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "small"),
    [
        ({"num_experts": 8}, {"num_experts": 4}),
        ({"num_experts": 8, "num_experts_per_tok": 2}, {"num_experts": 4}),
        ({"num_local_experts": 60, "num_experts_per_tok": 4}, {"num_local_experts": 10}),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8}, {"n_routed_experts": 16}),
        ({"num_experts": 6, "num_experts_per_tok": 4}, {"num_experts": 6}),
        ({"num_experts": 3}, {"num_experts": 3}),
        ({"vocab_size": 512}, {"vocab_size": 512}),
        ({"vocab_size": 513, "vocab_size_per_layer_input": 7}, {"vocab_size": 512, "vocab_size_per_layer_input": 7}),
        ({"eos_token_id": 512, "bos_token_id": 511}, {"eos_token_id": 0, "bos_token_id": 511}),
        ({"eos_token_id": [1025, 3]}, {"eos_token_id": [1, 3]}),
        ({"sliding_window": 7, "window_size": 5}, {"sliding_window": 6, "window_size": 5}),
        ({"intermediate_size": 129, "moe_intermediate_size": 127}, {"intermediate_size": 128}),
        ({"num_kv_shared_layers": 20}, {"num_kv_shared_layers": 10}),
        ({"use_cache": True, "sliding_window": None}, {"use_cache": True, "sliding_window": None}),
        ({"num_attention_heads": 32, "hidden_size": 4096}, {"num_attention_heads": 4, "hidden_size": 512}),
        ({"num_attention_heads": 32, "hidden_size": 256}, {"num_attention_heads": 8, "hidden_size": 64}),
        ({"num_attention_heads": 7, "hidden_size": 448}, {"num_attention_heads": 7, "hidden_size": 448}),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 32},
            {"num_attention_heads": 4, "num_key_value_heads": 4},
        ),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, {"num_key_value_heads": 2}),
        ({"num_attention_heads": 40, "num_key_value_heads": 8}, {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ({"num_attention_heads": 20, "num_key_value_heads": 4}, {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ({"num_attention_heads": 25, "num_key_value_heads": 5}, {"num_attention_heads": 5, "num_key_value_heads": 1}),
        ({"num_attention_heads": 32, "num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        ({"mamba_num_heads": 128, "n_groups": 8}, {"mamba_num_heads": 8, "n_groups": 8}),
        ({"num_hidden_layers": 30, "layer_types": ["a"] * 30}, {"num_hidden_layers": 4, "layer_types": ["a"] * 4}),
        ({"num_hidden_layers": 3, "layer_types": ["a"] * 3}, {"num_hidden_layers": 3, "layer_types": ["a"] * 3}),
        ({"num_hidden_layers": 30, "other": ["a"] * 29}, {"other": ["a"] * 29}),
        ({"num_hidden_layers": 30, "other": ["a"] * 31}, {"other": ["a"] * 31}),
        ({"n_layer": 30, "num_hidden_layers": None, "kinds": ["a"] * 30}, {"n_layer": 4, "kinds": ["a"] * 4}),
        ({"by": {"3": "a", "4": "b", "all": "c"}}, {"by": {"3": "a", "all": "c"}}),
        ({"text": {"model_type": "x", "vocab_size": 999}}, {"text": {"model_type": "x", "vocab_size": 512}}),
    ],
)
def test_a_small_configuration_has_the_same_options_in_small_sizes(values: Any, small: dict[str, Any]) -> None:
    found = _smaller(values, 4)
    assert found.keys() == values.keys() and {name: found[name] for name in small} == small


# -- configurations
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"hidden_size": 0}, "has hidden_size = 0; wanted"),
        ("gpt2", {"n_embd": -1}, "has n_embd = -1; wanted"),
        ("llama", {"vocab_size": 0}, "has vocab_size = 0; wanted"),
        ("llama", {"max_position_embeddings": 0}, "has max_position_embeddings = 0; wanted"),
        ("mpt", {"max_seq_len": -5}, "has max_seq_len = -5; wanted"),
        ("llama", {"num_nextn_predict_layers": "one"}, "has num_nextn_predict_layers = 'one'; wanted"),
        ("llama", {"classifier_pooling": 3}, "has classifier_pooling = 3; wanted"),
        ("llama", {"num_labels": "two"}, "transformers refuses"),
    ],
)
def test_a_wrong_number_is_named_as_in_the_file(kind: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    raw = {**CONFIG_MAPPING[kind]().to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=re.escape(words)):
        transformers_config(tmp_path)


@pytest.mark.parametrize("tie", [True, False])
def test_what_the_engine_reads_of_a_configuration_is_the_types_own(tie: bool, tmp_path: Path) -> None:
    given = {"n_embd": 48, "n_layer": 3, "vocab_size": 91, "n_positions": 77, "tie_word_embeddings": tie}
    raw = {**CONFIG_MAPPING["gpt2"](**given).to_dict(), "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = transformers_config(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (48, 3, 91)
    assert (config.context_length, config.max_position_embeddings, config.tie_word_embeddings) == (77, 77, tie)


# -- names of weights
# --------------------------------------------------------------------------------------------------


def named(
    stored: dict[str, tuple[int, ...]], operations: list[Any], sources: list[str], patch: pytest.MonkeyPatch
) -> tuple[dict[str, str], dict[str, Tensor], Tensor]:
    """The names of stored tensors, the places that they are read to, and the class's weight
    [3, 8, 6], in which `sources` are put together by `operations`."""
    converter = WeightConverter(sources, "mlp.all.weight", operations=operations)
    patch.setattr(
        "sglcore.models.transformers_backend.weight_names.get_model_conversion_mapping", lambda model: [converter]
    )
    weight = torch.zeros(3, 8, 6)
    targets = {"model.layers.0.mlp.all.weight": weight}
    model: Any = SimpleNamespace(base_model_prefix="model")
    return Naming(model, targets)(stored), targets, weight


PARTS = ["mlp.a.weight", "mlp.b.weight"]


@pytest.mark.parametrize("parts", [PARTS, PARTS[::-1]], ids=["forwards", "backwards"])
@pytest.mark.parametrize(("dim", "sizes"), [(1, (5, 3)), (2, (2, 4)), (0, (1, 2))])
def test_concatenated_weights_are_read_into_their_parts_in_order(
    dim: int, sizes: tuple[int, int], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [tuple(size if axis == dim else whole for axis, whole in enumerate((3, 8, 6))) for size in sizes]
    stored = {f"model.layers.0.{part}": shape for part, shape in zip(parts, shapes, strict=True)}
    names, targets, weight = named(stored, [Concatenate(dim)], parts, monkeypatch)
    assert names == {name: name for name in stored} and targets.keys() == stored.keys()
    given = [torch.rand(shape) for shape in shapes]
    for name, tensor in zip(stored, given, strict=True):
        targets[name].copy_(tensor)
    assert torch.equal(weight, torch.cat(given, dim))


@pytest.mark.parametrize(
    ("stored", "words"),
    [({"a": 5, "b": 2}, "have [5, 2]"), ({"a": 5}, "have [5, 0]"), ({"b": 8, "a": 1}, "have [1, 8]")],
)
def test_concatenated_weights_of_other_sizes_are_told(
    stored: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {f"model.layers.0.mlp.{part}.weight": (3, rows, 6) for part, rows in stored.items()}
    with pytest.raises(ConfigError, match=re.escape("all.weight' has 8 rows, and model.layers.0.mlp.a.")) as error:
        named(shapes, [Concatenate(1)], PARTS, monkeypatch)
    assert words in str(error.value)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_experts_one_by_one_are_read_into_the_halves_of_their_rows(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [f"mlp.*.{part}.weight" for part in order]
    stored = {f"model.layers.0.mlp.{expert}.{part}.weight": (4, 6) for part in "ba" for expert in (2, 0, 1)}
    names, targets, weight = named(stored, [MergeModulelist(0), Concatenate(1)], sources, monkeypatch)
    assert names == {name: name for name in stored} and targets.keys() == stored.keys()
    given = {name: torch.rand(4, 6) for name in stored}
    for name, tensor in given.items():
        targets[name].copy_(tensor)
    for expert in range(3):
        halves_of_one = [given[f"model.layers.0.mlp.{expert}.{part}.weight"] for part in order]
        assert torch.equal(weight[expert], torch.cat(halves_of_one))

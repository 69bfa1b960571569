"""Parts of transformers' models replaced by the engine's kernels: only if the results are the same,
and every planted defect is caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend.deferred_sums import Addend, Sum, added
from sglcore.models.transformers_backend.kernel_layers import GatedBlock, Norm, NormForm, PackedLinear, Product
from sglcore.models.transformers_backend.kernel_replacement import Replaced, replace
from sglcore.models.transformers_backend.module_probes import embedding_scale, gated_block_of, kind_of, rms_norm_of
from sglcore.models.transformers_backend.rope_tables import check_angles, doubling_of
from sglcore.models.transformers_backend.rotary_adapter import Rotary, RotaryTrace, Turn
from sglcore.models.transformers_backend.rotary_convention import turns
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable
from tests.models.transformers.test_transformers_models import empty
from tests.models.transformers_cases import compare, load, sizes_of, tiny_model

Patch = pytest.MonkeyPatch
HALF = torch.bfloat16


def replaced(kind: str, change: Callable[[Any], None] | None = None) -> tuple[Any, Replaced]:
    """A changed model on the meta device, and its replacements."""
    model = empty(kind).eval()
    if change is not None:
        change(model)
    return model, replace(model, lambda name: False)


# -- what is replaced
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "llama",
            "12 linear layers in 6 products, 3 gated blocks, 7 norms, 6 sums before a norm, 3 turned with the store",
        ),
        (
            "gemma3_text",
            "12 linear layers in 6 products, 3 gated blocks, 19 norms, 6 sums before a norm, 3 turned with the store",
        ),
        ("stablelm", "12 linear layers in 6 products, 3 gated blocks, 0 norms, 0 sums before a norm, 3 turned apart"),
        (
            "glm4",
            "12 linear layers in 6 products, 3 gated blocks, 13 norms, 6 sums before a norm, 3 turned with the store",
        ),
        (
            "granite",
            "12 linear layers in 6 products, 3 gated blocks, 7 norms, 0 sums before a norm, 3 turned with the store",
        ),
    ],
    ids=lambda given: given if len(given) < 20 else "",
)
def test_what_is_replaced_is_told(kind: str, told: str) -> None:
    assert str(replaced(kind)[1]) == told


def test_a_class_that_does_not_run_with_them_keeps_its_own_parts(monkeypatch: Patch, tmp_path: Path) -> None:
    def broken(self: Norm, x: Tensor) -> Tensor:
        raise TypeError("found a norm of another kind")

    monkeypatch.setattr(Norm, "forward", broken)
    model = tiny_model("llama", sizes_of("llama"))
    parts, _, why = load(model, tmp_path).parts.partition("; ")
    assert parts == "21 linear layers in 21 products, 0 gated blocks, 0 norms, 0 sums before a norm, 0 turned"
    assert (
        why.startswith("only linear layers are replaced, because with others: LlamaForCausalLM")
        and "of another kind" in why
    )
    assert compare(model, tmp_path) < 2e-4


@pytest.mark.parametrize("kind", ["gemma3_text", "bloom"])
def test_no_hook_of_a_walk_stays(kind: str, tmp_path: Path) -> None:
    """A hook that stays would keep tensors of every step alive."""
    model = load(tiny_model(kind, sizes_of(kind)), tmp_path)
    hooked = [type(each) for each in model._decoder.modules() if each._forward_hooks or each._forward_pre_hooks]
    assert not hooked and len(list(model._decoder.modules())) > 5


def test_an_output_layer_with_the_embeddings_weight_shares_its_form(tmp_path: Path) -> None:
    model = tiny_model("llama", {**sizes_of("llama"), "tie_word_embeddings": True})
    table = KernelTable().replace(pack_head=lambda weight: weight)
    loaded = load(model, tmp_path, kernels=table)
    assert loaded.weights.is_head_tied and loaded._output is not None
    assert not list(loaded._decoder.parameters())
    assert compare(model, tmp_path, kernels=table) < 2e-4


@pytest.mark.parametrize(
    ("kind", "changes", "is_known"),
    [("llama", {}, True), ("granite", {"logits_scaling": 4.0}, True), ("gemma2", {}, True), ("phi", {}, False)],
)
def test_what_a_class_does_to_logits_is_done(
    kind: str, changes: dict[str, Any], is_known: bool, tmp_path: Path
) -> None:
    model = tiny_model(kind, {**sizes_of(kind), **changes})
    assert (load(model, tmp_path)._output is not None) is is_known
    assert compare(model, tmp_path) < 2e-4


def test_biases_of_linear_layers_and_of_gated_blocks_are_added(tmp_path: Path) -> None:
    model = tiny_model("llama", {**sizes_of("llama"), "attention_bias": True, "mlp_bias": True})
    assert "3 gated blocks" in load(model, tmp_path).parts
    assert compare(model, tmp_path) < 2e-4


@pytest.mark.parametrize("is_read", [True, False])
def test_a_tied_model_that_reads_its_embedding_keeps_both_ends(is_read: bool) -> None:
    class ReadsEmbedding(nn.Module):
        def __init__(self, own: Any, embedding: Callable[[], Any]) -> None:
            super().__init__()
            self.own, self.embedding = own, embedding

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) + self.embedding().weight[0]

    with torch.device("meta"), no_init_weights():
        sizes = {**sizes_of("llama"), "tie_word_embeddings": True}
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes)).eval()
    model.tie_weights()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if is_read:
        model.model.layers[1].mlp = ReadsEmbedding(model.model.layers[1].mlp, model.get_input_embeddings)
    ends = replace(model, lambda name: False).ends
    assert (ends.embedding is None, ends.head is None) == (is_read, is_read)
    assert (model.get_input_embeddings() is embedding, model.get_output_embeddings() is head) == (is_read, is_read)


# -- twins
# --------------------------------------------------------------------------------------------------


class Like(nn.Module):
    """A norm that is a formula."""

    def __init__(self, formula: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.ones(16)), 1e-5, formula

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., 16]."""
        return self.formula(x, self.weight, self.eps)


def unit(x: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    ("formula", "form"),
    [
        (lambda x, w, eps: w * unit(x, eps).to(x.dtype), NormForm(1e-5, None)),
        (lambda x, w, eps: (w.float() * unit(x, eps)).to(x.dtype), NormForm(1e-5, 0.0)),
        (lambda x, w, eps: ((1 + w.float()) * unit(x, eps)).to(x.dtype), NormForm(1e-5, 1.0)),
        (lambda x, w, eps: (1 + w) * unit(x, eps).to(x.dtype), None),
        (lambda x, w, eps: w * unit(x, 0.0).to(x.dtype), None),
        (lambda x, w, eps: w * unit(x - x.mean(-1, keepdim=True), eps).to(x.dtype), None),
        (lambda x, w, eps: w * unit(x.flatten(0, -2), eps).to(x.dtype), None),
        (lambda x, w, eps: w * (x / (x.norm(dim=-1, keepdim=True) * 0.25 + eps)), None),
    ],
    ids=["plain", "wide", "offset", "offset in half", "no epsilon", "centred", "other shape", "epsilon outside"],
)
def test_a_norm_is_known_by_what_it_computes(formula: Any, form: NormForm | None) -> None:
    assert rms_norm_of(Like(formula), HALF) == form


@pytest.mark.parametrize(("numbers", "form"), [((1e-5, 2e-5), NormForm(1e-5, None)), ((1e-5, 1.00001e-5), None)])
def test_a_norm_of_which_two_forms_give_the_same_is_none(numbers: tuple[float, float], form: NormForm | None) -> None:
    norm = Like(lambda x, w, eps: w * unit(x, eps).to(x.dtype))
    vars(norm).update(zip(("eps", "other"), numbers, strict=True))
    assert rms_norm_of(norm, HALF) == form
    assert rms_norm_of(Like(norm.formula), torch.float32) == NormForm(1e-5, None), "there None and 0 are one form"


def test_parts_of_one_class_are_each_known_by_their_own_numbers() -> None:
    def change(model: Any) -> None:
        model.model.layers[1].input_layernorm.variance_epsilon = 0.25
        model.model.layers[1].mlp.act_fn = nn.GELU(approximate="tanh")

    model, _ = replaced("llama", change)
    first, second = model.model.layers[:2]
    own = empty("llama").model.layers[0].input_layernorm.variance_epsilon
    assert [each.input_layernorm._form.eps for each in (first, second)] == [own, 0.25]
    found = [each.mlp._activation for each in (first, second)]
    assert found == [KernelTable.silu_and_mul, KernelTable.gelu_tanh_and_mul]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1e-5, 1e-6),
        ("a", "b"),
        (True, False),
        (None, 1),
        ((1.0, 2), (1.0, 3)),
        ([1.0, 2], [1.0, 3]),
        (silu, torch.nn.functional.relu),
        (gelu, torch.tanh),
        (nn.SiLU(), nn.ReLU()),
        (nn.Linear(2, 2), nn.Linear(2, 2, False)),
        (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))),
    ],
    ids=lambda given: type(given).__name__,
)
def test_modules_that_differ_in_a_value_are_not_of_one_kind(first: Any, second: Any) -> None:
    """Only the first module of a kind is tried; the others are assumed to behave alike."""

    def made(value: Any) -> nn.Module:
        module = nn.Module()
        module.value = value
        return module

    assert kind_of(made(first)) != kind_of(made(second)) and kind_of(made(first)) == kind_of(made(first))


class Block(nn.Module):
    """Three linear layers with meaningless names."""

    def __init__(self, formula: Callable[..., Tensor], bias: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24, bias), nn.Linear(24, 16, bias), nn.Linear(16, 24, bias)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., 16]."""
        return self.formula(x, self.a, self.b, self.c)


@pytest.mark.parametrize(
    ("formula", "found"),
    [
        (lambda x, a, b, c: b(silu(a(x)) * c(x)), (("a", "c", "b"), KernelTable.silu_and_mul)),
        (lambda x, a, b, c: b(a(x) * silu(c(x))), (("c", "a", "b"), KernelTable.silu_and_mul)),
        (
            lambda x, a, b, c: b(gelu(a(x), approximate="tanh") * c(x)),
            (("a", "c", "b"), KernelTable.gelu_tanh_and_mul),
        ),
        (lambda x, a, b, c: b(gelu(a(x)) * c(x)), None),
        (lambda x, a, b, c: b(silu(a(x)) + c(x)), None),
        (lambda x, a, b, c: b(silu(a(x)) * c(x)) * 0.5, None),
        (lambda x, a, b, c: (b(silu(a(x)) * c(x)), None), None),
        (lambda x, a, b, c: b(silu(a(x)).clamp(max=100) * c(x)), None),
        (lambda x, a, b, c: b(silu(a(x)) * c(x).clamp(-100, 100)), None),
    ],
    ids=["silu", "the other", "gelu by tanh", "gelu", "sum", "scaled", "two results", "gate limited", "up limited"],
)
def test_a_block_is_known_by_what_it_computes(formula: Any, found: Any) -> None:
    assert gated_block_of(Block(formula), HALF) == found
    assert gated_block_of(Block(formula, bias=True), HALF) == found


def test_an_embedding_is_known_by_what_it_gives() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    class Buffered(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(9, 4)
            self.register_buffer("scale", torch.empty((), device="meta"))

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * self.get_buffer("scale").to(self.weight.dtype)

    class Shifted(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    def initialize(module: nn.Module) -> None:
        for buffer in module.buffers():
            buffer.fill_(55.4256)

    given = nn.Embedding(9, 4, padding_idx=8), Scaled(9, 4, padding_idx=8), Buffered(), Shifted(9, 4), nn.Linear(4, 9)
    found = [embedding_scale(each, HALF, initialize) for each in given]
    assert found == [1.0, 2.0, pytest.approx(55.4256), None, None]


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float = -1.0) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((sign * second, first), dim=-1) * sin[:, None]

    return turn(q), turn(k)


class AnglesOfKinds(nn.Module):
    """Cosines and sines of two frequencies, different for each kind of layer."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([0.1, 0.7]), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.frequencies * len(layer_type)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def test_each_kind_of_layers_has_angles_of_its_own_though_it_is_named() -> None:
    own, trace, places, x = AnglesOfKinds(), RotaryTrace(), torch.arange(6)[None], torch.zeros(1, 6, 4)
    with trace.watching([own]):
        for kind in ("main", "local"):
            own(x, position_ids=places, layer_type=kind)
    rotary, build = Rotary(own, trace.calls[own], 4), SimpleNamespace(max_positions=6, weights=torch.empty(0))
    rotary.place(build)  # pyright: ignore[reportArgumentType]
    for kind in ("main", "local"):
        cos, sin = own(x, places, kind)
        angles, _ = rotary(x, position_ids=places, layer_type=kind)
        assert torch.equal(angles.table, torch.cat((cos[0, :, :2], sin[0, :, :2]), dim=-1))


class AnglesOfAStep(nn.Module):
    """Angles of changed positions, in a class with a buffer, by which the engine finds such
    modules."""

    frequencies: Tensor

    def __init__(self, changed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.changed = changed
        self.register_buffer("frequencies", torch.tensor([0.1, 0.7]), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.changed(position_ids.float())[..., None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


BY_STEP: dict[str, Callable[[Tensor], Tensor]] = {
    "the longest": lambda places: places / (2 if places.max() > 64 else 1),
    "the shortest": lambda places: places - places.min(),
    "the count": lambda places: places * (1 + places.shape[1] / 1000),
    "the order": lambda places: torch.arange(places.shape[1])[None] * 1.0,
}


@pytest.mark.parametrize("what", BY_STEP)
def test_angles_that_depend_on_other_positions_of_a_step_are_refused(what: str) -> None:
    call = (torch.zeros(1, 5, 4), torch.arange(5)[None]), {}
    check_angles(AnglesOfAStep(lambda places: places / 2), call, 100)
    with pytest.raises(ConfigError, match="AnglesOfAStep gives a position other angles if the other positions differ"):
        check_angles(AnglesOfAStep(BY_STEP[what]), call, 100)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_model_whose_angles_depend_on_a_step_is_refused(kind: str, monkeypatch: Patch, tmp_path: Path) -> None:
    model = tiny_model(kind, sizes_of(kind))
    rotary = type(model.model.rotary_emb)
    own = rotary.forward

    def by_longest(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        scale = 1 if position_ids.is_meta else 1 + (position_ids.max() > 64).long()
        return own(self, x, position_ids * scale)

    monkeypatch.setattr(rotary, "forward", by_longest)
    with pytest.raises(ConfigError, match="other angles if the other positions differ"):
        load(model, tmp_path)


def test_angles_that_are_doubled_otherwise_at_later_positions_are_the_classs_own() -> None:
    class Later(AnglesOfAStep):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            angles = super().forward(x, position_ids)
            is_late = position_ids[..., None] > 40
            cos, sin = (torch.where(is_late, each.repeat_interleave(2, -1)[..., :4], each) for each in angles)
            return cos, sin

    def placed(own: nn.Module) -> Rotary:
        trace, x = RotaryTrace(), torch.zeros(1, 5, 4)
        with trace.watching([own]):
            own(x, torch.arange(5)[None])
        calls = trace.calls[own]
        assert doubling_of(own, next(iter(calls.values()))) == "halves"
        rotary = Rotary(own, calls, 4)
        rotary.place(cast("Any", SimpleNamespace(max_positions=64, weights=torch.empty(0))))
        return rotary

    assert placed(AnglesOfAStep(lambda places: places)).has_tables
    assert not placed(Later(lambda places: places)).has_tables


@pytest.mark.parametrize(
    "changed",
    [
        lambda turned, q: turned.clamp(-50, 50),
        lambda turned, q: q if q.shape[2] == 1 else turned,
        lambda turned, q: torch.cat((turned[:, :, :256], q[:, :, 256:]), dim=2),
        lambda turned, q: turned + 1e-5 * q.abs().clamp(min=10),
    ],
    ids=["a limit", "one token", "later tokens", "a part of large ones"],
)
def test_a_function_that_turns_only_a_few_small_tokens_is_not_the_kernels(changed: Any) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return changed(halves(q, k, cos, sin)[0], q), halves(q, k, cos, sin)[1]

    assert not turns(function, 8, 8) and turns(halves, 8, 8)


def test_a_function_that_turns_is_known_by_what_it_does() -> None:
    def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
            return x * cos[:, None] + other * sin[:, None]

        return turn(q), turn(k)

    assert turns(halves, 8, 8) and not turns(halves, 8, 4)
    assert not turns(neighbours, 8, 8) and not turns(neighbours, 8, 8, "halves", "neighbours")
    assert turns(neighbours, 8, 8, "neighbours", "neighbours")
    assert not turns(halves, 8, 8, "halves", "neighbours") and not turns(halves, 8, 8, "neighbours", "neighbours")
    assert not turns(lambda q, k, cos, sin: halves(q, k, cos, sin, 1.0), 8, 8)
    assert not turns(lambda q, k, cos, sin: halves(k, q, cos, sin), 8, 8)


def test_neighbours_are_turned_by_the_class_where_something_comes_before() -> None:
    class Halved(nn.Module):
        def __init__(self, own: nn.Module) -> None:
            super().__init__()
            self.own = own

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) * 0.5

    def change(model: Any) -> None:
        attention = model.model.layers[0].self_attn
        attention.k_proj = Halved(attention.k_proj)

    assert str(replaced("glm4", change)[1]).endswith("0 turned")


def test_rows_that_are_put_in_order_are_found_in_the_files(tmp_path: Path) -> None:
    model = load(tiny_model("glm4", sizes_of("glm4")), tmp_path)
    model.weights.targets.clear()
    with pytest.raises(ConfigError, match="q_proj.weight' is stored in parts"):
        model.named({})


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_heads_are_normed_and_turned_at_once(kind: str, stores: bool, monkeypatch: Patch, tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(*given: Any) -> Tensor:
        calls.append(1)
        return reference_kernels.norm_rotary_and_store(*given)

    if not stores:
        monkeypatch.setattr(BackendAttention, "cells", lambda self: None)
    table = KernelTable().replace(rotary_and_store=reference_kernels.rotary_and_store, norm_rotary_and_store=counted)
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path, kernels=table) < 2e-4
    assert bool(calls) is stores


def test_norms_of_queries_and_of_keys_have_each_their_own_epsilon(monkeypatch: Patch, tmp_path: Path) -> None:
    own = Qwen3Attention.__init__

    def other(self: Any, *given: Any, **named: Any) -> None:
        own(self, *given, **named)
        self.k_norm.variance_epsilon = 0.5

    monkeypatch.setattr(Qwen3Attention, "__init__", other)
    model = tiny_model("qwen3", sizes_of("qwen3"))
    assert model.model.layers[0].self_attn.k_norm.variance_epsilon == 0.5
    assert compare(model, tmp_path) < 2e-4


def test_heads_are_normed_before_a_rotation_by_the_classs_own_angles(monkeypatch: Patch, tmp_path: Path) -> None:
    model = tiny_model("qwen3", sizes_of("qwen3"))
    rotary = type(model.model.rotary_emb)
    own = rotary.forward

    def later_otherwise(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        is_late = position_ids[..., None] > 40
        made = own(self, x, position_ids)
        return tuple(torch.where(is_late, each.repeat_interleave(2, -1)[..., : each.shape[-1]], each) for each in made)

    monkeypatch.setattr(rotary, "forward", later_otherwise)
    assert compare(model, tmp_path) < 2e-4


class Normed(Qwen3Attention):
    """Attention in which something else also uses the normed queries, if `reads`."""

    reads = False

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **_: Any
    ) -> Any:
        """Hidden states [1, T, 64]."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        more = q.mean() if self.reads else 0
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out = attend(self, q, k, v, attention_mask, scaling=self.scaling)[0]
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)) + more, None


@pytest.mark.parametrize("reads", [True, False])
def test_heads_that_something_else_takes_too_are_normed_before_it(reads: bool) -> None:
    def change(model: Any) -> None:
        own = model.model.layers[1].self_attn
        own.__class__, own.reads = Normed, reads

    model, found = replaced("qwen3", change)
    norms = [len(found.turns[layer.self_attn].norms) for layer in model.model.layers]
    assert norms == [2, 0 if reads else 2, 2]


def test_heads_that_are_never_normed_show(tmp_path: Path) -> None:
    def turned(*given: Any) -> Tensor:
        return reference_kernels.rotary_and_store(*given[:-3])

    table = KernelTable().replace(rotary_and_store=reference_kernels.rotary_and_store, norm_rotary_and_store=turned)
    assert compare(tiny_model("qwen3", sizes_of("qwen3")), tmp_path, kernels=table) > 1e-2


# -- sums
# --------------------------------------------------------------------------------------------------


def test_a_sum_that_waits_is_the_sum_to_every_other_operation() -> None:
    residual, given = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    wanted, addend = residual + given, Addend.of(given, given[0])
    for made in (residual + addend, addend + residual):
        assert type(made) is Sum
        torch.testing.assert_close(made * 2, wanted * 2)
        torch.testing.assert_close(torch.cat([made, made]), torch.cat([wanted, wanted]))
        torch.testing.assert_close(added(made + addend), wanted + given)
        assert made.shape == (1, 3, 8) and made.total is not None and made.total.data_ptr() == added(made).data_ptr()
        torch.testing.assert_close(made.add(addend, alpha=3), wanted + 3 * given)
    assert type(addend * 2) is Tensor
    for made in (residual.add(addend, alpha=3), torch.add(residual, addend, alpha=3)):
        torch.testing.assert_close(made, residual + 3 * given)


class Doubles:
    """Stands for a norm's layer: doubles its input, and writes the sum into the residual's
    memory."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def add(self, addend: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual += addend
        return residual * 2, residual


@pytest.mark.parametrize("is_seen", [False, True], ids=["by norms alone", "after something else"])
def test_a_sum_that_two_norms_read_is_added_once(is_seen: bool) -> None:
    norm: Any = Norm("norm", torch.ones(8), NormForm(1e-5, None))
    norm._norm = Doubles()
    residual, given = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    wanted, made = (residual + given) * 2, residual + Addend.of(given, given[0])
    if is_seen:
        torch.testing.assert_close(made * 2, wanted)
    for _ in range(2):
        torch.testing.assert_close(norm(made), wanted)
    torch.testing.assert_close(added(made) * 2, wanted)


class Twice(nn.Module):
    """Stands for a decoder layer: uses an addend of the sum again afterwards."""

    def __init__(self, own: Any, what: str) -> None:
        super().__init__()
        self.norm, self.mlp, self.what = own.input_layernorm, own.mlp, what
        self.attention = own.self_attn

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Hidden states [1, T, 64]."""
        hidden, _ = self.attention(hidden_states=hidden_states, **given)
        x = self.mlp(hidden)
        total = hidden_states + x
        normed = self.norm(total)
        if self.what == "residual in a list":
            return normed + torch.cat([hidden_states])
        return normed + {"addend": x, "residual": hidden_states, "neither": total}[self.what]


@pytest.mark.parametrize("what", ["addend", "residual", "residual in a list", "neither"])
def test_only_a_sum_of_which_nobody_hears_again_waits(what: str) -> None:
    def change(model: Any) -> None:
        model.model.layers[0] = Twice(model.model.layers[0], what)

    model, _ = replaced("llama", change)
    assert model.model.layers[0].mlp.is_addend is (what == "neither")


# -- linear layers
# --------------------------------------------------------------------------------------------------


def test_layers_with_one_input_are_one_product_in_any_order() -> None:
    model, _ = replaced("llama")
    own = model.model.layers[0].self_attn
    product = own.q_proj.product
    assert product is own.k_proj.product is own.v_proj.product is not own.o_proj.product
    product.linear = lambda x: x[:, :1] * torch.arange(128.0)
    x, other = torch.ones(1, 2, 64), torch.full((1, 2, 64), 2.0)
    q, k = own.q_proj(x), own.k_proj(x)
    again, v = own.q_proj(other), own.v_proj(x)
    assert [part[0, 1, 0].item() for part in (q, k, again, v)] == [0, 64, 0, 96] and again[0, 0, 1] == 2
    assert product._x is None


class Reads(nn.Module):
    """Stands for a feed-forward block: reads a linear layer's weight or bias directly, from `least`
    tokens on."""

    def __init__(self, own: Any, least: int, what: str = "weight") -> None:
        super().__init__()
        self.inner, self.own, self.least, self.what = nn.Linear(64, 64, device="meta"), own, least, what

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [1, T, 64]."""
        x = self.own(x)
        if x.shape[1] < self.least:
            return x
        return x @ self.inner.weight if self.what == "weight" else x + self.inner.bias


def reads_a_weight(model: Any, least: int) -> None:
    """Make the first layer's block read a weight."""
    model.model.layers[0].mlp = Reads(model.model.layers[0].mlp, least)


def scales_otherwise(model: Any, least: int) -> None:
    """Make the first layer's attention scale differently for fewer than `least` tokens."""

    def scale(module: Any, args: Any, given: dict[str, Any]) -> None:
        module.scaling = 0.25 if given["hidden_states"].shape[1] < least else 0.5

    model.model.layers[0].self_attn.register_forward_pre_hook(scale, with_kwargs=True)


@pytest.mark.parametrize("plant", [reads_a_weight, scales_otherwise])
def test_what_is_otherwise_with_more_tokens_is_refused(plant: Callable[[Any, int], None]) -> None:
    replaced("llama", lambda model: plant(model, 1000))
    with pytest.raises(ConfigError, match="differently with 256 tokens than with 3"):
        replaced("llama", lambda model: plant(model, 100))


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_linear_layer_whose_weight_or_bias_is_read_stays(what: str) -> None:
    def change(model: Any) -> None:
        model.model.layers[0].mlp = Reads(model.model.layers[0].mlp, 1, what)

    model, _ = replaced("llama", change)
    own = model.model.layers[0].mlp
    assert type(own.inner) is nn.Linear and type(own.own) is GatedBlock


# -- defects
# --------------------------------------------------------------------------------------------------


def parts_in_another_order(patch: Patch) -> None:
    own = Product.part
    patch.setattr(Product, "part", lambda self, place, x: own(self, place if place == 0 else 3 - place, x))


def another_epsilon(patch: Patch) -> None:
    own = Norm.__init__
    patch.setattr(
        Norm, "__init__", lambda self, name, weight, form: own(self, name, weight, NormForm(0.1, form.offset))
    )


def gate_and_up_exchanged(patch: Patch) -> None:
    own = GatedBlock.__init__

    def exchanged(self: GatedBlock, gate_up: Product, down: Product, activation: Any) -> None:
        gate_up.parts.reverse()
        own(self, gate_up, down, activation)

    patch.setattr(GatedBlock, "__init__", exchanged)


def a_sum_without_its_first_part(patch: Patch) -> None:
    own = Sum.of.__func__  # pyright: ignore[reportFunctionMemberAccess]
    patch.setattr(Sum, "of", classmethod(lambda cls, residual, addend: own(cls, torch.zeros_like(residual), addend)))


def a_table_one_position_late(patch: Patch) -> None:
    own = Rotary._table
    patch.setattr(Rotary, "_table", lambda self, call, count: own(self, call, count + 3)[3:] * 0.9)  # pyright: ignore[reportOptionalSubscript]


def never_turned(patch: Patch) -> None:
    patch.setattr(Turn, "take", lambda self, q, k: None)


def neighbours_left_where_they_are(patch: Patch) -> None:
    own = Turn.place

    def place(self: Turn, build: Any) -> None:
        own(self, build)
        build.weights.orders.clear()

    patch.setattr(Turn, "place", place)


def a_wrong_bias(patch: Patch) -> None:
    own = PackedLinear.forward
    patch.setattr(PackedLinear, "forward", lambda self, x: own(self, x) + 0.1)


@pytest.mark.parametrize(
    "plant",
    [
        parts_in_another_order,
        another_epsilon,
        gate_and_up_exchanged,
        a_sum_without_its_first_part,
        a_table_one_position_late,
        never_turned,
        neighbours_left_where_they_are,
        a_wrong_bias,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_defect_in_what_is_replaced_shows(plant: Callable[[Patch], None], monkeypatch: Patch, tmp_path: Path) -> None:
    plant(monkeypatch)
    kind = "glm4" if plant is neighbours_left_where_they_are else "llama"
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) > 1e-2


def test_a_class_that_is_refused_for_itself_is_walked_once(tmp_path: Path, monkeypatch: Patch) -> None:
    calls: list[bool] = []

    def refused(*_: Any, is_whole: bool) -> Replaced:
        calls.append(is_whole)
        raise ConfigError("it makes its own masks")

    monkeypatch.setattr("sglcore.models.transformers_backend.transformers_model.replace", refused)
    with pytest.raises(ConfigError, match="its own masks"):
        load(tiny_model("llama", sizes_of("llama")), tmp_path)
    assert calls == [True]

"""Routers, experts and output heads of transformers' classes: replaced by the engine's kernels only
if the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter

from sglcore.models.transformers_backend import moe_adapter
from sglcore.models.transformers_backend.kernel_layers import NoDropout, Rows
from sglcore.models.transformers_backend.kernel_replacement import replace
from sglcore.models.transformers_backend.moe_adapter import serve_experts
from sglcore.models.transformers_backend.output_head import PackedHead, output_of
from sglcore.models.transformers_backend.router_detection import (
    CHOOSING,
    Router,
    SparseBlock,
    may_route,
    routing_of,
    telling_logits,
)
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable
from tests.models.transformers.test_transformers_models import empty
from tests.models.transformers_cases import compare, load, sizes_of, tiny_model

Patch = pytest.MonkeyPatch
HALF = torch.bfloat16
GROUPED = {
    "n_group": 4,
    "topk_group": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}


# -- routers
# --------------------------------------------------------------------------------------------------


class Choice(nn.Module):
    """A router that is a formula of its logits."""

    def __init__(self, formula: Callable[..., Any], extra: str = "") -> None:
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.empty(8, 16, device="meta")), formula
        if extra == "bias":
            self.bias = nn.Parameter(torch.empty(8, device="meta"))
        if extra == CHOOSING:
            self.register_buffer(CHOOSING, torch.empty(8, device="meta"))

    def forward(self, x: Tensor) -> Any:
        """Route x [T, 16]."""
        more = [] if CHOOSING not in self._buffers else [self._buffers[CHOOSING]]
        return self.formula(linear(x, self.weight, self._parameters.get("bias")), *more)


def largest(logits: Tensor, normalize: bool = False, k: int = 3) -> Any:
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(k)
    return logits, weights / weights.sum(-1, keepdim=True) if normalize else weights, experts


def of_largest(logits: Tensor) -> Any:
    best, experts = logits.topk(3)
    return logits, torch.softmax(best, dim=-1), experts


def by_sigmoids(logits: Tensor, bias: Tensor, scale: float = 2.5, normalize: bool = True) -> Any:
    scores = logits.float().sigmoid()
    experts = (scores + bias).topk(3)[1]
    weights = scores.gather(1, experts)
    return logits, scale * (weights / weights.sum(-1, keepdim=True) if normalize else weights), experts


@pytest.mark.parametrize(
    ("formula", "extra", "told"),
    [
        (largest, "", (False, False, 1.0)),
        (lambda logits: largest(logits, True), "bias", (False, True, 1.0)),
        (of_largest, "", (False, True, 1.0)),
        (lambda logits: largest(2 * logits), "", None),
        (lambda logits: largest(-logits), "", None),
        (lambda logits: (logits, 0.5 * largest(logits)[1], largest(logits)[2]), "", None),
        (lambda logits: (logits, *largest(logits)[:0:-1]), "", None),
        (lambda logits: largest(logits)[1:], "", None),
        (by_sigmoids, CHOOSING, (True, True, 2.5)),
        (lambda logits, bias: by_sigmoids(logits, bias, 1.0, False), CHOOSING, (True, False, 1.0)),
        (lambda logits, bias: by_sigmoids(logits, 0 * bias), CHOOSING, None),
        (lambda logits, bias: by_sigmoids(logits + bias, bias), CHOOSING, None),
    ],
)
def test_a_router_is_known_by_what_it_gives(formula: Any, extra: str, told: Any) -> None:
    router = Choice(formula, extra)
    assert may_route(router)
    form = routing_of(router, torch.float32)
    found = None if form is None else (form.is_sigmoid, form.rules.normalize, form.rules.scale)
    assert found == told
    assert form is None or (form.has_bias, form.rules.experts_per_token) == (extra == "bias", 3)


SHAPES = [
    (experts, groups, best, k)
    for experts in (8, 16, 64, 128, 256)
    for groups in (1, 2, 4, 8, 16)
    for best in (1, 2, 4, 8)
    for k in (1, 2, 4, 8)
    if best <= groups <= experts // 2 and k <= best * (experts // groups)
]


def grouped(experts: int, groups: int, best: int, k: int) -> nn.Module:
    """A router of transformers, with weights in the dtype of its values."""
    config: Any = SimpleNamespace(
        num_local_experts=experts, n_group=groups, topk_group=best, num_experts_per_tok=k, hidden_size=32
    )
    config.routed_scaling_factor, config.norm_topk_prob = 2.5, (experts + k) % 3 > 0
    with torch.device("meta"):
        return Dots1TopkRouter(config)


@pytest.mark.parametrize("turn", range(10))
def test_groups_of_experts_are_those_of_the_class_whatever_their_numbers(turn: int) -> None:
    for shape in SHAPES[turn::10]:
        experts, groups, best, k = shape
        form = routing_of(grouped(*shape), torch.float32)
        assert form is not None, shape
        found = form.rules.num_groups, form.rules.top_groups, form.rules.experts_per_token
        assert found == (groups, best, k) if best < groups else found == (1, 1, k), shape
        assert form.rules.normalize is ((experts + k) % 3 > 0) and form.rules.scale == 2.5, shape


@pytest.mark.parametrize("experts", [4, 16, 48, 256])
def test_the_rows_that_routers_are_tried_with_tell_all_groups_apart(experts: int) -> None:
    divisors = [each for each in range(2, experts // 2 + 1) if experts % each == 0]
    logits, bias = telling_logits(experts, divisors), torch.zeros(experts)
    pairs = [(1, 1), *((groups, best) for groups in divisors for best in range(1, min(groups, 17)))]
    for k in (1, 2, 8):
        chosen = [
            torch.zeros(len(logits), experts).scatter_(
                1, reference_kernels.sigmoid_routing(logits, bias, k, *pair, False, 1.0)[1].long(), 1
            )
            for pair in pairs
            if k <= pair[1] * (experts // pair[0])
        ]
        assert len({each.numpy().tobytes() for each in chosen}) == len(chosen), k


def by_largest_of_groups(logits: Tensor) -> Any:
    """DeepSeek-V2's group_limited_greedy with four groups, from the best two."""
    scores = logits.softmax(-1)
    taken = scores.view(-1, 4, 2).amax(-1).topk(2)[1]
    left = torch.ones(len(logits), 4, dtype=torch.bool).scatter_(1, taken, False)
    weights, experts = scores.view(-1, 4, 2).masked_fill(left[..., None], 0).view(-1, 8).topk(3)
    return logits, weights, experts


def of_hidden_groups(logits: Tensor, bias: Tensor) -> Any:
    weights, experts = reference_kernels.sigmoid_routing(logits, bias, 3, 4, 2, True, 2.5)
    return logits, weights, experts


@pytest.mark.parametrize(("formula", "extra"), [(by_largest_of_groups, ""), (of_hidden_groups, CHOOSING)])
def test_a_router_with_groups_that_nothing_names_stays_the_classes_own(formula: Any, extra: str) -> None:
    assert routing_of(Choice(formula, extra), torch.float32) is None


def test_a_router_of_a_half_type_is_known_though_it_rounds_its_weights() -> None:
    assert routing_of(Choice(of_largest), HALF) is not None
    rounded = Choice(lambda logits: (logits, largest(logits)[1].to(torch.float8_e4m3fn).to(HALF), largest(logits)[2]))
    assert routing_of(rounded, HALF) is None


def test_layers_of_torch_are_no_routers() -> None:
    assert not may_route(nn.Linear(4, 8)) and not may_route(nn.Embedding(8, 4)) and not may_route(nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("kind", "sizes", "told"),
    [
        ("mixtral", {}, "12 linear layers in 6 products, 0 gated blocks, 7 norms, 3 routers, 6 sums before a norm"),
        ("gpt_oss", {}, "3 routers, 6 sums before a norm, 3 turned with the store"),
        ("glm4_moe", GROUPED, "2 routers, 6 sums before a norm, 3 turned with the store"),
    ],
)
def test_models_with_experts_run_by_kernels_and_give_what_their_own_forward_gives(
    kind: str, sizes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = tiny_model(kind, {**sizes_of(kind), **sizes})
    assert told in load(model, tmp_path).parts
    assert compare(model, tmp_path) < 2e-4


def test_a_router_whose_logits_are_read_stays() -> None:
    class Reads(nn.Module):
        def __init__(self, own: Any) -> None:
            super().__init__()
            self.gate, self.experts = own.gate, own.experts

        def forward(self, hidden: Tensor) -> Tensor:
            logits, weights, experts = self.gate(hidden[0])
            return self.experts(hidden[0], experts, weights * logits.amax())[None]

    model: Any = empty("mixtral").eval()
    serve_experts(model)
    for layer in model.model.layers[1:]:
        layer.mlp = Reads(layer.mlp)
    found = replace(model, lambda name: False)
    assert len(found.routers) == 1 and type(model.model.layers[0].mlp.gate) is Router
    assert type(model.model.layers[1].mlp.gate).__name__ == "MixtralTopKRouter"


# -- experts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "entry"), [("mixtral", "moe"), ("gpt_oss", "clamped_moe"), ("aria_text", "moe"), ("lfm2_moe", "moe")]
)
def test_experts_are_known_by_their_gate_and_weights_are_turned_as_kernels_want_them(
    kind: str, entry: str, tmp_path: Path
) -> None:
    calls: list[bool] = []

    def seen(hidden: Tensor, weights: Tensor, ids: Tensor, *given: Any) -> Tensor:
        calls.append(all(each.is_contiguous() for each in given if isinstance(each, Tensor)))
        return getattr(reference_kernels, entry)(hidden, weights, ids, *given)

    table = KernelTable().replace(**{entry: seen})
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path, kernels=table) < 2e-4
    assert calls and all(calls)


def test_a_limit_of_experts_is_seen_however_large_it_is() -> None:
    def limited(limit: float) -> Any:
        def gate(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

        return SimpleNamespace(_apply_gate=gate)

    gates = moe_adapter._gates
    assert gates(limited(float("inf")), reference_kernels.silu_and_mul, HALF)
    assert not any(gates(limited(limit), reference_kernels.silu_and_mul, HALF) for limit in (7.0, 30.0, 100.0, 1000.0))


# -- ends
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "mixtral"])
def test_embeddings_and_output_layers_with_scales_are_the_engines(kind: str, tmp_path: Path) -> None:
    loaded = load(tiny_model(kind, {**sizes_of(kind), "tie_word_embeddings": kind != "mixtral"}), tmp_path)
    assert type(loaded._decoder.get_input_embeddings()) is Rows and loaded._output is not None
    assert loaded.weights.is_head_tied is (kind != "mixtral")


class Ends(nn.Module):
    """A causal class with a head that changes its logits."""

    base_model_prefix = "model"

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.base_model = nn.Identity(), nn.Identity()
        self.lm_head = PackedHead(nn.Linear(4, 9, False), "lm_head", None)
        self.lm_head.logits = lambda hidden: hidden.repeat(1, 2)
        self.formula = formula

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        """Hidden states [1, N, H]."""
        hidden = self.model(inputs_embeds=inputs_embeds).last_hidden_state
        return type("Out", (), {"logits": self.formula(self.lm_head(hidden))})


@pytest.mark.parametrize(
    ("formula", "is_known"),
    [
        (lambda x: x, True),
        (lambda x: x / 4, True),
        (lambda x: torch.tanh(x / 30) * 30, True),
        (lambda x: x.clamp(max=30), False),
        (lambda x: x + 1, False),
        (lambda x: torch.tanh(x / 30) * 20, False),
    ],
)
def test_what_a_head_does_to_logits_is_known_by_what_it_gives(formula: Any, is_known: bool) -> None:
    model: Any = Ends(formula)
    build: Any = type("Build", (), {"rows": lambda *_: torch.empty(1), "kernel": lambda *_: reference_kernels.softcap})
    build.config = type("Config", (), {"vocab_size": 8})
    output = output_of(model, model.lm_head, build)
    hidden = torch.randn(3, 4)
    assert (output is not None) is is_known
    assert output is None or torch.allclose(output(hidden), formula(hidden.repeat(1, 2)), rtol=1e-5)


def test_layers_that_drop_numbers_in_training_are_nothing(tmp_path: Path) -> None:
    loaded = load(tiny_model("phi3", sizes_of("phi3")), tmp_path)
    (dropout, *_) = (each for each in loaded._decoder.modules() if isinstance(each, nn.Dropout))
    x = torch.randn(2, 3)
    assert type(dropout) is NoDropout and dropout(x) is x and "6 sums before a norm" in loaded.parts


# -- defects
# --------------------------------------------------------------------------------------------------


def another_expert(patch: Patch) -> None:
    own = Router.forward

    def forward(self: Router, hidden: Tensor) -> Any:
        logits, weights, experts = own(self, hidden)
        return logits, weights, (experts + 1) % self._form.rules.num_experts

    patch.setattr(Router, "forward", forward)


def even_weights(patch: Patch) -> None:
    own = Router.forward

    def forward(self: Router, hidden: Tensor) -> Any:
        logits, weights, experts = own(self, hidden)
        return logits, torch.full_like(weights, 1 / weights.shape[1]), experts

    patch.setattr(Router, "forward", forward)


def another_clamp(patch: Patch) -> None:
    own = moe_adapter._clamped
    patch.setattr(moe_adapter, "_gates", lambda module, wanted, dtype: own is not None)
    patch.setattr(moe_adapter, "only", lambda fitting: next(iter(fitting)))


def a_sum_of_experts_that_is_lost(patch: Patch) -> None:
    patch.setattr(SparseBlock, "__call__", lambda self, *args, **named: torch.zeros_like(args[0]))


def no_scale(patch: Patch) -> None:
    own = Rows.__init__
    patch.setattr(Rows, "__init__", lambda self, embedding, name, scale: own(self, embedding, name, 1.0))


def a_cap_of_another_size(patch: Patch) -> None:
    patch.setattr(
        "sglcore.models.transformers_backend.output_head.Softcap",
        lambda build, cap: lambda x: cap / 8 * torch.tanh(x / cap),
    )


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (another_expert, "mixtral"),
        (even_weights, "glm4_moe"),
        (another_clamp, "gpt_oss"),
        (a_sum_of_experts_that_is_lost, "mixtral"),
        (no_scale, "gemma"),
        (a_cap_of_another_size, "gemma2"),
    ],
)
def test_a_defect_in_what_is_replaced_shows(
    plant: Callable[[Patch], None], kind: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    assert compare(tiny_model(kind, sizes_of(kind)), tmp_path) > 1e-2

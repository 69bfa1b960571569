"""What chooses experts in transformers' classes, by the engine's layers where these choose alike; and the sum behind experts.

Known by what it gives: its twin with random weights, against the reference of the two entries for routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sglcore.checkpoint.config import MoeConfig
from sglcore.layers.build import Build
from sglcore.layers.moe import Routing, SigmoidRouting, SoftmaxRouting
from sglcore.models.transformers_sums import Addend
from sglcore.models.transformers_twins import twin_of
from sglcore.runtime.kernels import reference

CHOOSING = "e_score_correction_bias"
"""What classes call a bias that chooses and does not weigh."""
TOKENS = 6
"""Rows of a router's twin."""


@dataclass(frozen=True, slots=True)
class RoutingForm:
    """How experts are chosen: `is_sigmoid` as `sigmoid_routing`, else as `top_k_routing`, of logits that may have a bias."""

    rules: MoeConfig
    is_sigmoid: bool
    has_bias: bool


class Router(nn.Module):
    """Which experts a row goes to, and their weights, as transformers' classes have it: logits, weights, experts."""

    def __init__(self, own: nn.Module, name: str, form: RoutingForm) -> None:
        super().__init__()
        self.logits = torch.empty(0, device="meta")
        """What a walk got in their place. In a step there are none."""
        self.is_read = False
        self._own = (own,)  # out of the reach of who looks for modules
        self._name, self._form = name, form
        self._route: Routing | None = None

    @property
    def own(self) -> nn.Module:
        """The module that it stands for."""
        return self._own[0]

    @property
    def weight(self) -> Tensor:
        """For shapes alone: who reads it computes with it by another way, which `is_read` tells."""
        self.is_read = True
        return cast("Tensor", self.own.weight)

    def place(self, build: Build) -> None:
        """Declare the weights, and choose the kernels."""
        *parents, name = self._name.split(".")
        scope, form = build.at(*parents), self._form
        if form.is_sigmoid:
            self._route = SigmoidRouting(scope, name, form.rules)
        else:
            self._route = SoftmaxRouting(scope, name, form.rules, form.has_bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """[..., H] to None, weights [T, K] and experts [T, K]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self._route is not None:
            return None, *self._route(rows)
        self.logits = rows.new_empty(len(rows), self._form.rules.num_experts)
        weights = rows.new_empty(len(rows), self._form.rules.experts_per_token)
        return self.logits, weights, torch.empty_like(weights, dtype=torch.int64)


class SparseBlock(nn.Module):
    """A block with experts: mixed into its class. `is_addend` is that of the layers, of what it gives first."""

    is_addend: bool

    def __call__(self, *args: Any, **named: Any) -> Any:
        """As its class."""
        found = super().__call__(*args, **named)
        if not self.is_addend or torch.compiler.is_compiling():
            return found
        if isinstance(found, tuple):
            return Addend.of(found[0], found[0][0]), *found[1:]
        return Addend.of(found, found[0])


def as_sparse_block(block: nn.Module) -> SparseBlock:
    """The same module, which is one from now on."""
    block.__class__ = type(type(block).__name__, (SparseBlock, type(block)), {"is_addend": False})
    assert isinstance(block, SparseBlock)
    return block


def may_route(module: nn.Module) -> bool:
    """Whether all that a module has is one matrix, perhaps with a bias, and it is none of torch's layers."""
    weight = module._parameters.get("weight")
    is_own = not isinstance(module, nn.Linear | nn.Embedding) and weight is not None and weight.dim() == 2
    return is_own and _names(module) in ({"weight"}, {"weight", "bias"}, {"weight", CHOOSING})


def routing_of(module: nn.Module, dtype: torch.dtype) -> RoutingForm | None:
    """As which entry of the kernel table a module that `may_route` chooses experts; None if as none."""
    names = _names(module)
    trials = [_Trial(module, kind, names) for kind in dict.fromkeys((torch.float32, dtype))]
    if any(trial.found is None for trial in trials):
        return None
    forms = trials[0].sigmoid_forms() if CHOOSING in names else trials[0].softmax_forms("bias" in names)
    return next((form for form in forms if all(trial.is_of(form) for trial in trials)), None)


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


class _Trial:
    """Random rows through a router's twin. `found` has the weights and experts that it gave; None: it does not give such."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, names: set[str]) -> None:
        generator = torch.Generator().manual_seed(0)
        own: Any = module._parameters["weight"]
        self.experts, size = own.shape
        sizes = {"weight": (self.experts, size), "bias": (self.experts,), CHOOSING: (self.experts,)}
        made = {name: torch.randn(sizes[name], generator=generator) * sizes[name][-1] ** -0.5 for name in sorted(names)}
        self._given = {name: each if name == CHOOSING else each.to(dtype) for name, each in made.items()}
        self._x = torch.randn(TOKENS, size, generator=generator).to(dtype)
        parameters = {
            name: nn.Parameter(each, False) for name, each in self._given.items() if name in module._parameters
        }
        buffers = {name: each for name, each in self._given.items() if name in module._buffers}
        self.found = self._tried(twin_of(module, parameters=parameters, buffers=buffers))

    def _tried(self, twin: nn.Module) -> tuple[Tensor, Tensor] | None:
        try:
            with torch.no_grad():
                _, weights, experts = twin(self._x)
            is_choice = weights.shape == experts.shape and len(experts) == TOKENS and weights.is_floating_point()
            return (weights, experts.long()) if is_choice and not experts.is_floating_point() else None
        except (TypeError, RuntimeError, AttributeError, ValueError, LookupError):
            return None

    def softmax_forms(self, has_bias: bool) -> Iterator[RoutingForm]:
        """All that there are."""
        return (RoutingForm(self._rules(normalize), False, has_bias) for normalize in (False, True))

    def sigmoid_forms(self) -> Iterator[RoutingForm]:
        """All that scale weights as was found: their sum, or the ratio to the sigmoids, shows by how much."""
        assert self.found is not None
        weights, experts = self.found
        scores = self._logits(True).sigmoid().gather(1, experts)
        for normalize, scale in ((True, weights.sum(dim=1)), (False, weights.sum(dim=1) / scores.sum(dim=1))):
            for groups in (each for each in range(1, self.experts // 2 + 1) if self.experts % each == 0):
                for best in range(1, max(groups, 2)):
                    yield RoutingForm(self._rules(normalize, round(float(scale[0]), 5), groups, best), True, False)

    def is_of(self, form: RoutingForm) -> bool:
        """Whether a form gives what was found: to a rounding, by which in half types other experts may be chosen whose weight is
        the same."""
        assert self.found is not None
        rules, logits = form.rules, self._logits(form.is_sigmoid)
        if form.is_sigmoid:
            groups = rules.num_groups, rules.top_groups, rules.normalize, rules.scale
            wanted = reference.sigmoid_routing(logits, self._given[CHOOSING], rules.experts_per_token, *groups)
        else:
            wanted = reference.top_k_routing(logits, rules.experts_per_token, rules.normalize)
        if self._x.dtype is torch.float32:
            return torch.allclose(*(self._spread(*each) for each in (self.found, wanted)), rtol=1e-5, atol=1e-7)
        sizes = (weights.float().sort(dim=1)[0] for weights, _ in (self.found, wanted))
        return torch.allclose(*sizes, rtol=torch.finfo(self._x.dtype).eps, atol=1e-6)

    def _logits(self, is_wide: bool) -> Tensor:
        weight, bias = self._given["weight"], self._given.get("bias")
        return linear(self._x.float(), weight.float()) if is_wide else linear(self._x, weight, bias)

    def _spread(self, weights: Tensor, experts: Tensor) -> Tensor:
        return torch.zeros(TOKENS, self.experts).scatter_(1, experts.long(), weights.float())

    def _rules(self, normalize: bool, scale: float = 1.0, groups: int = 1, best: int = 1) -> MoeConfig:
        assert self.found is not None
        return MoeConfig((), self.experts, self.found[1].shape[1], 0, normalize, scale, groups, best)

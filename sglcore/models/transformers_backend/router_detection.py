"""Routers of transformers' classes on the engine's routing layers, if both choose the same experts;
and the residual sum after expert blocks.

A router is recognised by its results: its twin with random weights is compared with the reference
of the two routing kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.layers.expert_routing import Routing, make_routing
from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.deferred_sums import Addend
from sglcore.models.transformers_backend.module_probes import twin_of
from sglcore.runtime.kernels import reference_kernels

CHOOSING = "e_score_correction_bias"
"""The classes' name for a bias that affects which experts are chosen, not their weights."""
TOKENS = 16
"""Random rows in a trial of a router."""


@dataclass(frozen=True, slots=True)
class RoutingForm:
    """How experts are chosen: as by the kernel `sigmoid_routing` if `is_sigmoid`, else as by
    `top_k_routing`. `rules` has the numbers of experts and groups and the scale. `has_bias`: the
    logits have a bias."""

    rules: MoeConfig
    is_sigmoid: bool
    has_bias: bool


class Router(nn.Module):
    """Replaces a router of transformers' classes; returns a triple as these do, but no logits,
    which nothing reads."""

    def __init__(self, own: nn.Module, name: str, form: RoutingForm) -> None:
        super().__init__()
        self.logits = torch.empty(0, device="meta")
        """The empty logits that the walk on the meta device got, which show whether something reads
        them. In a step there are none."""
        self.is_read = False
        self._own = (own,)  # in a tuple, so that it is not registered as a submodule
        self._name, self._form = name, form
        self._route: Routing | None = None

    @property
    def own(self) -> nn.Module:
        """The original module."""
        return self._own[0]

    @property
    def weight(self) -> Tensor:
        """The original weight, on the meta device. A read sets `is_read`: the class then computes
        with the weight itself."""
        self.is_read = True
        return cast("Tensor", self.own.weight)

    def place(self, build: Build) -> None:
        """Declare the weights, and choose the kernels."""
        *parents, name = self._name.split(".")
        scope, form = build.at(*parents), self._form
        routing = RoutingSpec("sigmoid" if form.is_sigmoid else "softmax", name, form.has_bias)
        self._route = make_routing(scope, routing, form.rules)

    def forward(self, hidden: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """[..., H] to None, weights [T, K] and experts [T, K]; before `place`, empty logits [T, E]
        instead of None."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self._route is not None:
            return None, *self._route(rows)
        self.logits = rows.new_empty(len(rows), self._form.rules.num_experts)
        weights = rows.new_empty(len(rows), self._form.rules.experts_per_token)
        return self.logits, weights, torch.empty_like(weights, dtype=torch.int64)


class SparseBlock(nn.Module):
    """Mixed into the class of a block with experts. `is_addend`: its first result is only an addend
    of a residual sum that feeds a norm."""

    is_addend: bool

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the class's forward; its first result may be an `Addend`."""
        found = super().__call__(*args, **named)
        if not self.is_addend or torch.compiler.is_compiling():
            return found
        if isinstance(found, tuple):
            return Addend.of(found[0], found[0][0]), *found[1:]
        return Addend.of(found, found[0])


def as_sparse_block(block: nn.Module) -> SparseBlock:
    """Mix `SparseBlock` into the class of a module, with `is_addend` False; returns the same
    module.
    """
    block.__class__ = type(type(block).__name__, (SparseBlock, type(block)), {"is_addend": False})
    assert isinstance(block, SparseBlock)
    return block


def may_route(module: nn.Module) -> bool:
    """Whether a module's only tensors are one matrix and perhaps a bias, and it is not a layer of
    torch."""
    weight = module._parameters.get("weight")
    is_own = not isinstance(module, nn.Linear | nn.Embedding) and weight is not None and weight.dim() == 2
    return is_own and _names(module) in ({"weight"}, {"weight", "bias"}, {"weight", CHOOSING})


def routing_of(module: nn.Module, dtype: torch.dtype) -> RoutingForm | None:
    """Return the form in which a module that `may_route` chooses experts; None if no form fits, or
    if several do.

    The candidates for groups are the integers in the module and its configuration. The trials
    include `telling_logits`, for which any other number of groups or of chosen groups chooses other
    experts.
    """
    names, numbers = _names(module), _numbers(module)
    groups = sorted(numbers & set(_divisors(_Trial.experts_of(module))))
    kinds = dict.fromkeys((torch.float32, dtype))
    trials = [_Trial(module, names, kind) for kind in kinds]
    trials += [_Trial(module, names, torch.float32, logits) for logits in _telling(module, groups)]
    if any(trial.found is None for trial in trials):
        return None
    first = trials[0]
    forms = first.sigmoid_forms(groups, numbers) if CHOOSING in names else first.softmax_forms("bias" in names)
    fitting = [form for form in forms if all(trial.is_of(form) for trial in trials)]
    return fitting[0] if len(fitting) == 1 else None


def telling_logits(experts: int, groups: Iterable[int]) -> Tensor:
    """Return float32 [R, experts]: rows of logits that lead to other experts for any other
    grouping.

    For each count in `groups`, group size = experts / count, there are rows in which 1 to count
    groups have one large logit and else the lowest ones. By the sum of a group's two largest scores
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) these groups are chosen last, although their
    large logit exceeds all logits of the other groups.
    """
    generator = torch.Generator().manual_seed(0)
    usual = torch.linspace(0.1, 2, experts)
    rows = [usual[torch.randperm(experts, generator=generator)]]
    for count in groups:
        size = experts // count
        for lone in range(1, count + 1):
            row = usual[torch.randperm(experts, generator=generator)].view(count, size).clone()
            chosen = torch.randperm(count, generator=generator)[:lone]
            row[chosen] -= 8
            row[chosen, torch.randint(size, (lone,), generator=generator)] = torch.linspace(3, 4, lone)
            rows.append(row.flatten())
    return torch.stack(rows)


def _telling(module: nn.Module, groups: Sequence[int]) -> Sequence[Tensor]:
    """Return `telling_logits` in parts of at most H rows, H the columns of the module's weight:
    each row of logits is one column of a trial's weight."""
    experts, size = _Trial.experts_of(module), int(module._parameters["weight"].shape[1])  # pyright: ignore[reportOptionalMemberAccess]
    powers = (each for each in _divisors(experts) if each & (each - 1) == 0)
    return telling_logits(experts, sorted({*groups, *powers})).split(size)


def _divisors(experts: int) -> Iterator[int]:
    """Return the divisors of `experts` that leave groups of two experts or more."""
    return (each for each in range(2, experts // 2 + 1) if experts % each == 0)


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _numbers(module: nn.Module) -> set[int]:
    """Return all integers in the module and its configuration."""
    own = [vars(module), *(vars(each) for each in vars(module).values() if isinstance(each, PreTrainedConfig))]
    return {each for values in own for each in values.values() if type(each) is int}


class _Trial:
    """One run of a router's twin on rows: random ones, or with `logits` rows that give these.
    `found`: the weights and experts that it returned; None if it does not return these."""

    def __init__(self, module: nn.Module, names: set[str], dtype: torch.dtype, logits: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        own: Any = module._parameters["weight"]
        self.experts, size = own.shape
        sizes = {"weight": (self.experts, size), "bias": (self.experts,), CHOOSING: (self.experts,)}
        made = {name: torch.randn(sizes[name], generator=generator) * sizes[name][-1] ** -0.5 for name in sorted(names)}
        x = torch.randn(TOKENS, size, generator=generator)
        if logits is not None:
            x = torch.eye(len(logits), size)
            made["weight"][:, : len(logits)] = logits.t()
            made |= {name: 0.01 * each for name, each in made.items() if name != "weight"}
        self._given = {name: each if name == CHOOSING else each.to(dtype) for name, each in made.items()}
        self._x = x.to(dtype)
        parameters = {
            name: nn.Parameter(each, False) for name, each in self._given.items() if name in module._parameters
        }
        buffers = {name: each for name, each in self._given.items() if name in module._buffers}
        self.found = self._tried(twin_of(module, parameters=parameters, buffers=buffers))

    @staticmethod
    def experts_of(module: nn.Module) -> int:
        """Return the number of experts of a module that `may_route`."""
        return int(module._parameters["weight"].shape[0])  # pyright: ignore[reportOptionalMemberAccess]

    def _tried(self, twin: nn.Module) -> tuple[Tensor, Tensor] | None:
        try:
            with torch.no_grad():
                _, weights, experts = twin(self._x)
            is_choice = weights.shape == experts.shape and len(experts) == len(self._x) and weights.is_floating_point()
            return (weights, experts.long()) if is_choice and not experts.is_floating_point() else None
        except (TypeError, RuntimeError, AttributeError, ValueError, LookupError):
            return None

    def softmax_forms(self, has_bias: bool) -> Iterator[RoutingForm]:
        """Yield the two softmax forms: weights as they are, and divided by their sum."""
        return (RoutingForm(self._rules(normalize), False, has_bias) for normalize in (False, True))

    def sigmoid_forms(self, groups: Iterable[int], numbers: set[int]) -> Iterator[RoutingForm]:
        """Yield the sigmoid forms with the scale that the weights show: by their sum if they are
        normalised, else by their ratio to the sigmoids. `numbers`: candidates for the number of
        chosen groups, which is lower than the number of groups."""
        assert self.found is not None
        weights, experts = self.found
        scores = self._logits(True).sigmoid().gather(1, experts)
        pairs = [(1, 1), *((count, best) for count in groups for best in sorted(numbers) if 0 < best < count)]
        for normalize, scale in ((True, weights.sum(dim=1)), (False, weights.sum(dim=1) / scores.sum(dim=1))):
            for pair in pairs:
                yield RoutingForm(self._rules(normalize, round(float(scale[0]), 5), *pair), True, False)

    def is_of(self, form: RoutingForm) -> bool:
        """Whether a form gives the weights and experts found. In half types only the sorted weights
        are compared, within one rounding: experts with equal weights may be swapped."""
        assert self.found is not None
        rules, logits = form.rules, self._logits(form.is_sigmoid)
        if form.is_sigmoid:
            groups = rules.num_groups, rules.top_groups, rules.normalize, rules.scale
            if rules.num_groups > 1 and rules.experts_per_token > rules.top_groups * (self.experts // rules.num_groups):
                return False
            wanted = reference_kernels.sigmoid_routing(logits, self._given[CHOOSING], rules.experts_per_token, *groups)
        else:
            wanted = reference_kernels.top_k_routing(logits, rules.experts_per_token, rules.normalize)
        if self._x.dtype is torch.float32:
            return torch.allclose(*(self._spread(*each) for each in (self.found, wanted)), rtol=1e-5, atol=1e-7)
        sizes = (weights.float().sort(dim=1)[0] for weights, _ in (self.found, wanted))
        return torch.allclose(*sizes, rtol=torch.finfo(self._x.dtype).eps, atol=1e-6)

    def _logits(self, is_wide: bool) -> Tensor:
        weight, bias = self._given["weight"], self._given.get("bias")
        return linear(self._x.float(), weight.float()) if is_wide else linear(self._x, weight, bias)

    def _spread(self, weights: Tensor, experts: Tensor) -> Tensor:
        return torch.zeros(len(experts), self.experts).scatter_(1, experts.long(), weights.float())

    def _rules(self, normalize: bool, scale: float = 1.0, groups: int = 1, best: int = 1) -> MoeConfig:
        assert self.found is not None
        return MoeConfig((), self.experts, self.found[1].shape[1], 0, normalize, scale, groups, best)

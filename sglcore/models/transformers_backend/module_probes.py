"""Finds what a module of transformers computes, by trial: its twin, small and with random weights,
is compared with a kernel.

Class names do not decide. A module counts as a kernel's operation if both give the same results, in
float32 within rounding and in the model's own dtype to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import permutations
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sglcore.models.transformers_backend.kernel_layers import Activation, NormForm
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F")

OFFSETS = (None, 0.0, 1.0)
"""Candidates for `NormForm.offset`."""

ACTIVATIONS: Sequence[Activation] = (KernelTable.silu_and_mul, KernelTable.gelu_tanh_and_mul)
"""Candidates for the activation of a gated block."""

_VALUES = (int, float, str, tuple, FunctionType, BuiltinFunctionType)
"""Types of attributes that distinguish kinds of modules within a class; lists of plain values count
too."""

HIDDEN, INNER = 8, 6
"""Hidden and intermediate size of a block's twin."""

LARGE = 1e3
"""The factor by which some float32 rows are larger, so that a class's clamps show."""
_SIZES = torch.tensor([1e-4, 1e-2, 1.0, 30.0])[:, None]
"""Scales of a norm's rows: epsilon shows in small ones."""


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module's only tensor is a weight with one dimension, and it has no submodules."""
    weight = module._parameters.get("weight")
    is_alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    return is_alone and weight is not None and weight.dim() == 1


def rms_norm_of(module: nn.Module, dtype: torch.dtype) -> NormForm | None:
    """Return the variant of root mean square norm that a module computes; None if it is none, or if
    several fit."""
    if not may_be_norm(module):
        return None
    weight: Any = module.weight
    numbers = sorted({value for value in vars(module).values() if isinstance(value, float)})
    # In float32, an offset of 0.0 equals None.
    offsets = [each for each in OFFSETS if each != 0.0 or dtype is not torch.float32]
    forms = (NormForm(eps, offset) for offset in offsets for eps in numbers)
    return only(form for form in forms if _is_rms_norm(module, weight.shape[0], form, dtype))


def _is_rms_norm(module: nn.Module, size: int, form: NormForm, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(4, size, generator=generator) * _SIZES, torch.randn(size, generator=generator)
    for kind in dict.fromkeys((torch.float32, dtype)):
        x, own = rows.to(kind)[None], weight.to(kind)
        found = tried(twin_of(module, parameters={"weight": nn.Parameter(own, requires_grad=False)}), x)
        wide = own if form.offset is None else own.float() + form.offset
        if found is None or not is_same(found, reference_kernels.rms_norm(x, wide, form.eps)):
            return False
    return True


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: `nn.Linear` itself, or a subclass that computes
    the same results in a trial. False for any other module."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(3, 4, generator=generator), torch.randn(1, 5, 4, generator=generator)
    own: dict[str, nn.Parameter] = {"weight": nn.Parameter(weight, requires_grad=False)}
    if module.bias is not None:
        own["bias"] = nn.Parameter(torch.randn(3, generator=generator), requires_grad=False)
    found = tried(twin_of(module, parameters=own), x)
    return found is not None and is_same(found, linear(x, weight, own.get("bias")))


def embedding_scale(module: nn.Module, dtype: torch.dtype, initialize: Callable[[nn.Module], object]) -> float | None:
    """Return the factor with which an embedding multiplies the rows of its weight, 1.0 for a plain
    one; None if the module does anything else. `initialize` gives buffers their values, as the
    module's class does."""
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or weight is None or weight.dim() != 2 or type(module) is nn.Linear:
        return None
    own, ids = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[4, 0, 2, 4]])
    buffers = {name: torch.empty_like(each, device="cpu") for name, each in module._buffers.items() if each is not None}
    found: list[float] = []
    for rows in (torch.ones(5, 4), own, own.to(dtype)):
        parameter = nn.Parameter(rows, requires_grad=False)
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        twin = twin_of(module, parameters={"weight": parameter}, buffers=buffers)
        if isinstance(twin, nn.Embedding):
            twin.padding_idx = None  # matters in training only; the twin has fewer rows
        if buffers:
            initialize(twin)
        given = tried(twin, ids)
        found = found or [1.0 if given is None else float(given.flatten()[0])]
        if given is None or not torch.equal(given, rows[ids] * torch.tensor(found[0]).to(rows.dtype)):
            return None
    return found[0]


def may_be_block(module: nn.Module) -> bool:
    """Whether a module's only tensors are the weights of two or three linear layers."""
    linears = [child for child in module._modules.values() if type(child) is nn.Linear]
    if len(linears) not in (2, 3) or module._parameters or module._buffers:
        return False
    return not any(_has_state(child) for child in module.children() if type(child) is not nn.Linear)


def gated_block_of(module: nn.Module, dtype: torch.dtype) -> tuple[tuple[str, ...], Activation] | None:
    """Return the names of a module's linear layers as (gate, up, down) or (gate with up, down), and
    the activation, if it computes down(activation(gate(x)) * up(x)); None if it does not, or if
    several assignments fit."""
    if not may_be_block(module):
        return None
    linears = {name: child for name, child in module._modules.items() if type(child) is nn.Linear}
    fitting = [roles for roles in permutations(linears) if _fits(linears, roles)]
    forms = ((roles, activation) for activation in ACTIVATIONS for roles in fitting)
    return only(form for form in forms if _is_block(module, *form, dtype))


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _fits(linears: Mapping[str, nn.Linear], roles: Sequence[str]) -> bool:
    *parts, down = (linears[name] for name in roles)
    inner = sum(each.out_features for each in parts)
    one = {(each.in_features, each.out_features, each.bias is None) for each in parts}
    return len(one) == 1 and inner == 2 * down.in_features and down.out_features == parts[0].in_features


def _is_block(module: nn.Module, roles: Sequence[str], activation: Activation, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for kind in dict.fromkeys((torch.float32, dtype)):
        *parts, down = (
            _small(module._modules[name], name == roles[-1], len(roles), generator).to(kind) for name in roles
        )
        x = torch.randn(1, 5, HIDDEN, generator=generator).to(kind)
        if kind is torch.float32:
            x = torch.cat((x, LARGE * x), dim=1)
        gate_up = torch.cat([each(x) for each in parts], dim=-1)
        wanted = down(activation.reference(gate_up))
        found = tried(twin_of(module, modules=dict(zip(roles, (*parts, down), strict=True))), x)
        if found is None or not is_same(found, wanted):
            return False
    return True


def _small(own: Any, is_down: bool, count: int, generator: torch.Generator) -> nn.Linear:
    """Return a random linear layer with the sizes of a block's twin, and a bias if `own` has one:
    INNER to HIDDEN if `is_down`, else HIDDEN to INNER (2 * INNER if the block has `count` = 2
    linear layers).
    """
    inputs, outputs = (INNER, HIDDEN) if is_down else (HIDDEN, INNER if count == 3 else 2 * INNER)
    made = _Product(inputs, outputs, bias=own.bias is not None, device="meta")
    for name, empty in made.named_parameters():
        setattr(made, name, nn.Parameter(torch.randn(empty.shape, generator=generator), requires_grad=False))
    return made


class _Product(nn.Linear):
    """A linear layer by an elementwise product: torch starts its threads for a matrix product."""

    def reset_parameters(self) -> None:
        """Do nothing: `_small` sets the weights."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        product = (input.unsqueeze(-2) * self.weight).sum(dim=-1)
        return product if self.bias is None else product + self.bias


def twin_of(
    module: M,
    parameters: Mapping[str, nn.Parameter] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> M:
    """Return a shallow copy of a module in which the named parameters, submodules or buffers are
    replaced; the others are shared with the module.
    """
    twin = copy(module)
    twin._parameters = {**module._parameters, **(parameters or {})}
    twin._modules = {**module._modules, **(modules or {})}
    twin._buffers = {**module._buffers, **(buffers or {})}
    return twin


def kind_of(module: nn.Module, without: frozenset[str] = frozenset()) -> object:
    """Return a key that is equal for modules with equivalent twins. Attributes named in `without`
    do not count."""
    own = ((name, _frozen(each)) for name, each in vars(module).items())
    values = tuple(each for each in own if isinstance(each[1], _VALUES) and each[0] not in without)
    shapes = tuple((name, None if each is None else each.shape) for name, each in module._parameters.items())
    parts = tuple((name, kind_of(each, without)) for name, each in module._modules.items() if each is not None)
    return type(module), values, shapes, parts


def _frozen(value: object) -> object:
    """Return a list of plain values as a tuple, anything else unchanged."""
    if not isinstance(value, list):
        return value
    is_plain = all(each is None or isinstance(each, int | float | str) for each in value)
    return tuple(value) if is_plain else value


def only(fitting: Iterable[F]) -> F | None:
    """Return the only form that fits a module's results; None if there are none or several."""
    found = list(fitting)
    return found[0] if len(found) == 1 else None


def tried(module: Callable[[Tensor], object], x: Tensor) -> Tensor | None:
    """Return a module's result for one tensor; None if it raises a usual error (such as TypeError
    or RuntimeError) or returns anything but a tensor."""
    try:
        with torch.no_grad():
            found = module(x)
    except (TypeError, RuntimeError, AttributeError, ValueError, LookupError):
        return None
    return found if isinstance(found, Tensor) else None


def is_same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two results have the same shape, dtype and values: float32 within a few roundings,
    half types to the bit."""
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    exact = wanted.dtype is not torch.float32
    return torch.equal(found, wanted) if exact else torch.allclose(found, wanted, rtol=1e-5, atol=1e-7)

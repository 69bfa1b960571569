"""Attention that a class of transformers computes itself: a product of queries and keys, a softmax,
a product with values.

Such a module keeps its forward. During a forward, its scores have no contents, and the engine's
attention computes the result. The walk, a forward on the meta device (`shape_walk.walk`), records
what the class does to its scores; a trial with numbers checks the result before a model is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sglcore.models.transformers_backend.alibi_slopes import OnHost, key_columns, query_columns, slopes_of, widened
from sglcore.models.transformers_backend.kernel_layers import PackedLinear
from sglcore.models.transformers_backend.rotary_adapter import Angles
from sglcore.models.transformers_backend.score_functions import Between, Last, Product, Traced, memory
from sglcore.models.transformers_backend.shape_walk import (
    LENGTHS,
    AttentionCall,
    Ones,
    Seen,
    lengths_of,
    make_mask,
    refusal,
    seen_by,
    walk,
    write_down,
)
from sglcore.models.transformers_backend.stateful_layers import names_by_kind

LARGE, LARGE_EACH = 30.0, 5
"""In a trial, the queries, keys and values of every `LARGE_EACH`th token are `LARGE` times larger.
Scores then reach about a thousand, so that clamps show which small scores never meet."""
EQUAL = 1e-3
"""The absolute and relative tolerance of a trial: rounding a score of a thousand costs 1e-4."""
FAR_TOKENS = 4096
"""A bias must have the same slopes with this many tokens (at most the model's number of positions)
as with few."""


class OwnAttention(nn.Module):
    """Mixed into the class of a module that computes attention itself; the module then has the
    attribute `sglcore_own`."""

    sglcore_own: Own

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the class's forward, in which the engine computes attention."""
        named = self.sglcore_own.without_places(args, named)
        with self.sglcore_own.between(args, named):
            return super().__call__(*args, **named)


class Own:
    """How a module computes attention itself, as the walk on the meta device (`shape_walk.walk`)
    records it. Before the walk it is unknown (`_numbers` is None).

    Mixes `OwnAttention` into the module's class; `settle` undoes this for other modules."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kind = type(module)
        self._numbers: tuple[int, int] | None = None
        self._between: Between | None = None
        self._given: tuple[Any, Any] | None = None
        self._buffers: set[str] = set()
        self._added: dict[int, float] = {}
        self._bias: str | None = None
        self._masks: list[str] = []
        self.far_bias = torch.empty(0)
        """The module's bias for `FAR_TOKENS` tokens."""
        module.sglcore_own = self  # pyright: ignore[reportArgumentType]
        module.__class__ = type(self._kind.__name__, (OwnAttention, self._kind), {})

    def between(self, args: Any, named: Any) -> Between | Traced:
        """Return the torch function mode for one call of the module with these arguments, and
        remember them in a walk. Inside the mode, the engine computes attention.
        """
        if torch.compiler.is_compiling() and self._numbers is not None:
            return Traced(self._attend, self._numbers)
        if any(isinstance(each, Tensor) and each.is_meta for each in (*args, *named.values())):
            self._given = args, named
        self._between = Between(self._attend, None if self._numbers is None else self._numbers[0])
        return self._between

    def without_places(self, args: Any, named: dict[str, Any]) -> dict[str, Any]:
        """Return `named` with zeros for masks and the bias. Masks [1, 1, T, T] are no longer made,
        but some classes add them without a check; a bias may have fewer keys than the step. The
        zeros are one expanded element."""
        absent = [name for name in self._masks if named.get(name) is None]
        if not absent and self._bias is None:
            return named
        hidden = next(each for each in (*args, *named.values()) if isinstance(each, Tensor))
        if hidden.is_meta:
            return named
        zero, tokens = hidden.new_zeros(()), hidden.shape[1]
        changed = dict.fromkeys(absent, zero.expand(1, 1, tokens, tokens))
        if self._bias is not None:
            changed[self._bias] = zero.expand(*named[self._bias].shape[:-1], tokens)
        return {**named, **changed}

    @property
    def has_bias(self) -> bool:
        """Whether an argument other than a mask is added to the scores."""
        return self._bias is not None

    @property
    def bias(self) -> Tensor:
        """The bias that the module got in its last call in the walk on the meta device. Only if
        `has_bias`."""
        assert self._bias is not None and self._given is not None
        return self._given[1][self._bias]

    def settle(self) -> bool:
        """Return whether the module computed attention itself in the walk on the meta device
        (`shape_walk.walk`). If it did not, give it its original class back. Sets `_masks` and
        `_bias`: the names of the keyword arguments with its masks and its bias."""
        if self._given is not None:
            named = self._given[1]
            self._masks = [name for name, each in named.items() if isinstance(each, Seen)]
            added = [name for name, each in named.items() if self._times(each) is not None]
            self._bias = added[0] if added else None
        if self._numbers is None:
            self.module.__class__ = self._kind
            del self.module.sglcore_own
        return self._numbers is not None

    def _attend(self, product: Product, value: Tensor) -> Tensor:
        if value.device.type != "meta":
            attend: Any = self.module.sglcore_attention
            return attend(product.query.to(value.dtype), product.key.to(value.dtype), value)
        assert self._between is not None and self._between.number is not None
        self._numbers = self._between.number, self._between.count
        self._added = {place: product.scaling / scaling for place, scaling in product.memory.items()}
        self._buffers |= {name for name, each in self.module.named_buffers() if memory(each) in product.memory}
        masks = product.masks or [make_mask(1, 1, 1, lambda batch, head, query, key: key <= query)] * bool(
            self._buffers
        )
        mask = masks[0] if masks else None
        return write_down(self.module, product.query, product.key, value, mask, scaling=product.scaling)[0]

    def tried(self, call: AttentionCall) -> AttentionCall:
        """Return `call` with the slopes of the module's bias and the window of its own mask, once
        buffers have their values. Raises `ConfigError` if the class computes something other than
        the engine's attention.

        Compares the attention of a twin to random queries, keys and values, some of them `LARGE`,
        for the tokens of the last walk; and its bias for these tokens with that for `FAR_TOKENS`.
        """
        windows = [_window(self.module.get_buffer(name)) for name in self._buffers]
        window = min((each for each in windows if each is not None), default=None)
        if window is not None and not window < min(LENGTHS[-1], call.window or LENGTHS[-1]):
            raise refusal(self.module, f"its own mask has a window of {window}, which is not tested")
        call = replace(call, window=window or call.window)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            wanted, (query, key, value) = self._by_class()
        call = replace(call, slopes=self._slopes(call.num_heads))
        places = torch.arange(query.shape[2])
        back = places[:, None] - places
        seen = (back >= 0) & (back < (call.window or len(places)))
        if call.slopes is not None:
            query, key = (
                widened(query, query_columns(call.slopes, call.scaling)),
                widened(key, key_columns(places)),
            )
        found = scaled_dot_product_attention(query, key, value, seen, scale=call.scaling, enable_gqa=True)
        if not torch.allclose(found.flatten(), wanted.flatten(), rtol=EQUAL, atol=EQUAL):
            raise refusal(
                self.module, f"its attention differs, by {float((found - wanted.view_as(found)).abs().max()):.2g}"
            )
        return call

    def _times(self, given: Any) -> float | None:
        """Return the factor with which an argument is added to the scores; None if it is not added,
        or is a mask."""
        if not isinstance(given, Tensor) or isinstance(given, Seen) or _is_padding(given):
            return None
        return self._added.get(memory(given))

    def _slopes(self, heads: int) -> tuple[float, ...] | None:
        """Return the slopes of the bias; None without a bias that has contents, or if it is not
        linear in the position. Raises `ConfigError` if the slopes differ for `FAR_TOKENS`."""
        if self._bias is None:
            return None
        times, bias = self._times(self.bias), self.bias
        if times is None or bias.is_meta:
            return None
        slopes, far = slopes_of(bias, heads, times), slopes_of(self.far_bias, heads, times)
        if slopes is not None and (far is None or not np.allclose(slopes, far, rtol=1e-5, atol=0)):
            what = f"{self.far_bias.shape[-1]} keys, and a first slope of {slopes[0]:.4g} with {bias.shape[-1]}"
            found = "no slopes" if far is None else f"a first slope of {far[0]:.4g}"
            raise refusal(self.module, f"its bias has {found} with {what}")
        return slopes

    def _by_class(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the result of a twin's own attention for random queries, keys and values, and
        these three."""
        assert self._numbers is not None and self._given is not None
        (first, last), twin, found = self._numbers, self._twin(), []
        args, named = tree_map(_real, self._given)

        def keep(product: Product, value: Tensor) -> Tensor:
            found.extend((product.query, product.key, value))
            return value.new_zeros(1, product.query.shape[2], product.query.shape[1], value.shape[3])

        with Between(keep, first):
            twin(*args, **named)
        with Last(last) as own:
            twin(*args, **named)
        return own.result, found

    def _twin(self) -> nn.Module:
        """Return the module on the host in float32. Its linear layers return the same random
        numbers in every call, for any input."""
        twin = copy(self.module)
        vars(twin).pop("forward", None)
        twin.__class__ = self._kind
        twin._modules = {
            name: _Noise(each) if isinstance(each, PackedLinear | nn.Linear | Conv1D) else each
            for name, each in self.module._modules.items()
        }
        twin._buffers = {name: _on_host(each) for name, each in self.module._buffers.items()}
        return twin


def _on_host(buffer: Tensor | None) -> Tensor | None:
    if buffer is None:
        return None
    return buffer.cpu().float() if buffer.is_floating_point() else buffer.cpu()


class _Noise(nn.Module):
    """Replaces a linear layer: returns the same random numbers in every call."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        own = layer.own if isinstance(layer, PackedLinear) else layer
        self._size = own.nf if isinstance(own, Conv1D) else own.out_features
        self._made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self._made is None:
            self._made = _varied(*x.shape[:-1], self._size)
        return self._made


def _varied(*shape: int) -> Tensor:
    """Return random numbers; with three dimensions [B, T, H], those of every `LARGE_EACH`th token
    are `LARGE` times larger."""
    made = torch.randn(shape)
    if made.dim() == 3:
        made[:, ::LARGE_EACH] *= LARGE
    return made


def _real(given: Any) -> Any:
    """Return an argument that a module got in the walk on the meta device, with contents: random
    numbers, positions, and masks by their function. A padding mask becomes None; anything else that
    is not a meta tensor stays as it is.
    """
    if isinstance(given, Angles):
        return torch.randn(1, len(given.positions), given.table.shape[1])
    if isinstance(given, Seen):
        places = torch.arange(given.shape[-1])
        seen = given.function(torch.tensor(0), torch.tensor(0), places[:, None], places)
        return torch.zeros(given.shape).masked_fill(~seen, torch.finfo(torch.float32).min).to(given.dtype)
    if not isinstance(given, Tensor) or not given.is_meta:
        return given
    if _is_padding(given):
        return None
    if given.is_floating_point():
        return _varied(*given.shape)
    return torch.arange(given.shape[-1]).expand(given.shape)


def _is_padding(given: Tensor) -> bool:
    """Whether an argument is a padding mask, which hides nothing here."""
    return isinstance(given, Ones) and given.dim() == 4


def _window(mask: Tensor) -> int | None:
    """Return the window in tokens of a mask [..., P, P] of ones and zeros, from its last row; None
    for a causal mask. Raises `ConfigError` for any other row."""
    last = mask.flatten(0, -3)[0, -1].cpu() != 0
    return seen_by(lambda batch, head, query, key: last[key.clamp(max=query)] & (key <= query), len(last) - 1)


def find_own(modules: Sequence[nn.Module]) -> list[Own]:
    """Return an `Own` for every module with code that may compute attention itself, and mix
    `OwnAttention` into the module's class. After the walk on the meta device, `Own.settle` says
    which modules do."""
    names = names_by_kind(modules)
    return [Own(module) for module in modules if _may_attend(names[type(module)])]


def try_own(owns: Sequence[Own], calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    """Return the attention calls of a model; those of modules that compute attention themselves
    (`owns`) are replaced by what `Own.tried` returns."""
    own = {each.module: each for each in owns}
    return tuple(own[call.module].tried(call) if call.module in own else call for call in calls)


def find_biases(model: PreTrainedModel, owns: Sequence[Own]) -> bool:
    """Return whether a module in `owns` has a bias. Walks over the model again, with biases on the
    host, so that each `Own.bias` and `Own.far_bias` has contents. The model is on the meta
    device."""
    biased = [own for own in owns if own.has_bias]
    if not biased:
        return False
    with OnHost():
        far = _far_biases(model, biased)
        walk(model, lengths=lengths_of(model)[1:], is_padded=False)
    for own, bias in zip(biased, far, strict=True):
        own.far_bias = bias
    return True


class _ReachedError(Exception):
    """Ends a forward early."""


def _far_biases(model: PreTrainedModel, owns: Sequence[Own]) -> list[Tensor]:
    """Return each module's bias for `FAR_TOKENS` tokens. Modules may share one; the forward ends
    after the last distinct bias. Raises `ConfigError` if a module is not reached."""
    keys = [(memory(own.bias), own.bias.storage_offset()) for own in owns]
    firsts = [keys.index(key) for key in keys]
    found: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            found[number] = owns[number].bias
            if number == max(firsts):
                raise _ReachedError

        return hook

    hooks = [owns[each].module.register_forward_pre_hook(keep(each)) for each in set(firsts)]
    try:
        walk(model, lengths=(lengths_of(model, FAR_TOKENS)[1],), is_padded=False)
    except _ReachedError:
        return [found[first] for first in firsts]
    finally:
        for each in hooks:
            each.remove()
    raise refusal(model, "other layers attend with many tokens than with few")


def _may_attend(names: set[str]) -> bool:
    return (
        bool(names & {"softmax", "Softmax", "scaled_dot_product_attention"}) and "ALL_ATTENTION_FUNCTIONS" not in names
    )

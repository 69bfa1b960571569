"""Attention that a class of transformers computes itself: a product of queries and keys, a softmax,
a product with values.

Such a module keeps its forward. While it runs, its scores have no contents, and the engine's
attention answers in their place. What the class does to its scores is told by the walk on shapes,
and tried with numbers before a model is served.
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

from sglcore.models.transformers_layers import PackedLinear
from sglcore.models.transformers_places import OnHost, key_columns, query_columns, slopes_of, widened
from sglcore.models.transformers_rotary import Angles
from sglcore.models.transformers_scores import Between, Last, Product, Traced, memory
from sglcore.models.transformers_states import names_by_kind
from sglcore.models.transformers_walk import (
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

LARGE, LARGE_EACH = 30.0, 5
"""How much larger than others the queries, keys and values of every so-manieth token are in a
trial: scores up to about a thousand, in which limits show that no small score meets."""
EQUAL = 1e-3
"""The greatest difference of what a trial gives, beside as much of each number: scores of a
thousand are rounded by 1e-4."""
FAR_TOKENS = 4096
"""With so many tokens, or as many as the model has positions, a bias has the slopes that it has
with few."""


class OwnAttention(nn.Module):
    """A module that attends by itself: mixed into its class, beside which it has `sglcore_own`."""

    sglcore_own: Own

    def __call__(self, *args: Any, **named: Any) -> Any:
        """As its class; the engine attends."""
        named = self.sglcore_own.without_places(args, named)
        with self.sglcore_own.between(args, named):
            return super().__call__(*args, **named)


class Own:
    """How one such module attends. Before the walk it is not known to."""

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
        """Its bias with `FAR_TOKENS`."""
        module.sglcore_own = self  # pyright: ignore[reportArgumentType]
        module.__class__ = type(self._kind.__name__, (OwnAttention, self._kind), {})

    def between(self, args: Any, named: Any) -> Between | Traced:
        """For one call of the module with these."""
        if torch.compiler.is_compiling() and self._numbers is not None:
            return Traced(self._attend, self._numbers)
        if any(isinstance(each, Tensor) and each.is_meta for each in (*args, *named.values())):
            self._given = args, named
        self._between = Between(self._attend, None if self._numbers is None else self._numbers[0])
        return self._between

    def without_places(self, args: Any, named: dict[str, Any]) -> dict[str, Any]:
        """With zeros, which are one, for the masks [1, 1, T, T] that are not made any more, because
        some classes add them unasked; and for a bias, which may be of fewer keys than a step
        has."""
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
        """Whether it is given something that it adds to its scores."""
        return self._bias is not None

    @property
    def bias(self) -> Tensor:
        """What it was given last and adds to its scores."""
        assert self._bias is not None and self._given is not None
        return self._given[1][self._bias]

    def settle(self) -> bool:
        """Whether it attends; if not, it is of its own class again."""
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
        """The call with the window that the module's own mask has, once buffers have their values.
        Raises `ConfigError` if the class does something else than the engine's attention.

        The evidence is a twin's attention to random queries, keys and values, some of them `LARGE`,
        for as many tokens as the last walk had, and its bias with these and with `FAR_TOKENS`."""
        for name in self._buffers:
            window = _window(self.module.get_buffer(name))
            if window is not None and not window < min(LENGTHS[-1], call.window or LENGTHS[-1]):
                raise refusal(self.module, f"its own mask has a window of {window}, which is not tried")
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
                self.module, f"it attends otherwise, by {float((found - wanted.view_as(found)).abs().max()):.2g}"
            )
        return call

    def _times(self, given: Any) -> float | None:
        """How many times its size it has in the scores; None: it was not added to them, or is a
        mask."""
        if not isinstance(given, Tensor) or isinstance(given, Seen) or _is_padding(given):
            return None
        return self._added.get(memory(given))

    def _slopes(self, heads: int) -> tuple[float, ...] | None:
        """Those of its bias, which has contents."""
        if self._bias is None:
            return None
        times, bias = self._times(self.bias), self.bias
        if times is None or bias.is_meta:
            return None
        slopes, far = slopes_of(bias, heads, times), slopes_of(self.far_bias, heads, times)
        if slopes is not None and (far is None or not np.allclose(slopes, far, rtol=1e-5, atol=0)):
            what = f"{self.far_bias.shape[-1]} keys, and with {bias.shape[-1]} {slopes[0]:.4g}"
            found = "no slopes" if far is None else f"a first slope of {far[0]:.4g}"
            raise refusal(self.module, f"its bias has {found} with {what}")
        return slopes

    def _by_class(self) -> tuple[Tensor, Sequence[Tensor]]:
        """What a twin attends to with random queries, keys and values, and these."""
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
        """The module on the host in float32, whose layers give the same random numbers whatever
        they are given."""
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
    """In place of a linear layer."""

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
    """Random numbers, of tokens where there are three dimensions: those of some are `LARGE`."""
    made = torch.randn(shape)
    if made.dim() == 3:
        made[:, ::LARGE_EACH] *= LARGE
    return made


def _real(given: Any) -> Any:
    """With contents, what a module was given in the walk on shapes."""
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
    """Whether it is a mask of padding, of which there is none."""
    return isinstance(given, Ones) and given.dim() == 4


def _window(mask: Tensor) -> int | None:
    """The window of a mask [..., P, P] of ones and zeros."""
    last = mask.flatten(0, -3)[0, -1].cpu() != 0
    return seen_by(lambda batch, head, query, key: last[key.clamp(max=query)] & (key <= query), len(last) - 1)


def find_own(modules: Sequence[nn.Module]) -> list[Own]:
    """Every module of a model whose code may attend by itself. Those that do show in the walk."""
    names = names_by_kind(modules)
    return [Own(module) for module in modules if _may_attend(names[type(module)])]


def try_own(owns: Sequence[Own], calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    """The calls of a model, those of such modules as `tried` gives them."""
    own = {each.module: each for each in owns}
    return tuple(own[call.module].tried(call) if call.module in own else call for call in calls)


def find_biases(model: PreTrainedModel, owns: Sequence[Own]) -> bool:
    """Whether some have a bias; its contents are theirs then. The model is on the meta device."""
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
    """Ends a forward."""


def _far_biases(model: PreTrainedModel, owns: Sequence[Own]) -> list[Tensor]:
    """What each is given as its bias with `FAR_TOKENS`. The forward ends with the last one that is
    not another's."""
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
    raise refusal(model, "it attends in other layers with many tokens than with few")


def _may_attend(names: set[str]) -> bool:
    return (
        bool(names & {"softmax", "Softmax", "scaled_dot_product_attention"}) and "ALL_ATTENTION_FUNCTIONS" not in names
    )

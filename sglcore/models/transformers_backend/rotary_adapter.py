"""Rotary embedding of transformers' classes: cosines and sines come from tables made once, and the
kernel rotates.

`Rotary` replaces a module that makes cosines and sines from positions, and returns `Angles`
instead. The function with which an attention module rotates queries and keys is recognised by its
results, and replaced in a copy of the globals of that module's forward: transformers itself is not
changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sglcore.core.errors import ConfigError
from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.kernel_layers import Norm, PackedLinear
from sglcore.models.transformers_backend.layer_trace import Trace
from sglcore.models.transformers_backend.rope_tables import angles_of, copied, doubling_of, halves_of
from sglcore.models.transformers_backend.rotary_convention import (
    FORMS,
    LENGTHS,
    Doubling,
    TurnFunction,
    halves_first,
    turns,
)
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable

Attended = Mapping[nn.Module, Sequence[tuple[Tensor, ...]]]
"""The queries, keys and values of each module's attention calls in a walk (`shape_walk.walk`)."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Replaces cosines and sines: a table float32 [P, R] as kernels take it, and the positions int
    [T] of the step's tokens."""

    table: Tensor
    positions: Tensor


class Rotary(nn.Module):
    """Replaces a module that makes the cosines and sines for `size` elements of a head. `calls`:
    the module's calls in the walk on the meta device (`shape_walk.walk`), by their arguments other
    than tensors."""

    def __init__(
        self, own: nn.Module, calls: Mapping[Any, tuple[Any, Any]], size: int, doubling: Doubling = "halves"
    ) -> None:
        super().__init__()
        self.own = own
        self.doubling: Doubling = doubling
        self.has_order = False
        """Whether projection rows were reordered because of its angles."""
        self._calls = calls
        self._tables = {key: torch.empty(1, size, device="meta") for key in calls}

    def place(self, build: Build) -> None:
        """Make the tables in float32, one for each recorded call. A call gets none if its angles
        are not doubled as `doubling`; the original module then computes them. Raises `ConfigError`
        if projection rows were reordered for such a call."""
        tables = {key: self._table(call, build.max_positions) for key, call in self._calls.items()}
        if self.has_order and None in tables.values():
            raise ConfigError(
                f"{type(self.own).__name__} makes other angles than in the walk", remedy="use another model"
            )
        self._tables = {key: table.to(build.weights.device) for key, table in tables.items() if table is not None}

    @property
    def has_tables(self) -> bool:
        """Whether all its calls return `Angles`."""
        return self._tables.keys() == self._calls.keys()

    def _table(self, call: tuple[Any, Any], count: int) -> Tensor | None:
        """Return float32 [count, R], R / 2 cosines and then R / 2 sines of each position; None if
        they are not doubled as `doubling`."""
        angles = angles_of(copied(self.own).cpu(), call, torch.arange(count))
        parts = [halves_of(part, self.doubling) for part in angles]
        if any(not torch.equal(*halves) for halves in parts):
            return None
        return torch.cat([first for first, _ in parts], dim=-1)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the same `Angles` in place of cosines and of sines; for a call without a table,
        the original module's result.
        """
        key, positions = _key(args, named)
        if key not in self._tables:
            return self.own(*args, **named)
        angles = Angles(self._tables[key], positions[0])
        return angles, angles


def _key(args: Any, named: Any) -> tuple[Any, Tensor]:
    """Return the arguments of a call other than tensors, as a key, and the positions: its first
    integer tensor."""
    others = tuple(each for each in args if not isinstance(each, Tensor))
    by_name = tuple((name, each) for name, each in named.items() if not isinstance(each, Tensor))
    tensors = (each for each in (*args, *named.values()) if isinstance(each, Tensor))
    return (others, by_name), next(each for each in tensors if not each.is_floating_point())


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a rotating function: its arguments and its results. `is_plain`: it had no further
    arguments, except the default `unsqueeze_dim`."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    is_plain: bool
    turned: tuple[Tensor, Tensor]


class Turn:
    """Replaces the function with which an attention module rotates its queries and keys.

    `is_direct`: its results go straight to attention, so the rotation can wait for it and be one
    kernel with the store of keys.
    """

    def __init__(self, function: TurnFunction, known: dict[object, bool]) -> None:
        """`known` caches what functions were found to do; all `Turn`s of a model share it."""
        self.function = function
        self._known = known
        self.is_direct = False
        self.projections: Sequence[PackedLinear] = ()
        """The projections of queries and of keys, if neighbours are rotated: their rows are
        reordered so that pairs become halves."""
        self.rotaries: Sequence[Rotary] = ()
        """The modules that make its angles."""
        self.norms: Sequence[Norm] = ()
        """The norms of query heads and key heads, if nothing else reads their results."""
        self._size, self._heads = 0, (0, 0, 0)
        self._calls: list[_Call] | None = []
        self._held: tuple[Tensor, Tensor, Angles] | None = None
        self._rotary = reference_kernels.rotary

    def place(self, build: Build) -> None:
        """Choose the kernel, record the order of the rows of `projections`, and drop what the walk
        on the meta device left. Only after `settle`."""
        self._held = None
        for each in self.projections:
            order = halves_first(each.own.out_features, self._heads[2], self._size)
            build.weights.orders |= {f"{each.name}.{kind}": order for kind in ("weight", "bias")}
        heads, kv_heads, head_dim = self._heads
        given = build.rows(heads * head_dim), build.rows(kv_heads * head_dim), build.indices()
        self._rotary = build.kernel(KernelTable.rotary, *given, self.table(build), head_dim)

    def table(self, build: Build) -> Tensor:
        """Return a table of angles [max_positions, R] without contents, on the meta device, as a
        sample argument for kernels.
        """
        return torch.empty(build.max_positions, self._size, device="meta")

    def __call__(self, q: Tensor, k: Tensor, cos: Any, sin: Any, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Return queries [1, heads, T, D] and keys rotated, or unchanged if attention rotates them
        later. Under a compiler they are rotated here. With cosines that are no `Angles`, the
        original function computes, or in the walk the call is recorded."""
        if type(cos) is not Angles:
            return self._by_class(q, k, cos, sin, *more, **named)
        if self.is_direct and not torch.compiler.is_compiling():
            self._held = q, k, cos
            return q, k
        shapes = [(part.shape[2], part.shape[1], part.shape[3]) for part in (q, k)]
        rows = [
            part[0].transpose(0, 1).reshape(size, heads * dim)
            for part, (size, heads, dim) in zip((q, k), shapes, strict=True)
        ]
        turned = self.rows(rows[0], rows[1], cos, q.shape[3])
        q, k = (part.view(shape).transpose(0, 1)[None] for part, shape in zip(turned, shapes, strict=True))
        return q, k

    def rows(self, q: Tensor, k: Tensor, angles: Angles, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return the rotated queries [T, heads * head_dim] and keys [T, kv_heads * head_dim], by
        the kernel.
        """
        return self._rotary(q, k, angles.positions, angles.table, head_dim)

    def _by_class(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        if self._calls is None:
            assert not self.projections, "cosines of another kind than in the walk"
            return self.function(q, k, cos, sin, *more, **named)
        # Does not read the angles, so that any read in the trace is another reader's.
        turned = _like(q), _like(k)
        is_plain = not more and named in ({}, {"unsqueeze_dim": 1})
        self._calls.append(_Call(q, k, cos, sin, is_plain, turned))
        return turned

    @property
    def read(self) -> Iterator[Tensor]:
        """The cosines and sines that it got in its calls in the walk on the meta device."""
        return (each for call in self._calls or () for each in (call.cos, call.sin))

    def is_kernels(self, doubling: Doubling, trace: Trace, attended: Sequence[tuple[Tensor, ...]]) -> bool:
        """Return whether the function did in every call of the walk on the meta device what the
        kernel does, with angles doubled as `doubling`. If it rotates neighbours, sets
        `projections`, the two to reorder. `attended` as in `settle`."""
        calls = self._calls or []
        if all(self._is_kernels(call, doubling, "halves") for call in calls):
            return True
        is_one = len(calls) == 1 and self._is_kernels(calls[0], doubling, "neighbours")
        if not is_one or not self._goes_to(attended):
            return False
        found = [trace.giver_of(heads) for heads in (calls[0].q, calls[0].k)]
        self.projections = [each for each in found if isinstance(each, PackedLinear)]
        return len(self.projections) == 2

    def _is_kernels(self, call: _Call, doubling: Doubling, pairs: Doubling) -> bool:
        is_heads = call.q.dim() == 4 and call.k.dim() == 4 and call.q.shape[-1] == call.k.shape[-1]
        if not call.is_plain or not is_heads or call.cos.shape != call.sin.shape:
            return False
        asked = self.function, call.q.shape[-1], _turned_size(call.cos, doubling), doubling, pairs
        if asked not in self._known:
            self._known[asked] = turns(*asked)
        return self._known[asked]

    def _goes_to(self, attended: Sequence[tuple[Tensor, ...]]) -> bool:
        calls = self._calls or []
        pairs = zip((call.turned for call in calls), attended, strict=False)
        is_same = all(q is of[0] and k is of[1] and of[2].shape[3] == q.shape[3] for (q, k), of in pairs)
        return is_same and len(calls) == len(attended)

    def settle(self, doubling: Doubling, attended: Sequence[tuple[Tensor, ...]], trace: Trace) -> None:
        """End the recording of calls and set `is_direct` and `norms`. `doubling`: how its angles
        are doubled; `attended`: the queries, keys and values of the module's attention calls."""
        self.is_direct = self._goes_to(attended)
        first, *others = self._calls or []
        found = [trace.giver_of(heads) for heads in (first.q, first.k)]
        norms = [each for each in found if isinstance(each, Norm)]
        self.norms = norms if self.is_direct and len(norms) == 2 and not others else ()
        self._size = _turned_size(first.cos, doubling)
        self._heads = first.q.shape[1], first.k.shape[1], first.q.shape[3]
        self._calls = None

    def take(self, q: Tensor, k: Tensor) -> Angles | None:
        """Return the angles with which attention still has to rotate these queries and keys, which
        `__call__` returned unchanged; None if there are none. A second call returns None."""
        if self._held is None:
            return None
        (held_q, held_k, angles), self._held = self._held, None
        assert q is held_q and k is held_k, "queries or keys changed between rotary embedding and attention"
        return angles


def _turned_size(cos: Tensor, doubling: Doubling) -> int:
    """Return the number of rotated elements of a head."""
    return cos.shape[-1] * (2 if doubling == "none" else 1)


def _like(x: Tensor) -> Tensor:
    """Return an empty tensor with the same shape and strides, without a read of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def put_turns(modules: Iterable[nn.Module]) -> dict[nn.Module, Turn]:
    """Put a `Turn` in place of the rotating function that the forward of a module calls, if there
    is exactly one; returns them by module. Changes only the instance's `forward`."""
    names: dict[Any, str | None] = {}
    known: dict[object, bool] = {}
    found: dict[nn.Module, Turn] = {}
    for module in modules:
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward:
            continue
        if forward not in names:
            names[forward] = _turning_name(forward)
        if (name := names[forward]) is not None:
            found[module] = turn = Turn(forward.__globals__[name], known)
            own = {**forward.__globals__, name: turn}
            del own["__name__"]  # or torch's compiler takes globals from transformers' module
            copied = FunctionType(forward.__code__, own, forward.__name__, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)
    return found


def _turning_name(forward: FunctionType) -> str | None:
    """Return the name of the only function named in a forward that rotates heads of eight elements;
    None if there are none or several. Its calls are checked with their own sizes later."""
    own = forward.__globals__
    named = [name for name in forward.__code__.co_names if inspect.isfunction(own.get(name))]
    turning = [
        name
        for name in named
        if _takes_four(own[name]) and any(turns(own[name], 8, 8, *form, LENGTHS[:1]) for form in FORMS)
    ]
    return turning[0] if len(turning) == 1 else None


def _takes_four(function: FunctionType) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) == 4


class RotaryTrace:
    """Records the calls in which modules without parameters make two tensors, such as cosines and
    sines, from positions, during a walk on the meta device (`shape_walk.walk`)."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, dict[Any, tuple[Any, Any]]] = {}
        self.made: dict[nn.Module, list[Tensor]] = {}

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record the calls of a model's modules inside."""
        found = [each for each in modules if each._buffers and not each._modules and not each.state_dict()]
        hooks = [each.register_forward_hook(self._after, with_kwargs=True) for each in found]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after(self, module: nn.Module, args: Any, named: Any, out: Any) -> Any:
        """Record a call that makes two tensors from positions, and return new tensors in place of
        its results, which nothing has read yet; None for any other call, so that its results stay.
        """
        tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        positions = [each for each in tensors if not each.is_floating_point()]
        if len(positions) != 1 or not isinstance(out, tuple) or len(out) != 2:
            return None
        size = positions[0].shape
        if any(not isinstance(each, Tensor) or each.dim() != 3 or each.shape[:2] != size for each in out):
            return None
        made = tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in out)
        self.calls.setdefault(module, {})[_key(args, named)[0]] = args, named
        self.made.setdefault(module, []).extend(made)
        return made


def settle(
    model: nn.Module, turns: Mapping[nn.Module, Turn], seen: RotaryTrace, trace: Trace, attended: Attended
) -> tuple[list[Rotary], dict[nn.Module, Turn]]:
    """Replace each module that makes angles by a `Rotary` if only `Turn`s read them, and remove
    each `Turn` that reads other angles. Returns the new modules and the remaining `Turn`s."""
    own = {id(each): module for module, made in seen.made.items() for each in made}
    makers = {module: {own.get(id(each)) for each in turn.read} for module, turn in turns.items()}
    refused = {module for module, made in seen.made.items() if any(trace.is_read(each) for each in made)}
    doublings: dict[nn.Module, Doubling] = {
        module: doubling_of(module, next(iter(calls.values()))) for module, calls in seen.calls.items()
    }

    def doublings_of(module: nn.Module) -> set[Doubling]:
        return {doublings.get(maker, "halves") for maker in makers[module] if maker is not None}

    def is_kernels(module: nn.Module, turn: Turn) -> bool:
        found = doublings_of(module)
        return len(found) == 1 and turn.is_kernels(found.pop(), trace, attended.get(module, []))

    refused |= {maker for module, turn in turns.items() if not is_kernels(module, turn) for maker in makers[module]}
    kept: dict[nn.Module, Turn] = {}
    for module, turn in turns.items():
        if makers[module] and makers[module] <= seen.made.keys() - refused:
            turn.settle(doublings_of(module).pop(), attended.get(module, []), trace)
            kept[module] = turn
        else:
            del module.forward
    used = {maker for module in kept for maker in makers[module] if maker is not None}
    sizes = {each: _turned_size(seen.made[each][0], doublings[each]) for each in used}
    made = {each: Rotary(each, seen.calls[each], sizes[each], doublings[each]) for each in used}
    for module, turn in kept.items():
        turn.rotaries = [made[maker] for maker in makers[module] if maker is not None]
        for each in turn.rotaries if turn.projections else ():
            each.has_order = True
    return _replaced(model, made), kept


def _replaced(model: nn.Module, made: Mapping[nn.Module, Rotary]) -> list[Rotary]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])
    return list(made.values())

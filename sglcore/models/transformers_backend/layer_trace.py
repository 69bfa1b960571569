"""Records where the layers' tensors go in a walk (a forward on the meta device, `shape_walk.walk`):
which layers take the same input, and which residual sums feed a norm and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sglcore.models.transformers_backend.kernel_layers import GatedBlock, Norm, PackedLinear
from sglcore.models.transformers_backend.router_detection import SparseBlock

Giver = PackedLinear | GatedBlock | Norm | SparseBlock
"""Layers with results that may be addends of a residual sum."""


@dataclass(frozen=True, slots=True)
class _Addition:
    """An addition: the step at which it ran, and its two operands."""

    step: int
    operands: tuple[Tensor, Tensor]


class Trace(TorchDispatchMode):
    """Records every torch operation inside `watching`, and every call of the layers that replace a
    model's own. Keeps the tensors alive, so that `id` identifies them."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[PackedLinear, Tensor]] = []
        self._normed: list[tuple[Norm, Tensor]] = []
        self._given: dict[int, tuple[Giver, int]] = {}
        self._results: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        self._step = 0
        self._reads: dict[int, list[int]] = {}
        self._additions: dict[int, _Addition] = {}
        self._fixed: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch calls this while the class is made; True would import its compiler, which takes a
        # second of every start.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_sum = func is torch.ops.aten.add.Tensor and not kwargs and isinstance(args[1], Tensor)
        result = _sum(*args) if is_sum else func(*args, **(kwargs or {}))
        self._step += 1
        for each in _tensors((*args, *(kwargs or {}).values())):
            if func.is_view:
                self._kept.append(each)
            else:
                self._read(each)
        if is_sum:
            self._kept.append(result)
            self._additions[id(result)] = _Addition(self._step, (args[0], args[1]))
        return result

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Record the calls of a model's modules inside."""
        held = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
        self._fixed = {_memory(each) for each in held if each is not None}
        hooks = []
        for module in modules:
            if isinstance(module, Giver):
                hooks += [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, Norm):
            self._normed.append((module, args[0]))
        if isinstance(module, PackedLinear):
            self.products.append((module, args[0]))
        if not isinstance(module, SparseBlock):  # the class's own code shows its reads
            self._step += 1
            self._read(args[0])

    def _read(self, tensor: Tensor) -> None:
        self._kept.append(tensor)
        self._reads.setdefault(_memory(tensor), []).append(self._step)

    def _after(self, module: Any, _: Any, found: Any) -> None:
        out = found[0] if isinstance(found, tuple) else found
        self._kept.append(out)
        self._given[id(out)] = module, self._step
        self._results[_memory(out)] = out

    def is_read(self, tensor: Tensor, after: int = 0) -> bool:
        """Whether an operation after step `after` has read a tensor's memory. Making a view is no
        read."""
        return any(step > after for step in self._reads.get(_memory(tensor), ()))

    def heads(self) -> dict[Norm, set[tuple[int | None, bool]]]:
        """Return for each norm the numbers of heads that it was called with, and whether these were
        transposed to [1, heads, T, size]; (None, False) stands for a call with rows [1, T,
        size]."""
        found: dict[Norm, set[tuple[int | None, bool]]] = {}
        for norm, x in self._normed:
            found.setdefault(norm, set()).add(_heads(x))
        return found

    def addends(self) -> set[Giver]:
        """Return the layers with results that, in every call, are an operand of a residual sum that
        feeds a norm of rows, so that one kernel can add and norm. A layer does not count if another
        operation reads its result, or reads either operand after the sum: the kernel overwrites
        both."""
        fused: Counter[Giver] = Counter()
        for norm, x in self._normed:
            addition = self._additions.get(id(x))
            if addition is not None and norm.heads is None and self._may_spoil(addition):
                first, second = addition.operands
                fused.update(self._giver(second, addition.step) or self._giver(first, addition.step))
        calls = Counter(module for module, _ in self._given.values())
        return {module for module, count in fused.items() if count == calls[module]}

    def giver_of(self, heads: Tensor) -> Giver | None:
        """Return the layer, such as a linear layer or a norm of heads, with a whole result that is
        `heads` [1, heads, T, D], perhaps transposed. None if no layer made `heads`, if it was
        called more than once, or if an operation has read the result since (views do not count)."""
        _, count, tokens, size = heads.shape
        out = self._results.get(_memory(heads))
        if out is None:
            return None
        module, step = self._given[id(out)]
        shape = (1, tokens, count, size) if isinstance(module, Norm) else (1, tokens, count * size)
        is_whole = out.shape == shape and heads.stride()[1:] == (size, count * size, 1)
        if isinstance(module, Norm):  # some classes apply the norm after the transposition
            is_whole = is_whole or (out.shape == heads.shape and out.stride() == heads.stride())
        is_once = [each for each, _ in self._given.values()].count(module) == 1
        return module if is_whole and is_once and not self.is_read(heads, step) else None

    def _giver(self, operand: Tensor, step: int) -> list[Giver]:
        """Return [layer] for the layer that made `operand`, if the addition at `step` is the only
        operation that has read the operand since; else []."""
        if id(operand) not in self._given:
            return []
        module, given = self._given[id(operand)]
        return [module] if [each for each in self._reads[_memory(operand)] if each > given] == [step] else []

    def _may_spoil(self, addition: _Addition) -> bool:
        first, second = addition.operands
        is_rows = first.shape == second.shape and first.dim() == 3 and first.dtype is second.dtype
        if not is_rows or _memory(first) == _memory(second):
            return False
        return all(
            each.is_contiguous()
            and each.untyped_storage().nbytes() == each.numel() * each.element_size()
            and _memory(each) not in self._fixed
            and not self.is_read(each, addition.step)
            for each in addition.operands
        )


def _heads(x: Tensor) -> tuple[int | None, bool]:
    """Return the number of heads in `x`, and whether they come before the tokens, as [1, heads, T,
    size]; (None, False) if `x` does not have four dimensions. In memory the heads of a token follow
    each other; a single head is the dimension with one element."""
    if x.dim() != 4:
        return None, False
    first, second = zip(x.stride()[1:3], x.shape[1:3], strict=True)
    return (first[1], True) if first < second else (second[1], False)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Add two tensors of the walk. Operands of one shape and dtype skip torch's shape inference,
    which takes 0.2 ms."""
    is_plain = first.shape == second.shape and first.dtype is second.dtype
    if not is_plain or not (first.is_contiguous() and second.is_contiguous()):
        return first + second
    return torch.empty(first.shape, dtype=first.dtype, device="meta")


def shared_inputs(calls: Iterable[tuple[PackedLinear, Tensor]]) -> list[Sequence[PackedLinear]]:
    """Return the groups of two or more linear layers that always take the same tensor and have the
    same input size and bias option. Layers and groups are in the order of their calls."""
    by_input: dict[int, list[PackedLinear]] = {}
    for module, x in calls:
        by_input.setdefault(id(x), []).append(module)
    groups = dict.fromkeys(tuple(group) for group in by_input.values())
    times = Counter(module for group in groups for module in group)
    return [
        group for group in groups if len(group) > 1 and _is_one_kind(group) and all(times[each] == 1 for each in group)
    ]


def _is_one_kind(group: Sequence[PackedLinear]) -> bool:
    return len({(each.product.inputs, each.product.has_bias) for each in group}) == 1


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments, also those in lists."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from (part for part in each if isinstance(part, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

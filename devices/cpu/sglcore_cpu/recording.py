"""Record a step as a list: kernel calls in their order, and the torch operations between them.

Kernels do not run during recording: their results are zeros, so recording a large batch costs no
more than recording a small one. Views cost nothing at replay. Kernel results share an arena: when
the last tensor of a block is gone, a later result of the same step reuses the block, as an
allocator would do in an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sglcore_cpu.kernels.elementwise import elementwise
from sglcore_cpu.kernels.operations import Operations
from sglcore_cpu.native import TYPES, BoundKernel, Engine, Program, recorder

ALIGNMENT = 64
READS = frozenset(("aten::_local_scalar_dense", "aten::item", "aten::nonzero"))
"""Operations that pass a result to the host: on replay the step could take another branch."""


class NotCapturable(RuntimeError):
    """A step that can not be replayed; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """A part of a recorded step: a torch operation or Python call between two kernels. Replay calls
    it again and copies the tensors it returns into `results`, the tensors of the recording, because
    later kernels know their addresses. `results` is empty if nothing is to be copied."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Tensor, ...]

    def run(self) -> None:
        """Call the function again, and copy what it returns into `results`."""
        again = self.function(*self.arguments, **self.named)
        for kept, fresh in zip(self.results, _tensors(again), strict=True) if self.results else ():
            kept.copy_(fresh)


@dataclass(frozen=True, slots=True)
class KernelCalls:
    """A part of a recorded step: the kernel calls [first, last) of the program."""

    program: Program
    first: int
    last: int

    def run(self) -> None:
        """Run the kernel calls and wait."""
        self.program.run(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Kept:
    """A part of a recorded step that runs nothing: tensors from `torch.empty` and the like, kept
    because recorded kernels may use their addresses."""

    tensors: tuple[Tensor, ...]

    def run(self) -> None:
        """Do nothing: the tensors only have to stay alive."""


class Block:
    """A block of memory, uint8 at a multiple of 64 bytes, zeros at first; `user` refers weakly to
    the storage of the tensor that uses it, or is None."""

    __slots__ = ("memory", "user")

    def __init__(self, size: int) -> None:
        # By NumPy, because torch operations are being recorded.
        whole = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        self.memory = whole[start : start + size]
        self.user: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        """Whether no tensor uses the block any more."""
        return self.user is None or self.user.expired()

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros of this shape and dtype over the start of this memory, with a
        storage of its own; the block is in use until that storage is gone. The shape must fit (not
        checked)."""
        size = _size(shape, dtype)
        held = self.memory[: max(size, dtype.itemsize)]
        held[:] = 0
        tensor = torch.frombuffer(held.data, dtype=dtype)
        self.user = StorageWeakRef(tensor.untyped_storage())
        return (tensor if size else tensor[:0]).view(tuple(shape))


class StepArena:
    """Blocks of memory for the results of steps that never run at the same time: steps may share a
    block."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, used and free."""
        return sum(block.memory.size for block in self._blocks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in the smallest free block that holds it, or in a new block."""
        size = max(ALIGNMENT, -(-_size(shape, dtype) // ALIGNMENT) * ALIGNMENT)
        fitting = [block for block in self._blocks if block.memory.size >= size and block.is_free]
        block = min(fitting, key=lambda block: block.memory.size, default=None)
        if block is None:
            block = Block(size)
            self._blocks.append(block)
        return block.lend(shape, dtype)


Part = KernelCalls | HostCall | Kept


class Watch(TorchDispatchMode):
    """A torch dispatch mode that reports every torch operation to a recording, except views;
    composite operations are decomposed first. An operation that has a kernel is done by it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        # Operations that torch does not decompose; whether it does never changes.
        self._plain: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch calls this when the class is created; True would import its compiler, which adds a
        # second to every start.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if (found := self._recording.by_kernel(func, args, named)) is not None:
            return found
        if func not in self._plain:
            with self:
                decomposed = func.decompose(*args, **named)
            if decomposed is not NotImplemented:
                return decomposed
            self._plain.add(func)
        result = func(*args, **named)
        if not func.is_view:
            self._recording.keep(func, args, named, result)
        return result


class Recording:
    """A context manager that records the calls of the step in its `with` block, on this thread, as
    the list `parts`; running the parts in order replays the step. It is the `Recorder` of kernel
    calls. `arena` supplies the memory of their results."""

    def __init__(self, arena: StepArena) -> None:
        self.parts: list[Part] = []
        self._arena = arena
        self._watch = Watch(self)
        self._program: Program | None = None
        self._engine: Engine | None = None
        self._begun = 0

    def __enter__(self) -> Recording:
        self._token = recorder.set(self)
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)
        recorder.reset(self._token)
        self._end_kernels()

    def add(self, engine: Engine, kernel: int, arguments: bytes) -> None:
        """Record a call of the engine's kernel number `kernel` with its packed `arguments`; it does
        not run. Raises NotCapturable if its engine is not that of the step's first call."""
        if self._engine is None or self._program is None:
            self._engine, self._program = engine, engine.program()
        if self._engine is not engine:
            raise NotCapturable("one step calls the kernels of two engines; found a second, wanted one")
        self._program.add(kernel, arguments)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Implements `Recorder.empty`: return a tensor of zeros from the arena. Its block is reused
        within the step once the tensor is gone."""
        return self._arena.empty(shape, dtype)

    def kernel(self, name: str) -> BoundKernel | None:
        """Return a kernel of the step's engine; None before the step has called any kernel."""
        return None if self._engine is None else self._engine.kernel(name).bind()

    def host(self, function: Callable[..., object], *arguments: object) -> None:
        """Implements `Recorder.host`: record `function(*arguments)` without calling it. The record
        keeps the arguments alive, so no later result of the step reuses their memory."""
        self._end_kernels()
        self.parts.append(HostCall(function, arguments, {}, ()))

    def by_kernel(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
        """Return the result of the torch operation `func(*args, **named)` as a recorded kernel will
        compute it (zeros now); None if there is no kernel for it, or before the step has called any
        kernel."""
        if self._engine is None:
            return None
        if func is torch.ops.aten._to_copy.default:
            return self._cast(self._engine, *args, **named)
        return elementwise(self._engine, func, args, named)

    def _cast(self, engine: Engine, x: Tensor, dtype: torch.dtype | None = None, **others: Any) -> Tensor | None:
        """Return x cast to `dtype` by a recorded kernel; None unless x is rows [T, N] without gaps,
        both dtypes are float32 or bfloat16, and no other option is given."""
        is_cast = dtype in TYPES and x.dtype in TYPES and not any(others.values())
        if not is_cast or dtype is None or x.dim() != 2 or x.stride(1) != 1:
            return None
        return Operations(engine).cast(x, dtype)

    def keep(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        """Record the operation `func(*args, **named)` with its `result`, which torch has computed.
        Raises NotCapturable if the result goes to the host."""
        name, results = func._schema.name, _tensors(result)
        if name in READS or not (results or func._schema.is_mutable):
            raise NotCapturable(
                f"{name} copies a value to the host in the middle of a step; run eagerly with --graph off"
            )
        if name.startswith("aten::empty"):
            self.parts.append(Kept(results))
            return
        self._end_kernels()
        self.parts.append(HostCall(func, args, named, () if func._schema.is_mutable else results))

    def _end_kernels(self) -> None:
        if self._program is None or len(self._program) == self._begun:
            return
        self.parts.append(KernelCalls(self._program, self._begun, len(self._program)))
        self._begun = len(self._program)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors in an operation's result (a tensor, or a tuple or list of things), in
    order; those in nested lists are not found."""
    parts = result if isinstance(result, tuple | list) else (result,)
    return tuple(part for part in parts if isinstance(part, Tensor))


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return count

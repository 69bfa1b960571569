"""Triton kernels in the interpreter: on device memory directly, with the address of every lane
checked.

Triton's interpreter copies arguments to the host and back. Here a kernel over simulated tensors
runs on their bytes as one piece of work of its stream, and the bytes that its lanes read and wrote
go to the race checker. In a capture it is a node with the bytes that the captured run touched.
Addresses are checked against all tensor arguments together, because the interpreter does not know
from which argument a pointer came. Arithmetic that the interpreter silently computes wrongly
(bfloat16 without an upcast) is a fault of kind wrong_arithmetic.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglcore_sim.faults import Fault

RANGES = 64
"""Most byte ranges of one argument that are tracked separately; more are merged into one."""
NAMED = 8
"""Most lanes that a message lists."""
UPCAST = "the interpreter computes on the bits of bfloat16 as integers; upcast with .to(tl.float32) first"


@dataclass(slots=True)
class Run:
    """One launch of a Triton kernel. `starts`, `ends` and `arguments`: the addresses of the tensor
    arguments' first bytes and after their last ones, ascending, and their names. `make(kind, text)`
    makes a fault. `touched` collects the byte ranges, arrays [N, 2] of (first, end), that lanes
    wrote (key True) and read (False)."""

    kernel: str
    starts: np.ndarray
    ends: np.ndarray
    arguments: Sequence[str]
    make: Callable[[str, str], Fault]
    is_rehearsal: bool = False
    touched: dict[bool, list[np.ndarray]] = field(default_factory=lambda: {False: [], True: []})

    def check(self, what: str, program: Any, pointers: np.ndarray, mask: Any, size: int, write: bool) -> Any:
        """Check the addresses of the lanes that are not masked off, and record their bytes in
        `touched`. Return bool of the shape of `pointers`: the lanes that run. `mask` None: no lane
        is masked off. `size`: bytes per lane; `what` and `program` are for messages. A lane outside
        of every argument raises the fault out_of_bounds, except in a rehearsal (the run in a
        capture, before the kernel's inputs are computed), which skips such a lane."""
        active = np.broadcast_to(np.ones((), bool) if mask is None else mask, pointers.shape).astype(bool)
        addresses = pointers[active].reshape(-1).astype(np.uint64)
        if not addresses.size:
            return active
        index = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        outside = (index < 0) | (addresses + np.uint64(size) > self.ends[np.maximum(index, 0)])
        if outside.any() and self.is_rehearsal:
            active[active] = ~outside
            addresses = addresses[~outside]
        elif outside.any():
            lanes = [tuple(int(i) for i in lane) for lane in np.argwhere(active)[outside][:NAMED]]
            raise self.make(
                "out_of_bounds", self._text(what, program, lanes, int(outside.sum()), int(addresses[outside][0]), size)
            )
        if addresses.size:
            self.touched[write].append(np.unique(np.stack((addresses, addresses + np.uint64(size)), 1), axis=0))
        return active

    def _text(self, what: str, program: Any, lanes: list[tuple[int, ...]], count: int, address: int, size: int) -> str:
        near = int(
            np.argmin(
                np.minimum(np.abs(self.starts.astype(float) - address), np.abs(self.ends.astype(float) - address))
            )
        )
        start, end = int(self.starts[near]), int(self.ends[near])
        place = f"{address - end} bytes past the end" if address >= end else f"{start - address} bytes before the start"
        if start <= address < end:
            place = "across the end"
        named = ", ".join(map(str, lanes)) + (", ..." if count > len(lanes) else "")
        return (
            f"{what} in kernel {self.kernel}, program {tuple(program)}, {count} lanes ({named}): "
            f"{size} bytes at {place} of {self.arguments[near]} ({end - start} bytes); mask these lanes off"
        )

    def ranges(self, write: bool) -> list[tuple[int, int]]:
        """Return the byte ranges that were written (`write` True) or read (False), as ascending
        addresses (first, end), end exclusive; ranges that touch are merged."""
        return merged(self.touched[write])


class Here(threading.local):
    """The state of this thread: `run`, the launch that the interpreter now runs (None: accesses are
    not checked); `checking` > 0 inside `check_lanes`; and `ready`, the modules (ids of their
    globals) for which this launch has prepared Triton's language."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.checking = 0
        self.ready: set[int] = set()


HERE = Here()


def merged(pieces: list[np.ndarray]) -> list[tuple[int, int]]:
    """Return byte ranges, given as arrays [N, 2] of (first, end), as one ascending list of tuples;
    ranges that touch or overlap are merged. No arrays: an empty list."""
    if not pieces:
        return []
    every = np.unique(np.concatenate(pieces), axis=0)
    starts, ends = every[:, 0], np.maximum.accumulate(every[:, 1])
    breaks = np.flatnonzero(starts[1:] > ends[:-1]) + 1
    first, last = np.concatenate(([0], breaks)), np.concatenate((breaks - 1, [len(every) - 1]))
    return [(int(starts[a]), int(ends[b])) for a, b in zip(first, last, strict=True)]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and after its last one, over all strides; equal
    for a tensor without elements."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return start, start
    return start, start + size * (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def make_run(kernel: str, tensors: dict[str, torch.Tensor], make: Callable[[str, str], Fault]) -> Run:
    """Return a run of the kernel named `kernel` over `tensors` (by argument name). Its arguments
    are sorted by address; overlapping ones become one, named "a, b", and tensors without elements
    are left out. `make(kind, text)` makes a fault. Nothing runs yet."""
    rows: list[tuple[int, int, str]] = []
    for start, end, name in sorted((*span(tensor), name) for name, tensor in tensors.items()):
        if rows and start < rows[-1][1]:
            rows[-1] = (rows[-1][0], max(end, rows[-1][1]), f"{rows[-1][2]}, {name}")
        elif end > start:
            rows.append((start, end, name))
    starts, ends = (np.array([row[i] for row in rows] or [0], dtype=np.uint64) for i in (0, 1))
    return Run(kernel, starts, ends, [row[2] for row in rows] or ["no argument"], make)


@contextmanager
def running(run: Run) -> Iterator[Run]:
    """Context manager: check and record the interpreter's accesses on this thread in `run`, in
    place of an outer run; yields `run`."""
    before, HERE.run = HERE.run, run
    try:
        yield run
    finally:
        HERE.run = before


@contextmanager
def check_lanes() -> Iterator[None]:
    """Context manager: in its block, on this thread, kernels over plain CPU tensors are checked
    too. It works without a simulated device, and raises the same faults."""
    patch()
    HERE.checking += 1
    try:
        yield
    finally:
        HERE.checking -= 1


@functools.cache
def patch() -> bool:
    """Patch the launches, memory operations and arithmetic of Triton's interpreter, once per
    process. Return whether Triton is installed; without it nothing is patched."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return False
    prepare_once()
    builder = interpreter.InterpreterBuilder
    _guard_memory(builder)
    _guard_arithmetic(builder, interpreter)
    original = interpreter.GridExecutor.__call__

    @functools.wraps(original)
    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(interpreter, functools.partial(original, executor), executor, args, kwargs)

    setattr(interpreter.GridExecutor, "__call__", call)  # noqa: B010  # foreign: the only way to run on the caller's memory
    return True


@functools.cache
def prepare_once() -> None:
    """Make the interpreter faster, once per process; without Triton it does nothing. It prepares
    Triton's language for a module's functions once per launch instead of at every call, which took
    a third of a kernel's time and had no effect. It also caches the shape, type and dtype objects
    of values, which took a fifth of the remaining time."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _keep_shapes()
    _keep_types(interpreter)
    _keep_dtypes(interpreter)
    run, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__

    @functools.wraps(run)
    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        HERE.ready = set()
        return run(executor, *args, **kwargs)

    @functools.wraps(call)
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        names = id(function.fn.__globals__)
        if names not in HERE.ready:
            HERE.ready.add(names)
            return call(function, *args, **kwargs)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    setattr(interpreter.GridExecutor, "__call__", launched)  # noqa: B010  # foreign: where a launch begins
    setattr(interpreter.InterpretedFunction, "__call__", called)  # noqa: B010  # foreign: what makes ready


def _keep_shapes() -> None:
    """Make the interpreter cache the objects for shape and element count of values, by shape; they
    are never written to."""
    from triton.language import core

    @functools.cache
    def made(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def begin(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = begin  # foreign: runs for every value of a kernel


def _keep_types(interpreter: Any) -> None:
    """Make the interpreter cache the type object of a block, by scalar type and shape."""
    from triton.language import core

    kept = functools.cache(lambda scalar, sizes: core.block_type(scalar, list(sizes)))

    def with_element(self: Any, scalar_ty: Any) -> Any:
        return block(None, scalar_ty, self.shape)

    def block(_: Any, dtype: Any, shape: Any) -> Any:
        return kept(dtype, tuple(shape)) if type(dtype) is core.dtype else core.block_type(dtype, shape)

    core.block_type.with_element_ty = with_element  # foreign: called for each cast
    interpreter.InterpreterBuilder.get_block_ty = block  # foreign: called for each new value


def _keep_dtypes(interpreter: Any) -> None:
    """Make the interpreter cache numpy's dtype of a scalar type; it builds its table anew at each
    call."""
    from triton.language import core

    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def named(asked: Any) -> Any:
        scalar: Any = asked.element_ty if isinstance(asked, core.block_type) else asked
        if isinstance(scalar, core.pointer_type):
            return original(asked)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    setattr(interpreter, "_get_np_dtype", named)  # noqa: B010  # foreign: called for each operation


def _guard_memory(builder: Any) -> None:
    def guarded(name: str, place: int | None, write: bool) -> None:
        original = getattr(builder, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any) -> Any:
            if HERE.run is not None:
                pointers = args[1] if name == "create_atomic_rmw" else args[0]
                size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
                mask = None if place is None else args[place].data
                lanes = HERE.run.check(name.removeprefix("create_"), self.grid_idx, pointers.data, mask, size, write)
                if HERE.run.is_rehearsal and place is not None:
                    args = (*args[:place], type(args[place])(lanes, args[place].dtype), *args[place + 1 :])
            return original(self, *args)

        setattr(builder, name, method)  # foreign: the only place that knows the lanes

    guarded("create_masked_load", 1, False)
    guarded("create_masked_store", 2, True)
    guarded("create_atomic_rmw", 3, True)
    guarded("create_atomic_cas", None, True)


def _guard_arithmetic(builder: Any, interpreter: Any) -> None:
    import triton.language as tl

    bits = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift, np.invert)

    def refuse(what: str, *handles: Any) -> None:
        if HERE.run is not None and any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
            raise HERE.run.make("wrong_arithmetic", f"{what} on bfloat16 in kernel {HERE.run.kernel}: {UPCAST}")

    def guarded(name: str, count: int, exempt: Sequence[Any] = ()) -> None:
        original = getattr(builder, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any) -> Any:
            if not (len(args) > count and args[count] in exempt):
                refuse(args[count].__name__ if name.endswith("ary_op") else name.removeprefix("create_"), *args[:count])
            return original(self, *args)

        setattr(builder, name, method)  # foreign: wrong numbers would pass in silence

    guarded("binary_op", 2, bits)
    guarded("unary_op", 1, bits)
    guarded("create_dot", 2)
    guarded("create_fma", 3)
    check = interpreter.ReduceScanOpInterface.check_tensor

    def check_tensor(self: Any, given: Any) -> Any:
        refuse("a reduction", *(part.handle for part in given))
        return check(self, given)

    interpreter.ReduceScanOpInterface.check_tensor = check_tensor  # foreign: wrong numbers would pass in silence


def launch(interpreter: Any, run_kernel: Callable[..., Any], executor: Any, args: Any, kwargs: Any) -> Any:
    """Run one launch of a kernel: with device tensors as one piece of work of the device, with
    checks; else on the CPU, with checks only inside `check_lanes`. `run_kernel(*args, **kwargs)`
    calls the interpreter itself; `executor` is Triton's grid executor, which knows the kernel's
    name and argument names. Returns what `run_kernel` returns if nothing is checked, else None."""
    from sglcore_sim.simulator import current

    sim, name = current(), executor.fn.__name__
    tensors = dict(tensor_arguments(executor.arg_names, args, kwargs))
    kind = sim.kind.torch_name if sim is not None else None
    on_device = {name: tensor for name, tensor in tensors.items() if tensor.device.type == kind}
    if not on_device and not HERE.checking:
        return run_kernel(*args, **kwargs)
    make = sim.log.make if sim is not None and on_device else Fault

    def run(over: Callable[[Any], Any], is_rehearsal: bool = False) -> Run:
        plain = {name: over(tensor) for name, tensor in tensors.items()}
        with running(make_run(name, plain, make)) as made:
            made.is_rehearsal = is_rehearsal
            try:
                run_kernel(*(over(value) for value in args), **{key: over(value) for key, value in kwargs.items()})
            except interpreter.InterpreterError as error:
                raise (error.__cause__ if isinstance(error.__cause__, Fault) else error) from error.__cause__
        return made

    if sim is None or not on_device:
        run(lambda value: value)
        return None
    # Kernels may access pinned memory too; `sim.launch` refuses pageable memory.
    hosts = [tensor for tensor in tensors.values() if tensor.device.type == "cpu" and tensor.dim()]
    return _on_device(sim, name, [*on_device.values(), *hosts], run)


def _on_device(sim: Any, name: str, tensors: list[torch.Tensor], run: Callable[..., Run]) -> None:
    kind = sim.kind.torch_name

    def over(value: Any) -> Any:
        return sim.host_view(value) if isinstance(value, torch.Tensor) and value.device.type == kind else value

    views = [sim.host_view(tensor) for tensor in tensors]
    capturing = sim.core.is_capturing()
    with sim.untracked():
        before = [_whole(view).clone() for view in views] if capturing else []
        try:
            made = run(over, capturing)
        finally:
            for view, kept in zip(views, before, strict=False):
                _whole(view).copy_(kept)
        reads, writes = (_pieces(tensors, made.ranges(write)) for write in (False, True))
    if capturing:
        sim.launch(name, lambda: run(over), reads=reads, writes=writes)
    else:
        sim.launch(name, lambda: None, reads=reads, writes=writes)


def _whole(view: torch.Tensor) -> torch.Tensor:
    """Return the bytes from a CPU tensor's first to its last, gaps included, as a flat uint8 tensor
    over the same memory."""
    start, end = span(view)
    offset = start - view.untyped_storage().data_ptr()
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage(), offset, (end - start,))  # pyright: ignore[reportCallIssue, reportArgumentType]


def _pieces(tensors: list[torch.Tensor], ranges: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the byte ranges (addresses (first, end)) as uint8 tensors over the storages of
    `tensors`. A storage with more than RANGES of them gets a single tensor from the first to the
    last; ranges outside of all storages are dropped."""
    pieces: list[torch.Tensor] = []
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        storage = tensor.untyped_storage()
        low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        own = [(max(a, low), min(b, high)) for a, b in ranges if a < high and b > low]
        if len(own) > RANGES:
            own = [(own[0][0], own[-1][1])]
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        pieces += [empty.new_empty(0).set_(storage, a - low, (b - a,)) for a, b in own]  # pyright: ignore[reportCallIssue, reportArgumentType]
    return pieces


def tensor_arguments(names: Sequence[str], args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of the arguments that are tensors: `args` by the names in `names`, then
    `kwargs`."""
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            yield name, value

"""Profiles the kernels of a decode step with torch's profiler: number of launches, time, and the
bound by the bytes that each moves.

The bytes of each kernel come from one step without graphs, in which calls of kernel table entries
and of attention are marked with the bytes of their arguments. A graph replay runs kernels of the
same names.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.kernels.table import KernelTable, Limited

from .engine import GREEDY, drain, fill
from .made import Opened, opened
from .run import Run, share

MARK = "entry:"
PARTLY = frozenset({"k_cache", "v_cache", "cos_sin_cache", "page_table"})
"""Arguments that a call reads or writes only in part: one row per token."""


@dataclass(slots=True)
class Bytes:
    """Bytes that one kernel moved in a step without graphs, and the entries that launched it."""

    entries: set[str]
    launches: int = 0
    moved: float = 0.0


def measure(run: Run) -> None:
    """Report a row for each kernel of each batch size, the longest total time first."""
    activities = set(supported_activities())
    if activities <= {ProfilerActivity.CPU} and not run.is_dry:
        run.report.skip("profile", "this torch has no profiler of the device: found the host's alone")
        return
    most = max(run.sizes.profiled)
    wrapped = {"kernels": _recorded_table, "attention": _recorded_attention}
    with opened(run, run.geometry, wrapped, graph="off", max_requests=most) as made:
        known = {batch: _bytes(run, made, batch) for batch in run.sizes.profiled}
    with opened(run, run.geometry, max_requests=most) as made:
        run.report.note(ledger=made.ledger, state=run.state())
        for batch in run.sizes.profiled:
            _batch(run, made, batch, known[batch])


def _batch(run: Run, made: Opened, batch: int, known: Mapping[str, Bytes]) -> None:
    steps = run.sizes.profile_steps
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in _device_work(run, _profiled(made, run, batch, steps)):
        found[name].append(us)
    rows = sorted(found.items(), key=lambda item: -sum(item[1]))
    for name, times in rows:
        us, count = sum(times) / steps, len(times) / steps
        told = known.get(name)
        moved = None if told is None or not told.launches else told.moved / told.launches * count
        bound = None if not moved else run.bounds.us(moved)
        whose = sorted(told.entries) if told is not None else []
        shown = None if run.is_dry else us
        case = {"batch": batch, "name": name, "entries": whose, "count": count}
        run.report.row(**case, us=shown, bytes=moved, bound_us=bound, share=share(bound, shown))


def _profiled(made: Opened, run: Run, batch: int, steps: int) -> Iterable[Any]:
    """Return the profiler's events of `steps` consecutive decode steps."""
    engine = made.engine
    fill(engine, run, batch, steps + 8, **GREEDY)
    for _ in range(2):
        engine.step()
    with profile(activities=list(supported_activities())) as seen:
        for _ in range(steps):
            engine.step()
        run.wait()
    drain(engine)
    return seen.events() or ()


def _device_work(run: Run, events: Iterable[Any]) -> Iterable[tuple[str, float]]:
    """Yield name and microseconds of device kernels; in a dry run, which has no kernels, of the
    host's leaf operations."""
    for event in events:
        is_host = event.device_type == DeviceType.CPU
        is_range = event.is_user_annotation or event.name.startswith(MARK)
        if is_host == run.is_dry and not is_range and (not is_host or not event.cpu_children):
            yield event.name, event.time_range.elapsed_us()


def _bytes(run: Run, made: Opened, batch: int) -> dict[str, Bytes]:
    """Return bytes by kernel name, from one step. If an entry runs several kernels, its bytes count
    for the longest."""
    found: dict[str, Bytes] = {}
    for event in _profiled(made, run, batch, 1):
        if not event.name.startswith(MARK) or event.device_type != DeviceType.CPU:
            continue
        _, entry, moved = event.name.split(":")
        kernels = sorted(_kernels_of(event, run.is_dry), key=lambda kernel: -kernel[1])
        for place, (name, _) in enumerate(kernels):
            told = found.setdefault(name, Bytes(set()))
            told.entries.add(entry)
            told.launches += 1
            told.moved += 0.0 if place else float(moved)
    return found


def _kernels_of(event: Any, is_dry: bool) -> list[tuple[str, float]]:
    """Return name and time of the kernels of an event and its children, except children that have
    their own mark."""
    found = [(kernel.name, kernel.duration) for kernel in event.kernels]
    for child in event.cpu_children:
        if not child.name.startswith(MARK):
            found += _kernels_of(child, is_dry)
            found += [(child.name, child.time_range.elapsed_us())] if is_dry and not child.cpu_children else []
    return found


def _recorded_table(table: KernelTable) -> KernelTable:
    """Return the table with each function wrapped in a mark of its name."""
    given = {
        name: tuple(Limited(_recorded(name, each.function), each.takes) for each in candidates)
        for name, candidates in table.candidates.items()
    }
    return KernelTable(**given).storing(table.float8)


def _recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = tuple(inspect.signature(KernelTable.declared()[name].reference).parameters)

    def call(*args: Any, **more: Any) -> Any:
        with _marked(name, {**dict(zip(parameters, args, strict=False)), **more}):
            return function(*args, **more)

    return call


@contextmanager
def _marked(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Mark a call with its name and the bytes of its arguments. Results are not counted: they are
    small compared with a weight or a context."""
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    rows = next((len(tensor) for tensor in tensors.values() if tensor.dim()), 0)
    moved = 0.0
    for key, tensor in tensors.items():
        is_partly = key in PARTLY or (name == "embedding" and key == "weight")
        moved += rows * tensor.nbytes / max(len(tensor), 1) if is_partly and tensor.dim() else tensor.nbytes
    with record_function(f"{MARK}{name}:{int(moved)}"):
        yield


def _recorded_attention(backend: AttentionBackend) -> AttentionBackend:
    """Return the backend with `attend` wrapped in a mark of the bytes of keys, values, queries and
    results."""
    kind: Any = type(backend)

    def attend(self: Any, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
        cell = 2 * layer.num_kv_heads * layer.head_dim * q.element_size()
        tokens = 0 if batch.seq_lens_cpu is None else int(sum(batch.seq_lens_cpu.tolist()))
        with record_function(f"{MARK}attention:{tokens * cell + 2 * q.nbytes}"):
            return kind.attend(self, q, layer, batch, plan)

    made = type(kind.__name__, (kind,), {"attend": attend, "__module__": kind.__module__})
    given = backend.req_to_token_pool, backend.token_to_kv_pool, backend.kernels, backend.hisparse
    return made(backend.shape, *given)

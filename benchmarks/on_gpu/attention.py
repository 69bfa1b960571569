"""Attention of one layer over KV pages with every backend of the package that works here, as a
share of the bound (reading keys and values, or computing the products); and torch's SDPA over
tensors without pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglcore.core.errors import ConfigError
from sglcore.runtime.attention.contract import AttentionBackend, Bucket
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch

from .made import Opened, opened, smaller
from .run import Run, share
from .sizes import BYTES, Geometry

Rows = tuple[tuple[int, int], ...]
"""Groups of requests: (number of requests, tokens of each)."""
VOCAB = 1024
PAGE = 128
"""Upper bound of unused KV slots in a request's last page."""
LAYERS = 4
"""Layers with their own keys and values that run in turn, so that the next one's are not in the
device's cache."""
AGAIN = 4
"""How often a graph runs all layers, so that its launch time does not count."""


def measure(run: Run) -> None:
    """Report a row for each backend and case."""
    geometry = smaller(run.sizes.geometries[run.sizes.attention_of], LAYERS, VOCAB)
    for name in run.package.attention:
        if name in ("reference", "gathered") and not run.is_dry:
            continue  # plain torch: it defines correct results and is not fast
        try:
            _backend(run, geometry, name)
        except ConfigError as error:  # it does not support this device or geometry
            run.report.skip(f"attention {name}", str(error))
        except Exception as error:  # its library fails; the other backends do not need it
            if run.is_dry:
                raise
            run.report.skip(f"attention {name}", f"{type(error).__name__}: {error}"[:500])
    _of_torch(run, geometry)


def _backend(run: Run, geometry: Geometry, name: str) -> None:
    most = max(before + new for before, new in run.sizes.extend)
    longest = max(most, *(length for rows in run.sizes.decode for _, length in rows)) + 1
    requests = max(sum(count for count, _ in rows) for rows in run.sizes.decode)
    cells = max(sum(count * (length + PAGE) for count, length in rows) for rows in run.sizes.decode) + longest
    memory = cells * geometry.kv_bytes * 11 // 10
    sizes: dict[str, Any] = {
        "kv_cache_memory": memory,
        "max_requests": requests,
        "max_model_len": longest,
        "max_batch_tokens": most,
    }
    with opened(run, geometry, attention_backend=name, graph="off", **sizes) as made:
        backend: AttentionBackend = made.built["attention"]
        pool = made.built["pools"].token_to_kv
        for part in (part for layer in range(geometry.layers) for part in pool.kv(layer)):
            if isinstance(part, Tensor) and part.is_floating_point():
                part.normal_()
        run.wait()
        for rows in run.sizes.decode:
            _decode(run, geometry, made, backend, name, rows)
        for before, new in run.sizes.extend:
            _extend(run, geometry, made, backend, name, before, new)


def _decode(run: Run, geometry: Geometry, made: Opened, backend: AttentionBackend, name: str, rows: Rows) -> None:
    lengths = [length for count, length in rows for _ in range(count)]
    read = sum(lengths) * _cell(geometry) + 2 * len(lengths) * geometry.heads * geometry.head_dim * BYTES
    batch, layers = _staged(run, made, [length - 1 for length in lengths], [1] * len(lengths), ForwardMode.DECODE)
    q = run.random(len(lengths), geometry.heads * geometry.head_dim)
    runner: ModelRunner = made.built["runner"]
    with run.stream():
        plan = backend.capture_plan(Bucket(len(lengths), len(lengths)))
        update = backend.refresh(plan, batch)

    def step() -> Tensor:
        out = q
        for layer in layers * AGAIN:
            out = backend.attend(q, layer, batch, plan)
        return out

    with forward_context(runner.context(batch)):
        captures = "capture" in backend.facts.features
        us = run.replayed_us(step, update=update) if captures else run.us(step)
    us = None if us is None else us / (len(layers) * AGAIN)
    _row(run, name, "decode", " and ".join(f"{count} x {length}" for count, length in rows), read, 0, us)


def _extend(
    run: Run, geometry: Geometry, made: Opened, backend: AttentionBackend, name: str, before: int, new: int
) -> None:
    batch, layers = _staged(run, made, [before], [new], ForwardMode.EXTEND)
    q = run.random(new, geometry.heads * geometry.head_dim)
    runner: ModelRunner = made.built["runner"]
    with run.stream():
        plan = backend.plan(batch)
    with forward_context(runner.context(batch)):
        us = run.us(lambda: backend.attend(q, layers[0], batch, plan))
    read = (before + new) * _cell(geometry)
    _row(run, name, "extend", f"{new} after {before}", read, _flops(geometry, before, new), us)


def _row(run: Run, backend: str, mode: str, case: str, read: float, flops: float, us: float | None) -> None:
    bound = run.bounds.us(read, flops)
    found = {"bytes": read, "flops": flops, "us": us, "bound_us": bound, "share": share(bound, us)}
    run.report.row(backend=backend, mode=mode, case=case, **found)


def _cell(geometry: Geometry) -> int:
    """Return bytes of a token's keys and values in one layer."""
    return geometry.kv_bytes // geometry.layers


def _flops(geometry: Geometry, before: int, new: int) -> float:
    """Return operations of causal attention of one layer: each query attends to all `before`
    tokens and on average to half of the new ones."""
    return 4 * geometry.heads * geometry.head_dim * new * (before + new / 2)


def _staged(
    run: Run, made: Opened, before: Sequence[int], new: Sequence[int], mode: ForwardMode
) -> tuple[ForwardBatch, tuple[Attention, ...]]:
    """Stage a step on the device, with separate pages for each request; also returns the attention
    layers. Waits."""
    runner: ModelRunner = made.built["runner"]
    page = made.built["limits"].page_size
    counts = [-(-(old + more) // page) for old, more in zip(before, new, strict=True)]
    offsets = np.array([0, *accumulate(counts)], np.int32)
    batch = ScheduleBatch(
        step=1,
        forward_mode=mode,
        slots=np.arange(1, len(before) + 1, dtype=np.int32),
        seq_lens=np.array(before, np.int32) + np.array(new, np.int32),
        prefix_lens=np.array(before, np.int32),
        token_offsets=np.array([0, *accumulate(new)], np.int32),
        input_ids=np.full(sum(new), 3, np.int32),
        page_counts=np.zeros(len(before), np.int32),
        new_page_offsets=offsets,
        new_pages=np.random.default_rng(0).permutation(np.arange(1, offsets[-1] + 1, dtype=np.int32)),
        emits=np.ones(len(before), np.bool_),
    )
    with torch.no_grad(), runner.streams.running():
        staged = runner.prepared(runner.init_batch(batch))
    run.wait()  # it was staged on the engine's stream
    return staged, runner.model.attention_layers


def _of_torch(run: Run, geometry: Geometry) -> None:
    """Measure torch's SDPA without pages: decode with equal lengths, and prefill of one prompt."""
    with run.stream():
        _without_pages(run, geometry)


def _without_pages(run: Run, geometry: Geometry) -> None:
    dim = geometry.head_dim
    for rows in (rows for rows in run.sizes.decode if len(rows) == 1):
        ((count, length),) = rows
        q = run.random(count, geometry.heads, 1, dim)
        k, v = (run.random(count, geometry.kv_heads, length, dim) for _ in range(2))
        us = run.replayed_us(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))  # noqa: B023
        _row(run, "torch", "decode", f"{count} x {length}", count * length * _cell(geometry), 0, us)
    for _, new in (case for case in run.sizes.extend if not case[0]):
        q = run.random(1, geometry.heads, new, dim)
        k, v = (run.random(1, geometry.kv_heads, new, dim) for _ in range(2))
        us = run.us(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))  # noqa: B023
        _row(run, "torch", "extend", f"{new} after 0", new * _cell(geometry), _flops(geometry, 0, new), us)

"""A layer's attention over pages: every backend of the package that serves here, as shares of what
its keys and values take to read, or its products to compute; and torch's own over tensors without
pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglcore.device.batch import ForwardMode, ScheduleBatch
from sglcore.device.errors import ConfigError
from sglcore.runtime.attention.contract import AttentionBackend, Bucket
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner

from .made import Opened, opened, smaller
from .run import Run, share
from .sizes import BYTES, Geometry

Rows = tuple[tuple[int, int], ...]
"""How many requests, and how many tokens each has."""
VOCAB = 1024
PAGE = 128
"""Cells that a request's last page may have beyond its tokens, at most."""
LAYERS = 4
"""Each with keys and values of its own, one after the other: no cache holds those of the next."""
AGAIN = 4
"""Times that all layers are in one graph, whose launch is then no part of the figure."""


def measure(run: Run) -> None:
    """A row for each backend and case."""
    geometry = smaller(run.sizes.geometries[run.sizes.attention_of], LAYERS, VOCAB)
    for name in run.package.attention:
        if name in ("reference", "gathered") and not run.is_dry:
            continue  # plain torch, which defines correct
        try:
            _backend(run, geometry, name)
        except ConfigError as error:  # it does not serve here, and says why
            run.report.skip(f"attention {name}", str(error))
        except Exception as error:  # of a library, which the others do not need
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
    """Bytes of a token's keys and values in one layer."""
    return geometry.kv_bytes // geometry.layers


def _flops(geometry: Geometry, before: int, new: int) -> float:
    """Of causal attention: each query over what is before it, half of the new ones on average."""
    return 4 * geometry.heads * geometry.head_dim * new * (before + new / 2)


def _staged(
    run: Run, made: Opened, before: Sequence[int], new: Sequence[int], mode: ForwardMode
) -> tuple[ForwardBatch, tuple[Attention, ...]]:
    """A step on the device, each request over pages of its own, and the layers."""
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
    """Prompts of one length, and rows of one length, without pages."""
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

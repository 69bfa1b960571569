"""The host part of a step: KV slots of tokens, and the padded shapes of compiled steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglcore.step.batch_field import Axis
from sglcore.step.host_values import HostReader, Values, host_reader, padded
from sglcore.step.verification_rows import node_limits
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.attention.prompt import PromptRow
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.pool import PageTable

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Host inputs of B requests with one token each, padded with request slot 0: `fields` by name,
    [B] each, and `page_table` int32 [B, n], with n pages for a request."""

    fields: dict[str, NDArray]
    page_table: Ints


def decode_inputs(
    batch_type: type[ForwardBatch], batch: ScheduleBatch, table: PageTable, rows: int, pages: int
) -> DecodeInputs:
    """Return the inputs of a decode step, padded to `rows` requests; the page table has the first
    `pages` columns of `table`, which must cover the longest request."""
    reader = host_reader(batch_type, is_decode=True)
    values = reader.read(batch)
    fields = {spec.name: padded(spec, values[spec.name], rows) for spec in reader.staged if spec.name in values}
    slots = fields["req_pool_indices"]
    fields["out_cache_loc"] = table.cells(slots, fields["positions"])
    return DecodeInputs(fields, table.rows[slots, :pages])


@dataclass(frozen=True, slots=True)
class WideInputs:
    """Host inputs of B requests with `width` tokens each, padded with request slot 0; the device
    computes the tokens' positions. `fields`: by name, for all B * width tokens. Per request, int32
    [B]: `slots`, `limits` (KV slots in its pages) and `nodes` (tokens that may be verified; None:
    all). `page_table`: int32 [B, n]."""

    fields: dict[str, NDArray]
    slots: Ints
    limits: Ints
    nodes: Ints | None
    page_table: Ints


def wide_inputs(
    batch_type: type[ForwardBatch], batch: ScheduleBatch, table: PageTable, rows: int, pages: int, width: int
) -> WideInputs:
    """Return the inputs of a verification step, `width` tokens for each request, padded to `rows`
    requests; the page table has the first `pages` columns of `table`. The batch must have
    `cell_limits`."""
    assert batch.cell_limits is not None
    reader = host_reader(batch_type, is_decode=True, is_wide=True)
    values = reader.read(batch)
    read = [spec for spec in reader.staged if spec.name in values]
    alone = {spec.name: padded(spec, values[spec.name], rows) for spec in read}
    single = {spec.name for spec in read if spec.axis is Axis.NONE}
    fields = {name: each if name in single else np.repeat(each, width, axis=-1) for name, each in alone.items()}
    nodes, missing = node_limits(batch, width), (0, rows - batch.batch_size)
    slots = np.pad(batch.slots, missing)
    return WideInputs(
        fields,
        slots,
        np.pad(batch.cell_limits, missing),
        None if nodes is None else np.pad(nodes, missing),
        table.rows[slots, :pages],
    )


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Consecutive requests [first, last) of the batch with one token each: tokens [start, end) of
    the step."""

    first: int
    last: int
    start: int
    end: int


def parts_of(batch: ScheduleBatch, table: PageTable) -> list[SingleRows | PromptRow]:
    """Return the batch split into parts, in order: runs of consecutive requests with one token
    (`SingleRows`), and single requests with several tokens (`PromptRow`)."""
    counts = np.diff(batch.token_offsets)
    parts: list[SingleRows | PromptRow] = []
    row = 0
    while row < batch.batch_size:
        start = int(batch.token_offsets[row])
        if counts[row] > 1:
            prefix, count = int(batch.prefix_lens[row]), int(counts[row])
            positions = np.arange(prefix + count, dtype=np.int32)
            cells = table.cells(np.broadcast_to(batch.slots[row], positions.shape), positions)
            parts.append(PromptRow(row, start, start + count, prefix, cells))
            row += 1
            continue
        last = row + 1
        while last < batch.batch_size and counts[last] == 1:
            last += 1
        parts.append(SingleRows(row, last, start, int(batch.token_offsets[last])))
        row = last
    return parts


def extend_values(reader: HostReader, batch: ScheduleBatch, table: PageTable) -> Values:
    """Return the host values of an extend step by field name; `out_cache_loc` is the KV slot of
    each token, int32 [T]."""
    values = reader.read(batch)
    values["out_cache_loc"] = table.cells(np.repeat(batch.slots, np.diff(batch.token_offsets)), values["positions"])
    return values


def bucket(count: int, most: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `count`, but no
    more than `most`: padding is less than a half, and few sizes are compiled."""
    size = 1
    while size < count:
        middle = size + size // 2
        if size > 1 and middle >= count:
            size = middle
            break
        size *= 2
    return min(size, most)


def row_bucket(count: int, buckets: tuple[int, ...], most: int) -> int:
    """Return the smallest of the configured `buckets` that is at least `count`; if there is none,
    that of `bucket`. The result is never less than `count`."""
    return next((size for size in sorted(buckets) if size >= count), bucket(count, max(most, count)))

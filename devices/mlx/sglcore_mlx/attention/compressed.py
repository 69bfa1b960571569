"""Attention over a sliding window and over compressed blocks (DeepSeek-V4), with ordinary
operations: all blocks that are complete, or those that a layer's indexer chooses.

Entries that a token does not see are zeros, so that data of other requests, even NaN, never gets
into a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx
import numpy as np

from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.attention.blocks import keep_last, page_arrays, with_blocks
from sglcore_mlx.attention.contract import AttentionFacts, AttentionPlan
from sglcore_mlx.attention.dense import attend
from sglcore_mlx.attention.indexed import SCORES, highest, index_scores
from sglcore_mlx.attention.prompt import PromptRow
from sglcore_mlx.forward_batch import Finish, ForwardBatch, IndexQueries, States
from sglcore_mlx.inputs import parts_of
from sglcore_mlx.models.contract import BlockShape, LayerShape
from sglcore_mlx.pool import PageTable


class Step(Protocol):
    """What the layers of a forward read and replace: the KV cache, and states by state id."""

    cells: list[mx.array]
    states: list[States]


@dataclass(frozen=True, slots=True)
class Completed:
    """The blocks that R requests may complete in a step, int32 [R, N]: `positions` of their first
    tokens, and the `rows` that they are stored at (0: the block is not complete, or not the
    request's)."""

    positions: mx.array
    rows: mx.array


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """L consecutive tokens of each of R requests. `page_table` int32 [R, n]; `lens` int32 [R, L]:
    the tokens up to each, included; 1 for a token that may not be verified, which only follow
    others."""

    page_table: mx.array
    lens: mx.array
    page_size: int

    @property
    def first(self) -> mx.array:
        """The position of each request's first token, int32 [R, 1]."""
        return self.lens[:, :1] - 1

    @property
    def width(self) -> int:
        """L."""
        return self.lens.shape[1]

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """Implements `AttentionPlan.forward`: attend to the sliding window only."""
        return self.attend(q, kv, layer, None, None)

    def attend(
        self, q: mx.array, kv: mx.array, layer: LayerShape, blocks: mx.array | None, chosen: mx.array | None
    ) -> mx.array:
        """Attend with q [R * L, heads, D] to the window's entries of `kv`, and to the rows `blocks`
        of the layer's blocks (None: to none): all complete ones, or `chosen` int32 [R, L, top_k].
        Returns q's shape."""
        if chosen is not None and self.width > 1 and self.width * chosen.shape[-1] < self._columns(layer):
            alone = BlockPlan(mx.repeat(self.page_table, self.width, axis=0), self.lens.reshape(-1, 1), self.page_size)
            return alone.attend(q, kv, layer, blocks, chosen.reshape(-1, 1, chosen.shape[-1]))
        rows, seen = self._window(kv, layer)
        if blocks is not None and layer.blocks is not None:
            more, sees = self._blocks(blocks, layer.blocks, chosen)
            rows, seen = mx.concatenate([rows, more], axis=1), mx.concatenate([seen, sees], axis=2)
        keys = rows[:, None]
        queries = q.reshape(self.lens.shape[0], self.width, *q.shape[1:]).swapaxes(1, 2)
        mixed = attend(queries, keys, keys, seen[:, None], layer)
        return mixed.swapaxes(1, 2).reshape(q.shape)

    def choose(self, index: IndexQueries, keys: mx.array, layer: LayerShape) -> mx.array | None:
        """Return int32 [R, L, top_k]: the blocks that an indexer scores highest for each token, by
        the rows `keys`. None: there are no more than `top_k`."""
        blocks = layer.blocks
        assert blocks is not None
        if self._columns(layer) <= blocks.top_k:
            return None
        rows, seen = self._blocks(keys, blocks, None)
        count, columns = rows.shape[:2]
        step = max(1, SCORES // (count * columns * index.weights.shape[1]))
        parts: list[mx.array] = []
        for begin in range(0, self.width, step):
            own = slice(begin, begin + step)
            given = [each.reshape(count, self.width, *each.shape[1:])[:, own] for each in index]
            scores = index_scores(IndexQueries(*(each.reshape(-1, *each.shape[2:]) for each in given)), rows)
            parts.append(highest(mx.where(seen[:, own], scores, -mx.inf), blocks.top_k))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def completed(self, blocks: BlockShape, cells: mx.array) -> Completed:
        """Return the blocks that end in this step. cells int32 [R, L]: the tokens' KV slots; those
        in page 0 belong to no request."""
        ratio, first = blocks.ratio, self.first
        numbers = first // ratio + mx.arange(-(-self.width // ratio), dtype=mx.int32)[None]
        is_own = self._is_own(numbers * ratio + ratio - 1, cells)
        return Completed(numbers * ratio, mx.where(is_own, self._block_rows(numbers, ratio), 0))

    def ends(self, cells: mx.array) -> tuple[mx.array, mx.array]:
        """Return the pages that may end in this step: the positions of their last tokens, and the
        pages (0: it does not end, or is not the request's), int32 [R, N] each. cells as in
        `completed`."""
        numbers = self.first // self.page_size + mx.arange(-(-self.width // self.page_size), dtype=mx.int32)[None]
        last = numbers * self.page_size + self.page_size - 1
        pages = mx.take_along_axis(self.page_table, self._within(numbers), axis=1)
        return last, mx.where(self._is_own(last, cells), pages, 0)

    def before(self) -> tuple[mx.array, mx.array]:
        """Return the page before each request's first token, int32 [R], and whether this token
        begins a page, bool [R]."""
        first = self.first
        page = mx.take_along_axis(self.page_table, self._within(first // self.page_size - 1), axis=1)
        return page[:, 0], (first % self.page_size == 0)[:, 0]

    def _is_own(self, last: mx.array, cells: mx.array) -> mx.array:
        """Whether the token at position `last` [R, N] is one of the request's in this step."""
        offset = last - self.first
        inside = mx.take_along_axis(cells, mx.clip(offset, 0, self.width - 1), axis=1) >= self.page_size
        return (offset >= 0) & (offset < self.width) & inside

    def _within(self, pages: mx.array) -> mx.array:
        return mx.clip(pages, 0, self.page_table.shape[1] - 1)

    def _columns(self, layer: LayerShape) -> int:
        """Return the most blocks that a request can have."""
        return 0 if layer.blocks is None else self.page_table.shape[1] * self.page_size // layer.blocks.ratio

    def _window(self, kv: mx.array, layer: LayerShape) -> tuple[mx.array, mx.array]:
        """Return the window's entries [R, S, D] of all L tokens, and which each token sees, bool
        [R, L, S]."""
        window, width, size = layer.sliding_window, self.width, self.page_size
        assert window is not None
        columns = mx.arange(window - 1 + width, dtype=mx.int32)
        places = self.first - (window - 1) + columns[None]
        is_valid = (places >= 0) & (places < mx.max(self.lens, axis=1, keepdims=True))
        held = mx.where(is_valid, places, 0)
        pages = mx.take_along_axis(self.page_table, held // size, axis=1)
        keys, _ = layer.parts(kv[pages * size + held % size])
        distance = columns[None] - mx.arange(width, dtype=mx.int32)[:, None]
        inside = (distance >= 0) & (distance < window)
        return mx.where(is_valid[..., None], keys[:, :, 0], 0), inside[None] & is_valid[:, None]

    def _blocks(self, rows: mx.array, blocks: BlockShape, chosen: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return rows of the requests' blocks [R, X, size], and which each token sees, bool [R, L,
        X]. With one token and `chosen` [R, 1, top_k], only the chosen rows are read."""
        counts = self.lens // blocks.ratio
        is_alone = chosen is not None and self.width == 1
        columns = self.page_table.shape[1] * self.page_size // blocks.ratio
        numbers = chosen[:, 0] if is_alone and chosen is not None else mx.arange(columns, dtype=mx.int32)[None]
        seen = numbers[:, None] < counts[..., None]
        is_valid = mx.any(seen, axis=1)
        held = mx.broadcast_to(numbers, is_valid.shape).astype(mx.int32)
        found = rows[self._block_rows(mx.where(is_valid, held, 0), blocks.ratio)]
        if chosen is not None and not is_alone:
            none = mx.zeros(seen.shape, mx.bool_)
            seen = seen & mx.put_along_axis(none, chosen, mx.ones(chosen.shape, mx.bool_), axis=-1)
        return mx.where(is_valid[..., None], found, 0), seen

    def _block_rows(self, numbers: mx.array, ratio: int) -> mx.array:
        """Return the rows of blocks int32 [R, N]."""
        each = self.page_size // ratio
        pages = mx.take_along_axis(self.page_table, self._within(numbers // each), axis=1)
        return pages * each + numbers % each


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a forward: the tokens [start, end), of the requests [first, last)."""

    plan: BlockPlan
    start: int
    end: int
    first: int
    last: int

    @property
    def tokens(self) -> slice:
        """The tokens, as a slice of all of the step."""
        return slice(self.start, self.end)


class BlockStep:
    """The compressed blocks of one forward: implements `forward_batch.Blocks`."""

    def __init__(
        self,
        step: Step,
        layers: Sequence[LayerShape],
        cells: mx.array,
        parts: Sequence[Part],
        inputs: list[list[mx.array]],
    ) -> None:
        """`cells` int32 [T]: the tokens' KV slots. `inputs`: receives each compressor's inputs, by
        state id, if the step is one part."""
        self._step, self._layers, self._cells, self._parts, self._inputs = step, layers, cells, parts, inputs
        size = parts[0].plan.page_size if parts else 1
        self._arrays: dict[int, int] = {}
        self._states: dict[int, int] = {}
        array, state = len(layers), 0
        for layer_id, blocks in with_blocks(layers):
            self._arrays[layer_id], self._states[layer_id] = array, state
            array += len(page_arrays(blocks, size, mx.float32))
            state += len(blocks.sizes)

    def compress(self, layer_id: int, number: int, x: mx.array, ape: mx.array, finish: Finish) -> None:
        """Implements `Blocks.compress`."""
        blocks, state_id = self._of(layer_id), self._states[layer_id] + number
        every = self._continued(state_id, x.astype(mx.float32))
        if blocks.series > 1:
            every = self._over_pages(layer_id, number, every)
        # After the page before was read: the state of a request that enters there has none of it.
        self._step.states[state_id] = [_joined([rows[:, rows.shape[1] - blocks.span + 1 :] for rows in every])]
        made: list[mx.array] = []
        completed: list[Completed] = []
        for part, rows in zip(self._parts, every, strict=True):
            completed.append(part.plan.completed(blocks, self._slots(part)))
            made.append(compressed(rows, ape, blocks, completed[-1].positions, part.plan.first - (blocks.span - 1)))
        out = finish(_joined(made), _joined([each.positions.reshape(-1) for each in completed]))
        self._store(layer_id, number * blocks.series, [each.rows for each in completed], out)

    def choose(self, layer_id: int, index: IndexQueries) -> list[mx.array | None]:
        """Implements `Blocks.choose`."""
        blocks = self._of(layer_id)
        keys = self._step.cells[self._arrays[layer_id] + blocks.series]
        return [part.plan.choose(index.of(part.tokens), keys, self._layers[layer_id]) for part in self._parts]

    def attend(self, layer_id: int, q: mx.array, chosen: Sequence[mx.array | None] = ()) -> mx.array:
        """Implements `Blocks.attend`."""
        kv, rows = self._step.cells[layer_id], self._step.cells[self._arrays[layer_id]]
        given = zip(self._parts, chosen or [None] * len(self._parts), strict=True)
        return _joined(
            [part.plan.attend(q[part.tokens], kv, self._layers[layer_id], rows, each) for part, each in given]
        )

    def _continued(self, state_id: int, x: mx.array) -> list[mx.array]:
        """Return each part's tokens [R, E, C], after those in its requests' states."""
        states, found = self._step.states, list[mx.array]()
        for part in self._parts:
            before = states[state_id][0][part.first : part.last]
            own = x[part.tokens].reshape(before.shape[0], part.plan.width, -1)
            if len(self._parts) == 1:
                self._inputs.append([own])
            found.append(keep_last([before], own)[0])
        return found

    def _over_pages(self, layer_id: int, number: int, every: Sequence[mx.array]) -> list[mx.array]:
        """Store the first series of each ending page's last block, and return `every` with that of
        the page before, where the step begins a page. Written before it is read, so MLX writes in
        place."""
        blocks, pages, held = self._of(layer_id), list[mx.array](), list[mx.array]()
        ratio, size, place = blocks.ratio, blocks.sizes[number], number * blocks.series + 1
        for part, rows in zip(self._parts, every, strict=True):
            last, own = part.plan.ends(self._slots(part))
            offset = last - part.plan.first + (blocks.span - 1)
            steps = mx.arange(1 - ratio, 1, dtype=mx.int32)
            pages.append(own)
            held.append(_taken(first_series(rows, size), offset[..., None] + steps).reshape(-1, ratio, 2 * size))
        self._store(layer_id, place, pages, _joined(held))
        stored = self._step.cells[self._arrays[layer_id] + place]
        return [_from_page(part.plan, stored, rows, blocks) for part, rows in zip(self._parts, every, strict=True)]

    def _slots(self, part: Part) -> mx.array:
        return self._cells[part.tokens].reshape(part.plan.lens.shape)

    def _store(self, layer_id: int, offset: int, rows: Sequence[mx.array], values: mx.array) -> None:
        cells, place = self._step.cells, self._arrays[layer_id] + offset
        array = cells[place]
        array[_joined([each.reshape(-1) for each in rows])] = values.astype(array.dtype)
        cells[place] = array

    def _of(self, layer_id: int) -> BlockShape:
        blocks = self._layers[layer_id].blocks
        assert blocks is not None
        return blocks


def _from_page(plan: BlockPlan, stored: mx.array, every: mx.array, blocks: BlockShape) -> mx.array:
    """Return every [R, E, C] with the first series of the block before each request's first token,
    from `stored` by page, where this token begins a page."""
    page, begins = plan.before()
    ratio, size = blocks.ratio, every.shape[-1] // 4
    held, before = stored[page], every[:, ratio - 1 : 2 * ratio - 1]
    parts = [held[..., :size], before[..., size : 2 * size], held[..., size:], before[..., 3 * size :]]
    before = mx.where(begins[:, None, None], mx.concatenate(parts, axis=-1), before)
    return mx.concatenate([every[:, : ratio - 1], before, every[:, 2 * ratio - 1 :]], axis=1)


def first_series(every: mx.array, size: int) -> mx.array:
    """Return the values and gates [..., 2 * size] of the first of two series [..., 4 * size]."""
    return mx.concatenate([every[..., :size], every[..., 2 * size : 3 * size]], axis=-1)


def compressed(every: mx.array, ape: mx.array, blocks: BlockShape, positions: mx.array, origin: mx.array) -> mx.array:
    """Return block rows float32 [R * N, size]: sums of values, weighted for each element by the
    softmax of gates plus `ape` [ratio, series * size]. every [R, E, 2 * series * size] has the
    tokens from position `origin` int32 [R, 1]; positions int32 [R, N] are those of each block's
    first token. With two series a block also has the first series of the block before, which block
    0 lacks."""
    ratio, series, size = blocks.ratio, blocks.series, every.shape[-1] // (2 * blocks.series)
    tokens = mx.arange(ratio, dtype=mx.int32)
    values: list[mx.array] = []
    gates: list[mx.array] = []
    for number in range(series):
        places = (positions - (series - 1 - number) * ratio)[..., None] + tokens
        part, channels = (places - origin[..., None]), slice(number * size, (number + 1) * size)
        shifted = slice((series + number) * size, (series + number + 1) * size)
        is_there = (places >= 0)[..., None]
        values.append(mx.where(is_there, _taken(every[..., channels], part), 0))
        gates.append(mx.where(is_there, _taken(every[..., shifted], part) + ape[:, channels], -mx.inf))
    weights = mx.softmax(mx.concatenate(gates, axis=2), axis=2)
    return (weights * mx.concatenate(values, axis=2)).sum(axis=2).reshape(-1, size)


def _taken(rows: mx.array, places: mx.array) -> mx.array:
    """Return [R, N, m, C]: rows [R, E, C] at `places` [R, N, m], clipped to the rows that there
    are."""
    count, length, size = rows.shape
    own = mx.arange(count, dtype=mx.int32)[:, None, None] * length
    return rows.reshape(-1, size)[mx.clip(places, 0, length - 1) + own]


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))


class BlockAttention:
    """The backend of DeepSeek-V4's layers; its plans are `BlockPlan`."""

    facts: ClassVar[AttentionFacts] = AttentionFacts(takes_blocks=True)

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None:
        """`layers` and `streams` are not used."""
        self._page_size = page_size

    def plan(self, batch: ForwardBatch) -> BlockPlan:
        """Implements `DecodeAttention.plan`: keep pages and lengths; each layer finds its
        entries."""
        table = batch.pages_of_requests
        return BlockPlan(table, batch.seq_lens.reshape(table.shape[0], -1), self._page_size)


def extend_parts(batch: ScheduleBatch, table: PageTable) -> list[Part]:
    """Return the parts of any batch that writes to the KV cache: runs of requests with one token,
    and single prompts."""
    found: list[Part] = []
    row = 0
    for part in parts_of(batch, table):
        last = row + 1 if isinstance(part, PromptRow) else part.last
        lens, slots = batch.seq_lens[row:last], batch.slots[row:last]
        if isinstance(part, PromptRow):
            lens = np.arange(part.prefix + 1, part.prefix + 1 + part.end - part.start, dtype=np.int32)
        pages = mx.array(table.rows[slots, : -(-int(lens.max()) // table.page_size)])
        plan = BlockPlan(pages, mx.array(lens).reshape(last - row, -1), table.page_size)
        found.append(Part(plan, part.start, part.end, row, last))
        row = last
    return found


def one_part(plan: AttentionPlan) -> list[Part]:
    """Return a decode forward as one part; none for another backend's plan."""
    if not isinstance(plan, BlockPlan):
        return []
    count, width = plan.lens.shape
    return [Part(plan, 0, count * width, 0, count)]

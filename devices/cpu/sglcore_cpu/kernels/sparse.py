"""Kernel table entries of sparse attention by the native kernels: attention over listed cache rows
(latent rows, chosen by an indexer or compressed), and the lists themselves.

The kernels read request slots, positions, lengths, lists and tables when they run, so a recorded
step can be replayed on new contents. Tensors with a memory layout that the kernels do not read go
to the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.kernels.operands import INDEX_BYTES
from sglcore_cpu.native import TYPES, Engine

ROW_TYPES: Mapping[torch.dtype, int] = MappingProxyType({**TYPES, torch.float16: 3, torch.uint8: 4})
"""The kernels' numbers for the element types of cache rows; uint8 means bytes of a codec."""
GROUP_UNIT = 16
"""The kernels read codecs with a group size that is a multiple of this."""


def takes_rows(q: Tensor, rows: Tensor, chosen: Tensor, more_rows: Tensor | None, *others: object) -> str:
    """Return why `sparse_mqa` or `paged_mqa` is refused, empty if it is taken: q must be float32 or
    bfloat16, the rows of all pools of one dtype that the kernels read. The fourth argument of
    `paged_mqa` is int32 and no pool of rows, so it is not checked."""
    more = [more_rows] if isinstance(more_rows, Tensor) and more_rows.dtype is not torch.int32 else []
    return refusal(q, rows, *more)


def takes_keys(q: Tensor, weights: Tensor, keys: Tensor, *others: object) -> str:
    """Return why `index_logits` is refused, empty if it is taken: q and weights must be float32 or
    bfloat16, the keys of a dtype in `ROW_TYPES`."""
    return refusal(q, keys) or refusal(weights)


def takes_state(kv_gate: Tensor, state: Tensor, ape: Tensor, *others: object) -> str:
    """Return why `compress` is refused, empty if it is taken: kv_gate must be float32 or bfloat16,
    state and `ape` float32."""
    wide = {state.dtype, ape.dtype} == {torch.float32}
    return refusal(kv_gate) or ("" if wide else f"the state is {state.dtype}, the positional weights {ape.dtype}")


class SparseAttention:
    """Implements the kernel table's entries for sparse attention by methods of the same names, on
    one engine. Each call waits for its result."""

    def __init__(self, engine: Engine) -> None:
        self._empty = engine.empty
        self._sparse_mqa, self._paged_mqa, self._index_logits, self._index_top_k = (
            engine.kernel(name).bind() for name in ("sparse_mqa", "paged_mqa", "index_logits", "index_top_k")
        )
        self._compress, self._compress_plan, self._list_rows = (
            engine.kernel(name).bind() for name in ("compress", "compress_plan", "list_rows")
        )

    @implements(takes_rows)
    def sparse_mqa(
        self,
        q: Tensor,
        rows: Tensor,
        chosen: Tensor,
        more_rows: Tensor | None,
        more_chosen: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        value_size: int,
        codec: RowCodec | None,
    ) -> Tensor:
        """Implement `KernelTable.sparse_mqa`: q [T, H, D] attends over the rows that chosen int32
        [T, W] lists (-1: none), and those of `more_rows` and `more_chosen` unless None -> [T, H,
        value_size]. A row is a key, and its first `value_size` elements the value. `sinks` [H]: a
        further logit without a value. Zeros where nothing is listed. The pool's rows have the form
        of `codec` (None: plain numbers)."""
        lists = [each for each in (chosen, more_chosen) if each is not None]
        others = [each for each in (more_rows, sinks) if each is not None]
        if not (is_known(codec) and last_is_plain(q, rows, *others) and are_indices(*lists)):
            return reference_sparse.sparse_mqa(q, rows, chosen, more_rows, more_chosen, sinks, scale, value_size, codec)
        out = self._empty(*q.shape[:2], value_size, dtype=q.dtype)
        self._sparse_mqa(
            **_heads(q),
            **_rows(rows, q.shape[2], codec),
            out=out.data_ptr(),
            value_size=value_size,
            scale=scale,
            sinks=address(sinks),
            chosen=chosen.data_ptr(),
            chosen_stride=chosen.stride(0),
            width=chosen.shape[1],
            more_rows=address(more_rows),
            more_row_stride=0 if more_rows is None else more_rows.stride(0),
            more_chosen=address(more_chosen),
            more_chosen_stride=0 if more_chosen is None else more_chosen.stride(0),
            more_width=0 if more_chosen is None else more_chosen.shape[1],
        )
        return out

    @implements(takes_rows)
    def paged_mqa(
        self,
        q: Tensor,
        rows: Tensor,
        table: Tensor,
        token_slots: Tensor,
        lens: Tensor,
        page_size: int,
        scale: float,
        value_size: int,
        codec: RowCodec | None,
    ) -> Tensor:
        """Implement `KernelTable.paged_mqa`: q [T, H, D] attends over the first lens[t] rows of its
        request, found by the page table -> [T, H, value_size]. A row is a key, and its first
        `value_size` elements the value. The pool's rows have the form of `codec` (None: plain
        numbers). Threads divide each request in chunks."""
        if not (is_known(codec) and last_is_plain(q, rows) and are_indices(table, token_slots, lens)):
            return reference_sparse.paged_mqa(q, rows, table, token_slots, lens, page_size, scale, value_size, codec)
        out = self._empty(*q.shape[:2], value_size, dtype=q.dtype)
        self._paged_mqa(
            **_heads(q),
            **_rows(rows, q.shape[2], codec),
            **_pages(table, token_slots, lens, page_size),
            out=out.data_ptr(),
            value_size=value_size,
            scale=scale,
            sinks=0,
        )
        return out

    @implements(takes_keys)
    def index_logits(
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        table: Tensor,
        token_slots: Tensor,
        lens: Tensor,
        rows_per_page: int,
        scale: float,
        width: int,
        codec: RowCodec | None,
    ) -> Tensor:
        """Implement `KernelTable.index_logits`: the indexer's scores of the first lens[t] keys of
        each token's request -> float32 [T, width], -inf after them. Threads divide each request's
        keys in chunks."""
        if not (is_known(codec) and last_is_plain(q, weights, keys) and are_indices(table, token_slots, lens)):
            pages = table, token_slots, lens, rows_per_page
            return reference_sparse.index_logits(q, weights, keys, *pages, scale, width, codec)
        out = self._empty(q.shape[0], width, dtype=torch.float32)
        self._index_logits(
            **_heads(q),
            weights=weights.data_ptr(),
            weight_stride=weights.stride(0),
            weight_type=TYPES[weights.dtype],
            keys=keys.data_ptr(),
            key_stride=keys.stride(0),
            **form_of(keys, codec),
            size=q.shape[2],
            **_pages(table, token_slots, lens, rows_per_page),
            out=out.data_ptr(),
            width=width,
            scale=scale,
        )
        return out

    @implements()
    def index_top_k(
        self, logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int
    ) -> Tensor:
        """Implement `KernelTable.index_top_k`: return int32 [T, k], the pool rows of the k largest
        of the first lens[t] logits [T, W], in text order, -1 where there are fewer. Threads divide
        the tokens."""
        if not (last_is_plain(logits) and are_indices(lens, table, token_slots)):
            return reference_sparse.index_top_k(logits, lens, table, token_slots, rows_per_page, k)
        tokens, width = logits.shape
        out = self._empty(tokens, k, dtype=torch.int32)
        self._index_top_k(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            **_pages(table, token_slots, lens, rows_per_page),
            out=out.data_ptr(),
            tokens=tokens,
            width=width,
            k=k,
        )
        return out

    @implements()
    def window_rows(
        self, table: Tensor, token_slots: Tensor, positions: Tensor, window: int, page_size: int, out: Tensor
    ) -> None:
        """Implement `KernelTable.window_rows`: write to `out` int32 [T, window] the pool rows of
        the last `window` tokens up to each token, itself included, the oldest first, then -1.
        Threads divide the tokens."""
        if not (are_indices(table, token_slots, positions, out) and out.is_contiguous()):
            reference_sparse.window_rows(table, token_slots, positions, window, page_size, out)
        else:
            self._list(table, token_slots, positions, 0, page_size, out)

    @implements()
    def block_rows(
        self, table: Tensor, token_slots: Tensor, positions: Tensor, ratio: int, page_size: int, out: Tensor
    ) -> None:
        """Implement `KernelTable.block_rows`: write to `out` int32 [T, W] the pool rows of the
        blocks of `ratio` tokens that are complete with each token, in order, then -1. Threads
        divide the tokens."""
        if not (are_indices(table, token_slots, positions, out) and out.is_contiguous()):
            reference_sparse.block_rows(table, token_slots, positions, ratio, page_size, out)
        else:
            self._list(table, token_slots, positions, ratio, page_size, out)

    def _list(
        self, table: Tensor, token_slots: Tensor, positions: Tensor, ratio: int, page_size: int, out: Tensor
    ) -> None:
        self._list_rows(
            table=table.data_ptr(),
            table_stride=table.stride(0),
            token_slots=token_slots.data_ptr(),
            positions=positions.data_ptr(),
            out=out.data_ptr(),
            tokens=out.shape[0],
            width=out.shape[1],
            page_size=page_size,
            ratio=ratio,
        )

    @implements()
    def compress_plan(
        self,
        slots: Tensor,
        seq_lens: Tensor,
        lengths: Tensor | None,
        starts: Tensor | None,
        token_slots: Tensor,
        positions: Tensor,
        table: Tensor,
        state_table: Tensor | None,
        state_offsets: Tensor | None,
        page_size: int,
        ratio: int,
        ring: int,
        reads: Tensor,
        block_positions: Tensor,
        out_rows: Tensor,
        writes: Tensor,
    ) -> None:
        """Implement `KernelTable.compress_plan`, on the calling thread: find the blocks of `ratio`
        tokens that this step completes, and write the plan that `compress` reads. For each of N
        blocks: `reads` [N, W], the sources of its W tokens (a token of this step, -2 minus a row of
        the state, or -1), `block_positions`, its first position, and `out_rows`, its row in the
        pool. `writes` [T]: the row of the state for each token (0: none)."""
        given = slots, seq_lens, lengths, starts, token_slots, positions, table, state_table, state_offsets
        indices = (each for each in (*given, reads, block_positions) if each is not None)
        if not (are_indices(*indices) and reads.is_contiguous()):
            sizes = page_size, ratio, ring
            return reference_sparse.compress_plan(*given, *sizes, reads, block_positions, out_rows, writes)
        self._compress_plan(
            slots=slots.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            lengths=address(lengths),
            starts=address(starts),
            positions=positions.data_ptr(),
            table=table.data_ptr(),
            table_stride=table.stride(0),
            state_table=address(state_table),
            state_table_stride=0 if state_table is None else state_table.stride(0),
            state_pages=0 if state_table is None else state_table.shape[1],
            state_offsets=address(state_offsets),
            page_size=page_size,
            ratio=ratio,
            ring=ring,
            reads=reads.data_ptr(),
            block_positions=block_positions.data_ptr(),
            out_rows=out_rows.data_ptr(),
            out_bytes=INDEX_BYTES[out_rows.dtype],
            writes=writes.data_ptr(),
            write_bytes=INDEX_BYTES[writes.dtype],
            rows=slots.shape[0],
            tokens=writes.shape[0],
            events=reads.shape[0],
            span=reads.shape[1],
        )
        return None

    @implements(takes_state)
    def compress(self, kv_gate: Tensor, state: Tensor, ape: Tensor, reads: Tensor, writes: Tensor) -> Tensor:
        """Implement `KernelTable.compress`: sum the values of the W tokens of each of N blocks that
        `compress_plan` found, weighted by a softmax of their gates plus `ape` -> [N, C * ratio /
        W]. kv_gate [T, 2 * C] has values, then gates. Row t is kept in state[writes[t]], in place.
        Threads divide the channels of each block, then the tokens."""
        are_dense = ape.is_contiguous() and reads.is_contiguous()
        if not (last_is_plain(kv_gate, state, writes) and are_indices(reads) and are_dense):
            return reference_sparse.compress(kv_gate, state, ape, reads, writes)
        (ratio, width), (events, span) = ape.shape, reads.shape
        out = self._empty(events, width * ratio // span, dtype=kv_gate.dtype)
        self._compress(
            kv_gate=kv_gate.data_ptr(),
            kv_gate_stride=kv_gate.stride(0),
            state=state.data_ptr(),
            state_stride=state.stride(0),
            ape=ape.data_ptr(),
            reads=reads.data_ptr(),
            writes=writes.data_ptr(),
            index_bytes=INDEX_BYTES[writes.dtype],
            out=out.data_ptr(),
            tokens=kv_gate.shape[0],
            events=events,
            span=span,
            ratio=ratio,
            width=width,
            type=TYPES[kv_gate.dtype],
        )
        return out


def refusal(x: Tensor, *rows: Tensor) -> str:
    """Return why the kernels do not compute with the dtypes of x and of a pool's `rows` tensors,
    empty if they do: x must be float32 or bfloat16, the rows all of one dtype in `ROW_TYPES`."""
    if x.dtype not in TYPES:
        return f"it computes in float32 and bfloat16, not in {x.dtype}"
    if any(each.dtype is not rows[0].dtype for each in rows) or any(each.dtype not in ROW_TYPES for each in rows):
        return f"it reads rows of numbers of one type, not of {' and '.join(str(each.dtype) for each in rows)}"
    return ""


def last_is_plain(*tensors: Tensor) -> bool:
    """Return whether the last dimension of every tensor has no gaps; a last dimension of at most 1
    element has none."""
    return all(each.stride(-1) == 1 or each.shape[-1] <= 1 for each in tensors)


def are_indices(*tensors: Tensor) -> bool:
    """Return whether all tensors are int32 without gaps in the last dimension."""
    return last_is_plain(*tensors) and all(each.dtype is torch.int32 for each in tensors)


def address(tensor: Tensor | None) -> int:
    """Return the tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _heads(q: Tensor) -> dict[str, int]:
    tokens, heads, _ = q.shape
    q_stride, head_stride, _ = q.stride()
    return {
        "q": q.data_ptr(),
        "q_stride": q_stride,
        "q_head_stride": head_stride,
        "tokens": tokens,
        "heads": heads,
        "type": TYPES[q.dtype],
    }


def is_known(codec: RowCodec | None) -> bool:
    """Return whether the kernels can read rows in the codec's form: its group size must be a
    multiple of 16. True without a codec."""
    return codec is None or codec.group % GROUP_UNIT == 0


def form_of(rows: Tensor, codec: RowCodec | None) -> dict[str, int]:
    """Return the kernel arguments that describe the format of a pool's rows: `row_type`, and
    `exact` and `group` of the codec, 0 without one."""
    exact, group = (0, 0) if codec is None else (codec.exact, codec.group)
    return {"row_type": ROW_TYPES[rows.dtype], "exact": exact, "group": group}


def _rows(rows: Tensor, size: int, codec: RowCodec | None) -> dict[str, int]:
    return {"rows": rows.data_ptr(), "row_stride": rows.stride(0), "size": size, **form_of(rows, codec)}


def _pages(table: Tensor, token_slots: Tensor, lens: Tensor, page_rows: int) -> dict[str, int]:
    return {
        "table": table.data_ptr(),
        "table_stride": table.stride(0),
        "token_slots": token_slots.data_ptr(),
        "lens": lens.data_ptr(),
        "page_rows": page_rows,
    }

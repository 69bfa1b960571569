"""Multi-query attention over rows that are key and value for all heads.

Rows named by lists, or all of a request. A program holds many heads of one token, so that a row is
read once for all of them; a long list is split over programs, then merged. Lengths are read on the
device, so one launch serves every length.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, wide_dot
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.softmax import LOG2_E, begin, merged, parts_of, take_scores
from sglcore.runtime.kernels.triton.sparse.pool_rows import load_elements, load_heads, paged_rows, read_form_of
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles

MOST_VALUES = 512
"""Maximum elements of a value; the weighted sums of all heads of a program stay in registers."""
SCANNED = tl.constexpr(1024)
"""List entries per iteration of the count."""


@triton.jit
def length_of(chosen, width):
    """Return int32: the number of entries of the list `chosen` [width], -1 for none, up to and with
    the last that names a row; 0 if none does.
    """
    length = 0
    for at in range(0, width, SCANNED):
        place = at + tl.arange(0, SCANNED)
        row = tl.load(chosen + place, mask=place < width, other=-1)
        length = tl.maximum(length, tl.max(tl.where(row >= 0, place + 1, 0), axis=0))
    return length


@triton.jit
def lengths_of(chosen, more_chosen, lens, token, width, more_width, PAGE: tl.constexpr):
    """Return the number of entries in a token's first list, and in both lists together.

    With pages both are the number of rows of its request, at most `width`.
    """
    more = 0
    if PAGE:
        first = tl.minimum(tl.load(lens + token), width)
    else:
        first = length_of(chosen, width)
        if more_chosen is not None:
            more = length_of(more_chosen, more_width)
    return first, first + more


@triton.jit
def share_of(count, split, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """Return begin and end of a split's share of `count` entries, in whole iterations of TOKENS
    entries; the last iteration may be partial.
    """
    share = tl.cdiv(tl.cdiv(count, SPLITS), TOKENS) * TOKENS
    return split * share, tl.minimum(split * share + share, count)


@triton.jit
def take_rows(
    query,
    tail,
    best,
    total,
    mean,
    rows,
    chosen,
    start,
    end,
    scale,
    ROW: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Update the running softmax (`softmax.take_scores`) with the entries [start, end) of the list
    `chosen`, and return its maximum, sum and weighted sum.

    With pages (PAGE > 0): with these rows of a request, by its page table `chosen`. `query` has the
    elements of a head that are values too, `tail` the others (None: there are none). ROW is the
    elements from one row to the next of `rows`.
    """
    for at in range(start, end, TOKENS):
        place = at + tl.arange(0, TOKENS)
        inside = place < end
        if PAGE:
            row = paged_rows(chosen, 0, place, inside, 0, PAGE)
        else:
            row = tl.load(chosen + place, mask=inside, other=-1).to(tl.int64)
            inside = row >= 0
        line = rows + row * ROW
        keys = load_elements(line, inside, query.dtype, 0, DIM, query.shape[1], EXACT, GROUP, BIAS)
        score = wide_dot(query, tl.trans(keys))
        if tail is not None:
            rest = load_elements(line, inside, query.dtype, query.shape[1], DIM, tail.shape[1], EXACT, GROUP, BIAS)
            score += wide_dot(tail, tl.trans(rest))
        score = tl.where(inside[None, :], score * scale, float("-inf"))
        best, total, mean = take_scores(score, keys, best, total, mean)
    return best, total, mean


@triton.jit
def store_part(out, weights, part, mine, best, total, mean, VALUES: tl.constexpr, SPLITS: tl.constexpr):
    """Store each head's partial result, mean / total, at `part` of `out`, and its log2 weight in
    `weights` if SPLITS > 1. Heads that are not `mine` are not stored.
    """
    total = tl.where(total > 0, total, 1.0)
    if SPLITS > 1:
        # Without a row and a sink `best` is still -inf, and so is the weight.
        tl.store(weights + part, best + tl.log2(total), mask=mine)
    column = tl.arange(0, mean.shape[1])
    stored = mine[:, None] & (column < VALUES)[None, :]
    place = out + part[:, None] * VALUES + column[None, :]
    tl.store(place, narrow(mean / total[:, None], out.dtype.element_ty), mask=stored)


@triton.jit
def sparse_mqa_kernel(
    q,
    rows,
    chosen,
    more_rows,
    more_chosen,
    slots,
    lens,
    sinks,
    out,
    weights,
    q_stride,
    head_stride,
    chosen_stride,
    more_chosen_stride,
    width,
    more_width,
    scale,
    ROW: tl.constexpr,
    MORE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    QUERIES: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Implements `KernelTable.sparse_mqa` and, with PAGE > 0, `paged_mqa` with the table `chosen`;
    `scale` includes log2(e). Writes out [T, HEADS, SPLITS, VALUES] and, if SPLITS > 1, the log2
    weights of the parts.

    A row has MAIN elements, which include the values, then TAIL. ROW and MORE are the elements from
    one row to the next of `rows` and `more_rows` (None: no second list). One program per token,
    block of QUERIES heads and split. Reads at least the rows in a token's lists, once for all
    heads: later blocks of heads find them in the cache.
    """
    BLOCKS: tl.constexpr = (HEADS + QUERIES - 1) // QUERIES
    token, split = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    head = tl.program_id(0) % BLOCKS * QUERIES + tl.arange(0, QUERIES)
    chosen += (tl.load(slots + token).to(tl.int64) if PAGE else token) * chosen_stride
    more_chosen = more_chosen + token * more_chosen_stride if more_rows is not None else None
    first, count = lengths_of(chosen, more_chosen, lens, token, width, more_width, PAGE)
    start, end = share_of(count, split, SPLITS, STEP)
    part = (token * HEADS + head) * SPLITS + split
    if (split > 0) & (start >= count):
        tl.store(weights + part, float("-inf"), mask=head < HEADS)
        return
    query = load_heads(q + token * q_stride, head, head_stride, 0, HEADS, DIM, MAIN)
    tail = load_heads(q + token * q_stride, head, head_stride, MAIN, HEADS, DIM, TAIL) if TAIL else None
    best, total = begin(sinks, head, head < tl.where(split == 0, HEADS, 0), QUERIES)
    mean, last = tl.zeros([QUERIES, MAIN], tl.float32), tl.minimum(end, first)
    best, total, mean = take_rows(
        query, tail, best, total, mean, rows, chosen, start, last, scale, ROW, DIM, STEP, PAGE, EXACT, GROUP, BIAS
    )
    if more_rows is not None:
        rows, chosen, start, last = more_rows, more_chosen, tl.maximum(start - first, 0), end - first
        best, total, mean = take_rows(
            query, tail, best, total, mean, rows, chosen, start, last, scale, MORE, DIM, STEP, PAGE, EXACT, GROUP, BIAS
        )
    store_part(out, weights, part, head < HEADS, best, total, mean, VALUES, SPLITS)


def takes_values(*call: object) -> str:
    """Return why these kernels do not take a call of `sparse_mqa` or `paged_mqa`, or ""
    (`Limited.takes`): the size of a value, its second last argument, is at most MOST_VALUES.
    """
    size = call[-2]
    assert isinstance(size, int)
    return "" if size <= MOST_VALUES else f"values of {size} elements, and a program holds at most {MOST_VALUES}"


class Lists(NamedTuple):
    """The row arguments of `sparse_mqa_kernel`. For `paged_mqa`, `chosen` is the page table and
    `slots` and `lens` are set; otherwise both are None.
    """

    rows: Tensor
    chosen: Tensor
    more_rows: Tensor | None = None
    more_chosen: Tensor | None = None
    slots: Tensor | None = None
    lens: Tensor | None = None


def sparse_mqa(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: Tensor | None,
    more_chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    codec: RowCodec | None,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.sparse_mqa`: return [T, H, value_size], the attention of q [T, H, D]
    over the chosen rows of both pools, which have one dtype. Does not wait.
    """
    return _attend(q, Lists(rows, chosen, more_rows, more_chosen), sinks, scale, value_size, 0, codec, tuning)


def paged_mqa(
    q: Tensor,
    rows: Tensor,
    table: Tensor,
    token_slots: Tensor,
    lens: Tensor,
    page_size: int,
    scale: float,
    value_size: int,
    codec: RowCodec | None,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.paged_mqa`: return [T, H, value_size], the attention of q [T, H, D]
    over the first lens[t] rows of each token's request. Does not wait.
    """
    lists = Lists(rows, table, slots=token_slots, lens=lens)
    return _attend(q, lists, None, scale, value_size, page_size, codec, tuning)


def _block(tuning: Tuning, heads: int, itemsize: int) -> tuple[int, int]:
    """Return heads per program and rows per iteration.

    Both are a quarter for float32: its products need twice the registers and do not use the
    matrix unit.
    """
    share = max(1, itemsize // 2) ** 2
    most = min(power_of_two(heads), tuning.sparse_heads // share)
    return max(NARROWEST_DOT, most), max(NARROWEST_DOT, tuning.sparse_tokens // share)


def _splits(tuning: Tuning, blocks: int, steps: int) -> int:
    """Return into how many parts each token's list is split, so that every core has one program.

    `blocks` is the number of programs without a split, `steps` the iterations over the longest
    list. Each program occupies a core, and the cost of a split is not small compared with a list of
    some hundred rows.
    """
    return max(1, min(tuning.programs // 2 // blocks, tuning.most_splits, steps))


def _attend(
    q: Tensor,
    lists: Lists,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    page_size: int,
    codec: RowCodec | None,
    tuning: Tuning,
) -> Tensor:
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, value_size, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    queries, step = _block(tuning, heads, q.itemsize)
    more_rows, more_chosen = lists.more_rows, lists.more_chosen
    width, more_width = lists.chosen.shape[1] * (page_size or 1), 0 if more_chosen is None else more_chosen.shape[1]
    blocks = tokens * tiles(heads, queries)
    splits = _splits(tuning, blocks, tiles(width + more_width, step))
    parts, weights = parts_of(out, splits)
    form = read_form_of(codec, tuning)
    main = max(power_of_two(value_size), NARROWEST_DOT, form["GROUP"])
    sparse_mqa_kernel[(blocks, splits)](
        q,
        *lists,
        sinks,
        parts,
        weights,
        *q.stride()[:2],
        lists.chosen.stride(0),
        0 if more_chosen is None else more_chosen.stride(0),
        width,
        more_width,
        scale * LOG2_E.value,
        ROW=lists.rows.stride(0),
        MORE=0 if more_rows is None else more_rows.stride(0),
        HEADS=heads,
        DIM=dim,
        VALUES=value_size,
        MAIN=main,
        TAIL=max(power_of_two(dim - main), NARROWEST_DOT) if dim > main else 0,
        QUERIES=queries,
        STEP=step,
        SPLITS=splits,
        PAGE=page_size,
        **form,
        **tuning.options(tuning.sparse_mqa),
    )
    return merged(parts, weights, out, tuning)

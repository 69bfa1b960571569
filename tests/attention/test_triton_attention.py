"""Attention in Triton equals torch's own attention over each request alone; it reads and writes
nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.runtime.attention import triton, triton_blocks, triton_decode, triton_extend
from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.triton import TritonAttention, TritonPlan
from sglcore.runtime.attention.triton_decode import Chunks, chunks_for
from sglcore.runtime.kernels.triton import LaunchConfig, Tuning, softmax
from tests.attention.rows import CONTEXT, Case, Heads, make_case
from tests.kernels.guards import Guards, mutated

SMALL = Tuning(programs=64, decode_programs=5, decode_tokens=16, extend_tokens=16, extend_queries=16)
"""Gives several chunks and several tiles even for short rows."""

Rows = tuple[tuple[int, int], ...]
MIXED: Rows = ((9, 1), (30, 1), (2, 6), (0, 20), (25, 23))
SINGLES: Rows = ((9, 1), (0, 1), (3, 1), (46, 1))


class Small(TritonAttention):
    """Triton attention with small tiles."""

    def make_tuning(self) -> Tuning:
        return SMALL


def case_of(
    rows: Sequence[tuple[int, int]],
    heads: Heads = Heads(),
    page_size: int = 4,
    decode: bool = False,
    kind: type[TritonAttention] = Small,
    seed: int = 0,
    windows: tuple[int | None, ...] | None = None,
) -> Case:
    """Make a case that has its lengths on the device too."""
    case = make_case(rows, heads, page_size, seed, decode, kind, windows)  # pyright: ignore[reportArgumentType]
    lengths = case.batch.extend_seq_lens_cpu
    if lengths is not None:
        case.batch.extend_seq_lens = torch.from_numpy(lengths.copy())
        case.batch.extend_start_loc = torch.from_numpy((np.cumsum(lengths) - lengths).astype(np.int32))
    return case


def as_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The same case over a pool of another dtype, with values of that dtype."""
    for parts in (case.keys, case.values, case.queries):
        parts[:] = [part.to(dtype).float() for part in parts]
    pool = case.backend.token_to_kv_pool
    pool._kv = [(k.to(dtype), v.to(dtype)) for k, v in pool._kv]  # pyright: ignore[reportAttributeAccessIssue]
    return case


def assert_equals_dense(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """The output equals the oracle; the rows' KV slots hold the stored values and all others are
    still NaN."""
    found = case.run(*(part.to(dtype) for part in case.inputs))
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), case.dense(), rtol=bound, atol=bound)
    own = torch.cat(case.cells)
    for cache, parts in zip(case.backend.token_to_kv_pool.kv(0), (case.keys, case.values), strict=True):
        assert torch.equal(cache[own].float(), torch.cat(parts))
        rest = torch.ones(len(cache), dtype=torch.bool).index_fill_(0, own, False)
        assert cache[rest].isnan().all()


HEADS = (
    Heads(),
    Heads(6, 2, 16, window=5),
    Heads(8, 1, 24, window=1, scaling=0.3),
    Heads(3, 3, 80, window=16),
    Heads(5, 1, 128, window=17),
    Heads(4, 2, 256, window=CONTEXT),
    Heads(6, 2, 16, window=20, softcap=0.7),
    Heads(6, 2, 16, window=20, has_sinks=True),
)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_decode_of_any_lengths_over_any_pages(heads: Heads, page_size: int) -> None:
    assert_equals_dense(case_of(SINGLES, heads, page_size, decode=True))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_with_and_without_a_prefix_beside_decode_rows(heads: Heads, page_size: int) -> None:
    assert_equals_dense(case_of(MIXED, heads, page_size))


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_floats_are_added_up_wide(dtype: torch.dtype, decode: bool) -> None:
    rows = SINGLES if decode else MIXED
    assert_equals_dense(as_dtype(case_of(rows, Heads(8, 2, 64, window=20), 16, decode), dtype), dtype)


EDGES = (
    [(0, 1)],
    [(15, 1)],
    [(16, 1)],
    [(31, 17)],
    [(0, 16), (0, 17)],
    [(CONTEXT - 1, 1), (0, CONTEXT)],
    [(4, 2), (3, 1)],
)


@pytest.mark.parametrize("rows", EDGES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 16, 17])
def test_lengths_at_the_edges_of_blocks_and_windows(rows: Any, window: int | None) -> None:
    assert_equals_dense(case_of(rows, Heads(window=window)))


@pytest.mark.parametrize(("programs", "wanted"), [(1, Chunks(512, 1)), (8, Chunks(128, 1)), (1000, Chunks(16, 4))])
def test_any_number_of_chunks_gives_the_same(programs: int, wanted: Chunks) -> None:
    class Split(TritonAttention):
        def make_tuning(self) -> Tuning:
            return Tuning(programs=programs, decode_tokens=16)

    case = case_of(SINGLES, Heads(window=40), decode=True, kind=Split)
    assert_equals_dense(case)
    plan = case.backend.plan(case.batch)
    assert isinstance(plan, TritonPlan) and plan.chunks == wanted


@pytest.mark.parametrize(
    ("rows", "longest", "wanted"),
    [
        (1, 32768, Chunks(64, 64)),
        (8, 32768, Chunks(128, 64)),
        (32, 32768, Chunks(512, 64)),
        (32, 1024, Chunks(512, 2)),
        (128, 32768, Chunks(2048, 16)),
        (1280, 131072, Chunks(2048, 4)),
    ],
)
def test_chunks_are_small_where_requests_are_few(rows: int, longest: int, wanted: Chunks) -> None:
    """132 multiprocessors with two programs each, eight KV heads."""
    assert chunks_for(Tuning(programs=264), rows, 8, longest) == wanted


def test_other_requests_do_not_change_a_requests_sums() -> None:
    """The chunks of a request, and the order in which they are added up, depend on its length
    alone, in batches of one size."""
    one = case_of([(46, 1), (9, 1), (0, 1), (3, 1)], decode=True)
    other = case_of([(46, 1), (40, 1), (31, 1), (17, 1)], decode=True)
    assert torch.equal(one.keys[0], other.keys[0]) and torch.equal(one.queries[0], other.queries[0])
    assert torch.equal(one.run()[0], other.run()[0])


def test_layers_with_and_without_a_window_share_one_plan() -> None:
    case = case_of([(9, 1), (12, 1), (2, 6)], Heads(window=5), windows=(None, 5))
    torch.testing.assert_close(case.run(), case.dense(), rtol=1e-5, atol=1e-5)
    case.layer = Attention(0, 4, 2, 8, None, None)
    found = case.backend.forward(*case.inputs, case.layer, case.batch)
    torch.testing.assert_close(found, case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", [True, False])
def test_no_rows_and_no_tokens_give_nothing(decode: bool) -> None:
    q, k = torch.zeros(0, 32), torch.zeros(0, 16)
    assert case_of([], decode=decode).run(q, k, k).shape == (0, 32)


def pad(case: Case, more: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows as a graph registry does, with NaN as q, k and v of the padding; returns the inputs
    of all rows."""
    batch = case.batch
    filled = {"req_pool_indices": 0, "seq_lens": 1, "out_cache_loc": 0}
    for name, value in filled.items():
        setattr(
            batch, name, torch.cat([getattr(batch, name), torch.full((more,), value, dtype=getattr(batch, name).dtype)])
        )
    batch.batch_size, batch.num_tokens = batch.batch_size + more, batch.num_tokens + more
    q, k, v = (torch.cat([part, torch.full((more, part.shape[1]), torch.nan)]) for part in case.inputs)
    return q, k, v


def test_padding_rows_of_a_captured_decode_change_nothing() -> None:
    case = case_of(SINGLES, decode=True)
    plain = case_of(SINGLES, decode=True).run()
    inputs = pad(case, 3)
    plan = case.backend.capture_plan(Bucket(7, 7))
    case.backend.refresh(plan, case.batch)
    case.batch.mark_forward_metadata_ready(plan)
    found = case.backend.forward(*inputs, case.layer, case.batch)
    torch.testing.assert_close(found[:4], plain, rtol=1e-5, atol=1e-5)
    own = torch.cat(case.cells)
    keys, _ = case.backend.token_to_kv_pool.kv(0)
    assert torch.equal(keys[own], torch.cat(case.keys))


def test_lines_of_an_extend_batch_beyond_the_real_ones_are_zero() -> None:
    case = case_of(MIXED)
    plain = case_of(MIXED).run()
    assert case.batch.out_cache_loc is not None
    inputs = tuple(torch.cat([part, torch.full((5, part.shape[1]), torch.nan)]) for part in case.inputs)
    case.batch.out_cache_loc = torch.cat([case.batch.out_cache_loc, torch.zeros(5, dtype=torch.int64)])
    found = case.run(*inputs)
    torch.testing.assert_close(found[:-5], plain)
    assert torch.equal(found[-5:], torch.zeros(5, 32))


def test_one_captured_plan_serves_batches_of_any_lengths() -> None:
    first = case_of([(3, 1), (0, 1), (7, 1)], decode=True)
    plan = first.backend.capture_plan(Bucket(3, 3))
    assert isinstance(plan, TritonPlan)
    chunks = plan.chunks
    for rows in ([(3, 1), (0, 1), (7, 1)], [(40, 1), (46, 1), (1, 1)]):
        case = case_of(rows, decode=True)
        assert case.backend.refresh(plan, case.batch) is None and plan.chunks == chunks
        case.batch.mark_forward_metadata_ready(replace(plan, planner=case.backend))
        case.batch.seq_lens_cpu = None
        found = case.backend.forward(*case.inputs, case.layer, case.batch)
        torch.testing.assert_close(found, case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", [True, False])
def test_forward_reads_no_tensor_on_the_host(decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(SINGLES if decode else MIXED, decode=decode)
    case.batch.mark_forward_metadata_ready(case.backend.plan(case.batch))

    def refuse(*_: object) -> None:
        raise AssertionError("a host read")

    for name in ("item", "tolist", "numpy", "nonzero", "__int__", "__bool__", "__index__", "cpu"):
        monkeypatch.setattr(Tensor, name, refuse)
    case.backend.forward(*case.inputs, case.layer, case.batch)


def test_new_keys_go_through_the_tables_store() -> None:
    case = case_of(SINGLES, decode=True)
    stored: list[Tensor] = []
    kernels = case.backend.kernels
    case.backend.token_to_kv_pool._store_kv = (  # pyright: ignore[reportAttributeAccessIssue]
        lambda key, *rest: (stored.append(key), kernels.store_kv(key, *rest))[1]
    )
    case.run()
    assert torch.equal(stored[0], torch.cat([keys[-1:] for keys in case.keys]))


def swap(monkeypatch: pytest.MonkeyPatch, module: ModuleType, folder: Path, old: str, new: str) -> None:
    """Put a defect into the kernels that the backend calls."""
    defect = mutated(module, folder, old, new)
    users = [(triton_decode, "attend_singles"), (triton_extend, "attend_rows")]
    for user, name in users:
        if module is not user and f"from {module.__name__} import" in Path(str(user.__file__)).read_text(
            encoding="utf-8"
        ):
            found = mutated(user, folder, f"from {module.__name__} import", f"from {defect.__name__} import")
            monkeypatch.setattr(triton, name, getattr(found, name))
        elif module is user:
            monkeypatch.setattr(triton, name, getattr(defect, name))


MUTANTS = (
    (triton_blocks, "positions % PAGE", "0"),
    (triton_blocks, "column < DIM", "column < DIM - 1"),
    (softmax, "mean * fade[:, None]", "mean"),
    (triton_decode, "inside = at < end", "inside = at <= end"),
    (triton_decode, "tl.minimum(seq_len, WINDOW)", "tl.minimum(seq_len, WINDOW + 1)"),
    (triton_decode, "seq_len - span + chunk", "chunk"),
    (triton_decode, "ends <= index, ends, 0", "ends < index, ends, 0"),
    (triton_decode, "row < rows, chunks_of(", "row < rows - 1, chunks_of("),
    (triton_decode, "item // KV_HEADS, item % KV_HEADS", "item // KV_HEADS, 0"),
    (softmax, "split < count", "split < count - 1"),
    (triton_decode, "member < GROUP", "member <= GROUP"),
    (softmax, "share[:, None]", "1.0"),
    (triton_decode, "start + share, seq_len", "start + share, seq_len - 1"),
    (triton_extend, "position[None, :] <= asked[:, None]", "position[None, :] < asked[:, None]"),
    (triton_extend, "> asked[:, None] - WINDOW", ">= asked[:, None] - WINDOW"),
    (triton_extend, "asked = seq_len - new + token", "asked = seq_len - new + token + 1"),
    (triton_extend, "tl.minimum(first + HELD, new)", "first + QUERIES"),
    (triton_extend, "tl.load(starts + row) + token", "token"),
)
SOFTCAP_MUTANTS = (
    (softmax, "(2.0 / SOFTCAP)", "(1.0 / SOFTCAP)"),
    (softmax, "(SOFTCAP * LOG2_E)", "SOFTCAP"),
    (softmax, "tl.where(seen, score,", "tl.where(True | seen, score,"),
)
SINK_MUTANTS = (
    (softmax, ".to(tl.float32) * LOG2_E", ".to(tl.float32)"),
    (softmax, 'tl.where(best > float("-inf"), 1.0, 0.0)', "tl.zeros([QUERIES], tl.float32)"),
    (triton_decode, "begin(sinks, head,", "begin(sinks, member,"),
    (triton_decode, "tl.where(chunk == 0, GROUP, 0)", "GROUP"),
    (triton_extend, "begin(sinks, head,", "begin(sinks, member % GROUP,"),
)
PLAIN, FEW = Heads(6, 2, 12, window=20), Heads(4, 2, 8)
CHECKED = (
    (PLAIN, SINGLES, MIXED),
    (replace(FEW, softcap=0.7), ((33, 1),), ((17, 3),)),
    (replace(FEW, has_sinks=True), ((33, 1),), ((17, 3),)),
)
DEFECTS = tuple(
    (*rows, *mutant)
    for rows, mutants in zip(CHECKED, (MUTANTS, SOFTCAP_MUTANTS, SINK_MUTANTS), strict=True)
    for mutant in mutants
)


def check_both(heads: Heads, singles: Rows, mixed: Rows, patch: pytest.MonkeyPatch) -> None:
    """Check decode rows and a mixed batch; no kernel reads or writes outside its arguments."""
    guards = Guards(patch)
    assert_equals_dense(case_of(singles, heads, decode=True))
    assert_equals_dense(case_of(mixed, heads))
    guards.check()


@pytest.mark.parametrize(("heads", "singles", "mixed"), CHECKED, ids=str)
def test_without_a_defect_the_same_rows_are_right(
    heads: Heads, singles: Rows, mixed: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_both(heads, singles, mixed, monkeypatch)


@pytest.mark.parametrize(
    ("heads", "singles", "mixed", "module", "old", "new"),
    DEFECTS,
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_a_defect_is_caught(
    heads: Heads,
    singles: Rows,
    mixed: Rows,
    module: ModuleType,
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swap(monkeypatch, module, tmp_path, old, new)
    with pytest.raises(AssertionError):
        check_both(heads, singles, mixed, monkeypatch)


def test_a_device_sets_the_launches() -> None:
    class Wide(TritonAttention):
        def make_tuning(self) -> Tuning:
            return Tuning(lanes=64, decode=LaunchConfig(256, 1))

    case = case_of(SINGLES, decode=True, kind=Wide)
    assert isinstance(case.backend, Wide)
    tuning = case.backend.tuning
    assert tuning.options(tuning.decode) == {"num_warps": 4, "num_stages": 1}
    assert_equals_dense(case)


MISSING = """
import sys
import sglcore, sglcore.runtime.attention.backend_selection as selection
assert "triton" not in sys.modules
sys.modules["triton"] = None
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
needs = selection.AttentionNeeds((64,), 16, "bfloat16", frozenset())
candidates = {"triton": "sglcore.runtime.attention.triton:TritonAttention"}
try:
    selection.select_attention(candidates, needs, None, "toy", DecisionLedger())
except ConfigError as error:
    print(error)
"""


def test_without_the_library_it_is_a_refused_candidate_with_the_command_to_run() -> None:
    run = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    assert "triton refused: its kernels need the library triton" in run.stdout
    assert "pip install triton" in run.stdout

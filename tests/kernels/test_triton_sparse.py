"""The Triton kernels of DeepSeek's attention equal the reference in results and states, and touch
nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.conformance.inputs import kernel_inputs_sparse
from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs
from sglcore.conformance.inputs.kernel_taking import code_of
from sglcore.conformance.laws.laws_kernels import RELATIVE, relative_error
from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.kernel_choice import choose
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.kernels.triton import Tuning, grouped_product, triton_kernels
from sglcore.runtime.kernels.triton.sparse import compressor, indexer, pool_rows, sparse_attention
from tests.kernels.guards import Guards, mutated

SMALL = Tuning(elements=32, programs=64, index_tokens=16, index_scanned=16, compress_tokens=2, compress_elements=16)
"""Gives several programs, parts, splits and blocks even for small tensors."""
MODULES = {
    "sparse_mqa": sparse_attention,
    "paged_mqa": sparse_attention,
    "index_logits": indexer,
    "index_top_k": indexer,
    "compress": compressor,
    "grouped_linear": grouped_product,
}


def long_lists() -> Inputs:
    """Two lists long enough for several iterations and splits; tokens use both lists, one, or
    parts. The heads fill two blocks."""
    drawn = Draw(5, torch.float32)
    lists: list[Tensor] = []
    for width, sizes in ((50, (50, 3, 0)), (40, (17, 0, 40))):
        chosen = torch.stack([drawn.permutation(90)[:width] for _ in sizes]).int()
        lists.append(chosen.masked_fill(torch.arange(width) >= torch.tensor(sizes)[:, None], -1))
    pools = drawn.values(90, 40), drawn.values(90, 40)
    yield drawn.values(3, 20, 40), pools[0], lists[0], pools[1], lists[1], drawn.values(20) + 2, 0.2, 30, None


def equal_scores() -> Inputs:
    """Many equal scores at the top-k bound, with both zeros and infinities among them, in more than
    one block."""
    logits = torch.randint(-2, 3, (5, 70), generator=torch.Generator().manual_seed(3)).float()
    logits[logits == 1] = -0.0
    logits[0, 5:9], logits[1, ::2] = torch.inf, -torch.inf
    lens, slots = torch.tensor([70, 64, 33, 17, 9], dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    logits[torch.arange(70) >= lens[:, None]] = -torch.inf
    table = torch.randperm(9, generator=torch.Generator().manual_seed(4)).int().view(1, 9)
    for k in (16, 40):
        yield logits, lens, table, slots, 8, k


MORE = {"sparse_mqa": long_lists, "index_top_k": equal_scores}
"""Inputs in addition to the kit's that need several iterations."""


def check(
    kernels: ModuleType,
    entry: str,
    guards: Guards,
    tokens: int,
    dtype: torch.dtype,
    float8: str = E4M3FN,
    tuning: Tuning = SMALL,
) -> None:
    """Check every call of the kit with strided rows; rows that no list names hold NaN."""
    more = MORE[entry]() if tokens == 7 and entry in MORE else ()
    for args in (*getattr(kernel_inputs_sparse, entry)(Draw(tokens, dtype, float8), tokens, True), *more):
        wanted_args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        given = [guards.place(arg) if isinstance(arg, Tensor) else arg for arg in args]
        wanted = [getattr(reference_sparse, entry)(*wanted_args)]
        found = [getattr(kernels, entry)(*given, tuning)]
        if entry == "compress":
            # Row 0 is for padding: its contents may stay.
            wanted, found = [*wanted, wanted_args[1][1:]], [*found, given[1][1:]]
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            if one.is_floating_point():
                assert torch.equal(one.isnan(), other.isnan())
                assert relative_error(one, other) <= RELATIVE[str(dtype).removeprefix("torch.")]
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize(("tokens", "dtype"), [(0, torch.float32), (7, torch.float32), (3, torch.bfloat16)])
@pytest.mark.parametrize("entry", MODULES)
def test_a_kernel_gives_what_the_reference_gives_within_its_bounds(
    entry: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    check(MODULES[entry], entry, guards, tokens, dtype)
    guards.check()


@pytest.mark.parametrize("at_once", [1, 8, 128])
def test_a_block_is_the_same_whatever_number_of_tokens_is_added_up_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    tuning = replace(SMALL, compress_tokens=at_once, compress_elements=4 * at_once)
    check(compressor, "compress", guards, 7, torch.float32, tuning=tuning)
    guards.check()


@pytest.mark.parametrize(("float8", "converted"), [(E4M3FN, E4M3FN), (E4M3FNUZ, None), (E4M3FNUZ, E4M3FNUZ)])
@pytest.mark.parametrize("entry", ["sparse_mqa", "paged_mqa", "index_logits"])
def test_rows_in_eight_bits_are_read_in_each_form_by_their_bits_and_by_instructions(
    entry: str, float8: str, converted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    check(MODULES[entry], entry, guards, 7, torch.float32, float8, replace(SMALL, float8=converted))
    guards.check()


def test_values_that_no_program_holds_are_left_to_the_reference() -> None:
    table, q, ints = triton_kernels(), torch.empty(1, 2, 640), torch.empty(1, 4, dtype=torch.int32)
    for size, wanted in ((512, sparse_attention.sparse_mqa), (640, reference_sparse.sparse_mqa)):
        call = q, q[0], ints, None, None, None, 1.0, size, None
        assert code_of(choose(table, KernelTable.sparse_mqa, call)) is code_of(wanted)


MUTANTS: tuple[tuple[str, str, str], ...] = (
    ("sparse_mqa", "inside = row >= 0", "inside = row >= -1"),
    ("sparse_mqa", "tl.minimum(split * share + share, count)", "split * share + share"),
    ("sparse_mqa", "tl.maximum(start - first, 0)", "start"),
    ("sparse_mqa", "tl.minimum(end, first)", "end"),
    ("sparse_mqa", "tl.where(split == 0, HEADS, 0)", "HEADS"),
    ("sparse_mqa", "part, head < HEADS, best", "part, head <= HEADS, best"),
    ("sparse_mqa", "score += wide_dot(tail, tl.trans(rest))", "score += 0.0"),
    ("sparse_mqa", "place + 1, 0), axis=0)", "place, 0), axis=0)"),
    ("paged_mqa", "inside = place < end", "inside = place <= end"),
    ("index_logits", "inside = place < count", "inside = place <= count"),
    ("index_logits", "first + seen * turn, width", "first + seen * turn + turn, width"),
    ("index_logits", "tl.maximum(wide_dot(query, tl.trans(key)), 0.0)", "wide_dot(query, tl.trans(key))"),
    ("index_top_k", "if count <= K", "if count < 0"),
    ("index_top_k", "(key > bound) |", "(key >= bound) |"),
    ("index_top_k", "shift -= 2", "shift -= 3"),
    ("index_top_k", "kept += tl.sum", "kept = tl.sum"),
    ("compress", "(token // RATIO * SIZE)[:, None]", "0"),
    ("compress", "(read < -1)[:, None]", "(read < 0)[:, None]"),
    ("compress", "token % RATIO * WIDTH", "token // RATIO * WIDTH"),
    ("compress", "channel < SIZE", "channel <= SIZE"),
    ("compress", "total * kept", "total"),
    ("compress", "entry * kept", "entry"),
    ("compress", "best = highest", "best = tl.max(gate, axis=0)"),
    ("compress", "token = first + ", "token = "),
    ("compress", "(row * state_stride)", "(row * 0)"),
    ("grouped_linear", "row < tokens", "row <= tokens"),
    ("grouped_linear", "column < SIZE", "column <= SIZE"),
    ("grouped_linear", "group * group_stride", "0"),
)


@pytest.mark.parametrize(("entry", "old", "new"), MUTANTS)
def test_a_defect_is_caught(entry: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(MODULES[entry], tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(defect, entry, guards, 7, torch.float32)
        guards.check()


CODEC_MUTANTS = (
    ("& -0x4001", ""),
    ("* factor", ""),
    ("group * GROUP < ROUNDED", "group * GROUP < 0"),
    ("column >= ROUNDED", "column > ROUNDED"),
    ("place % PAGE", "0"),
)


@pytest.mark.parametrize(("old", "new"), CODEC_MUTANTS)
def test_a_defect_of_what_they_share_is_caught(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(pool_rows, tmp_path, old, new)
    user = mutated(sparse_attention, tmp_path, f"from {pool_rows.__name__} import", f"from {defect.__name__} import")
    with pytest.raises(AssertionError):
        check(user, "paged_mqa", guards, 7, torch.float32)


@pytest.mark.parametrize(
    ("old", "new", "converted"),
    [
        ("256.0 if BIAS == 7 else 128.0", "256.0", None),
        ("if BIAS == -8", "if BIAS == 8", E4M3FNUZ),
    ],
)
def test_a_defect_of_one_form_of_floats_is_caught(
    old: str, new: str, converted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(pool_rows, tmp_path, old, new)
    user = mutated(sparse_attention, tmp_path, f"from {pool_rows.__name__} import", f"from {defect.__name__} import")
    with pytest.raises(AssertionError):
        check(user, "paged_mqa", guards, 7, torch.float32, E4M3FNUZ, replace(SMALL, float8=converted))

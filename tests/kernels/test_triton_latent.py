"""The Triton kernels of latent rows, hyper-connections and lists of rows equal the reference, and
touch nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.conformance.inputs import kernel_inputs, kernel_inputs_sparse
from sglcore.conformance.inputs.kernel_inputs import Draw
from sglcore.conformance.laws.laws_kernels import RELATIVE, relative_error
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ, FLOATS, RowCodec
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.kernels.triton import Tuning, activation, experts, hyper, routing
from sglcore.runtime.kernels.triton.sparse import latent_rows, sparse_plan
from tests.kernels.guards import Guards, mutated

SMALL = Tuning(elements=128, hc_split=48, hc_depth=32)
"""Gives several programs even for small tensors."""
MODULES = {
    **dict.fromkeys(("rope_tail", "norm_rope_store", "index_key_store"), latent_rows),
    **dict.fromkeys(("hc_pre", "hc_post", "hc_head"), hyper),
    **dict.fromkeys(("sqrtsoftplus_routing", "hash_routing"), routing),
    **{"limited_silu_and_mul": activation, "limited_moe": experts},
    **dict.fromkeys(("window_rows", "block_rows", "compress_plan"), sparse_plan),
}


def limited_silu_and_mul(drawn: Draw, tokens: int, strided: bool) -> kernel_inputs.Inputs:
    """A row longer than one program."""
    yield drawn.rows(tokens, 2 * 200, strided), 0.7


def hc_head(drawn: Draw, tokens: int, strided: bool) -> kernel_inputs.Inputs:
    """More tokens than one program takes."""
    h, fn = drawn.rows(tokens, 60, strided).unflatten(1, (3, 20)), drawn.values(3, 60).float() * 0.15
    yield h, fn, drawn.values(3).float(), torch.tensor([0.8]), 1e-6, 1e-2


def check(
    kernels: ModuleType, name: str, guards: Guards, tokens: int, dtype: torch.dtype, float8: str = E4M3FN
) -> None:
    """For every call of the kit on strided rows, compare results and written tensors."""
    entry = KernelTable.declared()[name]
    own = {"limited_silu_and_mul": limited_silu_and_mul, "hc_head": hc_head}
    inputs = vars(kernel_inputs) | vars(kernel_inputs_sparse) | own
    for args in inputs[name](Draw(tokens, dtype, float8), tokens, True):
        wanted_args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        given = [guards.place(arg) if isinstance(arg, Tensor) else arg for arg in args]
        wanted, found = entry.reference(*wanted_args), getattr(kernels, name)(*given, SMALL)
        codec = next((arg for arg in args if isinstance(arg, RowCodec)), None)
        written = [entry.parameters.index(each) for each in entry.writes]
        pairs = zip(
            *(
                (*results_of(made), *(held[place] for place in written))
                for made, held in ((found, given), (wanted, wanted_args))
            ),
            strict=True,
        )
        for one, other in pairs:
            compare(one, other, codec, RELATIVE[str(dtype).removeprefix("torch.")])


def results_of(made: Any) -> tuple[Tensor, ...]:
    """Return the results as a tuple: none, one, or several."""
    return () if made is None else made if isinstance(made, tuple) else (made,)


def compare(found: Tensor, wanted: Tensor, codec: RowCodec | None, bound: float) -> None:
    """Compare within `bound`; 8-bit rows are decoded first."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if wanted.dtype == torch.uint8 and codec is not None:
        found, wanted, bound = codec.decode(found), codec.decode(wanted), RELATIVE["float8"]
    if wanted.is_floating_point():
        assert relative_error(found, wanted) <= bound
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(0, torch.float32), (1, torch.float32), (21, torch.float32), (3, torch.bfloat16)]
)
@pytest.mark.parametrize("entry", MODULES)
def test_a_kernel_gives_what_the_reference_gives_within_its_bounds(
    entry: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    check(MODULES[entry], entry, guards, tokens, dtype)
    guards.check()


@pytest.mark.parametrize("entry", ["norm_rope_store", "index_key_store"])
def test_rows_in_the_other_floats_are_the_reference_s(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    check(latent_rows, entry, guards, 21, torch.float32, E4M3FNUZ)
    guards.check()


def check_bytes(kernels: ModuleType, guards: Guards, float8: str = E4M3FN) -> None:
    """Check every value of e4m3, and values between two neighbours, in groups with scale 1, 2^-12
    and 2^12."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat(((values[1:] + values[:-1]) / 2, torch.zeros(1)))
    rows = torch.cat((torch.stack((values, between, values * 0.99)), torch.full((3, 1), 448.0)), dim=1)
    x = torch.cat([sign * rows * scale for sign in (1, -1) for scale in (1, 2**-12, 2**12)])
    codec, where = RowCodec(128, group=128, float8=float8), torch.arange(len(x))
    found = guards.place(torch.zeros(len(x), codec.num_bytes, dtype=torch.uint8))
    given = guards.place(x), torch.empty(0), 1e-6, where.int(), torch.empty(len(x), 0), found, where, codec
    kernels.norm_rope_store(*given, SMALL)
    assert torch.equal(found, codec.encode(x))


@pytest.mark.parametrize("float8", FLOATS)
def test_rows_in_eight_bits_are_the_reference_s_to_the_bit(float8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    check_bytes(latent_rows, guards, float8)
    guards.check()


MUTANTS: tuple[tuple[str, str, str], ...] = (
    ("rope_tail", "flat < rows", "flat <= rows"),
    ("rope_tail", "!= IS_INVERSE", "!= (not IS_INVERSE)"),
    ("rope_tail", "(tail ^ 1)", "tail"),
    ("rope_tail", "/ NORMED + eps", "/ BLOCK + eps"),
    ("rope_tail", "flat % HEADS * head_stride", "0"),
    ("norm_rope_store", "(column < NORMED)[None, :]", "(column <= NORMED)[None, :]"),
    ("norm_rope_store", "+ 0x1FFFFF", ""),
    ("norm_rope_store", "(120 << 3)", "(119 << 3)"),
    ("norm_rope_store", "size < 0x3C800000", "size < 0x3D800000"),
    ("norm_rope_store", "(2 * column - ROUNDED)", "2 * column"),
    ("index_key_store", "column - HALF", "column"),
    ("index_key_store", "tl.load(bias + column", "tl.load(weight + column"),
    ("index_key_store", "token < tokens", "token <= tokens"),
    ("hc_pre", "range(1, splits)", "range(2, splits)"),
    ("hc_pre", "(at + depth < SPLIT)", "(at + depth <= SPLIT)"),
    ("hc_pre", "range(1, iters)", "range(2, iters)"),
    ("hc_pre", "eps, 1), is_pair, eps, 0)", "eps, 0), is_pair, eps, 1)"),
    ("hc_pre", "tl.load(scale + 2)", "tl.load(scale + 1)"),
    ("hc_post", "(token * STREAMS + each) * STREAMS + stream", "(token * STREAMS + stream) * STREAMS + each"),
    ("hc_head", "token < tokens", "token <= tokens"),
    ("hc_head", "tl.program_id(0) * ROWS", "tl.program_id(1) * ROWS"),
    ("hc_head", "+ eps\n    column", "\n    column"),
    ("sqrtsoftplus_routing", "(bits >> 31) & 0x7FFFFFFF", "0"),
    ("sqrtsoftplus_routing", "row < rows", "row <= rows"),
    ("hash_routing", "token[:, None] * CHOICES", "row[:, None] * CHOICES"),
    ("hash_routing", "+ 1e-20) * scale", "+ 1e-20)"),
    ("limited_silu_and_mul", "tl.minimum(gate, limit)", "gate"),
    ("limited_moe", "limit, dtype, LIMITED", "limit, dtype, False"),
    ("window_rows", "last - WINDOW + 1", "last - WINDOW"),
    ("window_rows", "column < WIDTH", "column <= WIDTH"),
    ("block_rows", "(last + 1) // RATIO", "last // RATIO"),
    ("compress_plan", "after[None, :] <= event", "after[None, :] < event"),
    ("compress_plan", "slot > 0, end", "slot >= 0, end"),
    ("compress_plan", "source < begin[:, None], -2 - held", "source <= begin[:, None], -2 - held"),
    ("compress_plan", "(place - offset) // PAGE", "place // PAGE"),
    ("compress_plan", "(place // PAGE + 1) * PAGE", "end"),
    ("compress_plan", "place + RING >= end", "place + RING > end"),
)


@pytest.mark.parametrize(("entry", "old", "new"), MUTANTS)
def test_a_defect_is_caught(entry: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(MODULES[entry], tmp_path, old, new)
    with pytest.raises((AssertionError, IndexError)):
        if entry == "norm_rope_store":
            check_bytes(defect, guards)
        check(defect, entry, guards, 21, torch.float32)
        guards.check()


@pytest.mark.parametrize(
    ("old", "new"), [("small == 0x80, 0", "small == 0x81, 0"), ("exponent += BIAS - 7", "exponent += 0")]
)
def test_a_defect_of_the_other_floats_is_caught(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    with pytest.raises(AssertionError):
        check_bytes(mutated(latent_rows, tmp_path, old, new), guards, E4M3FNUZ)

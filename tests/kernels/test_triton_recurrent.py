"""The Triton kernels of recurrent layers equal the reference in results and states, and touch
nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.conformance.inputs import kernel_inputs
from sglcore.conformance.inputs.kernel_inputs import Draw
from sglcore.conformance.laws.laws_kernels import RELATIVE, relative_error
from sglcore.runtime.kernels import reference_recurrent
from sglcore.runtime.kernels.triton import Tuning, convolution, delta_rule, norm_kernels, state_space
from tests.kernels.guards import Guards, mutated

SMALL = Tuning(elements=256, conv_tokens=16, conv_channels=32, state_columns=16, scan_tokens=16)
"""Gives several programs, tiles and chunks even for small tensors."""
STATES = {"causal_conv": 4, "gated_delta_rule": 5, "selective_scan": 7}
"""The position of the state pool in the arguments of each entry."""
MODULES = {
    "causal_conv": convolution,
    "gated_delta_rule": delta_rule,
    "selective_scan": state_space,
    "gated_rms_norm": norm_kernels,
}


def gated_rms_norm(drawn: Draw, tokens: int, strided: bool) -> kernel_inputs.Inputs:
    """Groups with one weight each, and a single group."""
    for groups, size, gate_first in ((1, 12, False), (2, 24, True)):
        x, gate = (drawn.rows(tokens, 48, strided) for _ in range(2))
        yield x, gate, drawn.values(groups, size), 1e-6, gate_first


def check(kernels: ModuleType, entry: str, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    """Check every call of the kit, also on strided rows; padding rows and padding tokens hold
    NaN."""
    make = gated_rms_norm if entry == "gated_rms_norm" else getattr(kernel_inputs, entry)
    for strided in (False, True) if tokens <= 3 else (True,):
        for args in make(Draw(tokens, dtype), tokens, strided):
            place = STATES.get(entry)
            if place is not None:
                spoil_padding(args, place)
            wanted_args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            given = [guards.place(arg) if isinstance(arg, Tensor) else arg for arg in args]
            wanted = [getattr(reference_recurrent, entry)(*wanted_args)]
            found = [getattr(kernels, entry)(*given, SMALL)]
            if place is not None:
                wanted, found = [*wanted, wanted_args[place]], [*found, given[place]]
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape
                assert relative_error(one, other) <= RELATIVE[str(dtype).removeprefix("torch.")], (args[-4:], strided)


def spoil_padding(args: tuple[Any, ...], place: int) -> None:
    """Put NaN into state slot 0, which is for padding, and into the tokens of padding rows."""
    slots, starts, *_ = args[-4:]
    args[place][0] = torch.nan
    if starts is None:
        args[0][slots == 0] = torch.nan


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


MUTANTS: tuple[tuple[str, str, str], ...] = (
    ("causal_conv", "place < length", "place <= length"),
    ("causal_conv", "source < 0", "source < -1"),
    ("causal_conv", "length + place_in_tail", "place_in_tail"),
    ("causal_conv", "slot * ((TAPS - 1) * SIZE)", "0"),
    ("causal_conv", "(slot > 0) & (target > 0)", "(slot > 0)"),
    ("causal_conv", "(slot > 0) & (target > 0)", "(target > 0)"),
    ("causal_conv", "(target - slot) * (", "0 * ("),
    ("gated_delta_rule", "tl.where(target > 0, KEY, 0)", "KEY"),
    ("gated_delta_rule", "(target - slot) * (", "0 * ("),
    ("selective_scan", "tl.where(target > 0, SIZE, 0)", "SIZE"),
    ("selective_scan", "(target - slot) * (", "0 * ("),
    ("causal_conv", "column < SIZE", "column <= SIZE"),
    ("gated_delta_rule", "at + i < length", "at + i <= length"),
    ("gated_delta_rule", "state * tl.exp(whole)", "state"),
    ("gated_delta_rule", "* tl.exp(g)\n", "\n"),
    ("gated_delta_rule", "tl.exp(whole - total)", "tl.exp(-total)"),
    ("gated_delta_rule", "i[:, None] > i[None, :]", "i[:, None] > i[None, :] + 1"),
    ("gated_delta_rule", "rounded_dot(inverse, wanted * beta[:, None], dtype)", "wanted * beta[:, None]"),
    ("gated_delta_rule", "head // (HEADS // KEY_HEADS)", "head % KEY_HEADS"),
    ("gated_delta_rule", "tl.where(slot > 0, tl.load(lengths + row), 0)", "tl.load(lengths + row)"),
    ("selective_scan", "at + i < length", "at + i <= length"),
    ("selective_scan", "state * tl.exp(whole)", "state"),
    ("selective_scan", "tl.minimum(tl.maximum(wide, dt_min), dt_max)", "tl.maximum(wide, dt_min)"),
    ("selective_scan", "head // (HEADS // GROUPS)", "head % GROUPS"),
    ("selective_scan", "tl.where(slot > 0, tl.load(lengths + row), 0)", "tl.load(lengths + row)"),
    ("selective_scan", "+ skip * x", ""),
    ("gated_rms_norm", "row % GROUPS", "row // INNER % GROUPS"),
    ("gated_rms_norm", "if not GATE_FIRST", "if GATE_FIRST"),
)


@pytest.mark.parametrize(("entry", "old", "new"), MUTANTS)
def test_a_defect_is_caught(entry: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(MODULES[entry], tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(defect, entry, guards, 21, torch.float32)
        guards.check()

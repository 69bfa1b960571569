"""The native kernels of recurrent layers match the reference, for all memory layouts of rows, and
write nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded_copy
from sglcore.conformance.inputs import kernel_inputs
from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs
from sglcore.conformance.laws.laws_kernels import relative_error
from sglcore.runtime.kernels import reference_recurrent
from sglcore_cpu.kernels.recurrent import Recurrent
from sglcore_cpu.native import Engine

POOLS = {"causal_conv": 4, "gated_delta_rule": 5, "selective_scan": 7}
"""Index of the states among an entry's arguments."""
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Error bounds relative to the largest value; in bfloat16 a rounding step."""


def wide_delta_rule(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield a state of two blocks of columns, the second not full, in guarded memory."""
    slots, states = torch.arange(1, tokens + 1, dtype=torch.int32), torch.zeros(tokens + 1, 2, 20, 56)
    heads = drawn.rows(tokens, 2, strided), drawn.rows(tokens, 2, strided)
    yield drawn.rows(tokens, 40 + 112, strided), *heads, torch.zeros(2), torch.ones(2), states, slots, None, None


def gated_rms_norm(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield one weight for all groups, and one for each; the sizes are no multiples of 16."""
    for groups, size, gate_first in ((1, 36, False), (3, 24, True)):
        x, gate = drawn.rows(tokens, 72, strided), drawn.rows(tokens, 72, strided)
        yield x, gate, drawn.values(groups, size), 1e-6, gate_first


CASES = (
    *((name, getattr(kernel_inputs, name)) for name in POOLS),
    ("gated_delta_rule", wide_delta_rule),
    ("gated_rms_norm", gated_rms_norm),
)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("entry", "make"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_an_entry_is_the_reference(engine: Engine, entry: str, make, dtype: torch.dtype) -> None:
    """Padding rows, tokens of no request, and request slot 0 hold NaN."""
    pool = POOLS.get(entry)
    for tokens, strided in ((0, False), (1, False), (5, True), (33, False), (70, True)):
        for args in make(Draw(tokens, dtype), tokens, strided):
            if pool is not None:
                args[pool][0] = torch.nan
            wanted_args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            placed = [
                guarded_copy(arg, 3, 5 if number == 0 else 0) if isinstance(arg, Tensor) else (arg, None)
                for number, arg in enumerate(args)
            ]
            given = [arg for arg, _ in placed]
            with GuardedResults():
                found = [getattr(Recurrent(engine), entry)(*given)]
                wanted = [getattr(reference_recurrent, entry)(*wanted_args)]
                if pool is not None:
                    found, wanted = [*found, given[pool]], [*wanted, wanted_args[pool]]
                for one, other in zip(found, wanted, strict=True):
                    assert one.dtype == other.dtype and relative_error(one, other) <= BOUNDS[dtype], (tokens, strided)
            for _, check in placed:
                if check is not None:
                    check()

"""Cases of every entry of the kernel table: ragged sizes, zero rows, strided views, and what
padding may bring."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglcore.conformance.inputs import (
    kernel_inputs,
    kernel_inputs_hisparse,
    kernel_inputs_sparse,
    kernel_inputs_speculative,
)
from sglcore.conformance.inputs.kernel_inputs import WIDE, WIDTH, Draw, Inputs
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.hisparse_entries import HiSparseKernels
from sglcore.runtime.kernels.row_codec import E4M3FN
from sglcore.runtime.kernels.sparse_entries import SparseKernels
from sglcore.runtime.kernels.speculative_entries import SpeculativeKernels

TOKENS = (0, 1, 3, 33)
FEW = (3,)
"""Numbers of rows in dtypes after the first two: a kernel that takes any two takes others in the
same way, or not at all."""
OF_LOGITS = frozenset({"draw", "greedy"})
"""Entries that take float32, whatever dtype the model is computed in."""
HEAD_DIM = 16
WEIGHT = 0.15
"""Scale of the elements of weights, so that sums of products stay near 1."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call of a kernel entry: `text` describes it, `args` are its arguments on the host. Cases
    of one `kind` differ in rows and strides only; one of each is watched (`is_watched`) to see
    which candidate computes it, which takes time."""

    text: str
    args: tuple[Any, ...]
    is_watched: bool
    kind: tuple[str, int]


_INPUTS = (
    (SparseKernels, kernel_inputs_sparse),
    (SpeculativeKernels, kernel_inputs_speculative),
    (HiSparseKernels, kernel_inputs_hisparse),
)
"""Modules with inputs for entries that other classes declare."""


def kernel_cases(entry: Entry[Any], dtypes: Sequence[str], float8: str = E4M3FN) -> Iterator[KernelCase]:
    """Yield every case of an entry, in these dtypes of a device; `float8`: the 8-bit float of the
    kernel table. Raises AttributeError for an entry without shapes that has no generator here, so
    that it does not go untested."""
    known = next((inputs for kernels, inputs in _INPUTS if entry.name in vars(kernels)), kernel_inputs)
    make = None if entry.shapes else getattr(known, entry.name)
    for place, name in enumerate(("float32",) if entry.name in OF_LOGITS else dtypes):
        for seed, tokens in enumerate(TOKENS if place < 2 else FEW):
            for strided in (False, True):
                text = f"{tokens} rows of {name}{', strided' if strided else ''}"
                drawn = Draw(seed, getattr(torch, name), float8)
                made = make(drawn, tokens, strided) if make else _of_shapes(entry, drawn, tokens, strided)
                for number, args in enumerate(made):
                    yield KernelCase(text, args, tokens in FEW and not strided, (name, number))


def _of_shapes(entry: Entry[Any], drawn: Draw, tokens: int, strided: bool) -> Inputs:
    for shapes in entry.shapes:
        yield tuple(_argument(shape, drawn, tokens, strided) if isinstance(shape, str) else shape for shape in shapes)


def _argument(shape: str, drawn: Draw, tokens: int, strided: bool) -> Any:
    """Return a random argument for a shape such as "T 2I": T is the number of rows, other letters a
    fixed size, "2I" twice that; with a star at the end, float32 that narrower dtypes cannot
    represent (not if it begins with T). `strided` has an effect on "T SIZE" only."""
    sizes = [math.prod(_size(part, tokens) for part in re.findall(r"\d+|[A-Z]", size)) for size in shape.split()]
    if not shape.startswith("T"):
        values = drawn.values(*sizes) * (WEIGHT if len(sizes) > 1 else 1)
        return values.float() * WIDE if shape.endswith("*") else values
    return drawn.rows(tokens, sizes[1], strided) if len(sizes) == 2 else drawn.values(*sizes)


def _size(part: str, tokens: int) -> int:
    return int(part) if part.isdigit() else {"T": tokens, "D": HEAD_DIM}.get(part, WIDTH)

"""Matrix products of a layer for various numbers of rows: the kernel table's functions and torch's,
as shares of the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor
from torch.nn import functional

from .run import Run, share
from .sizes import BYTES

MOST = 64
"""The most copies of a weight."""

Product = Callable[[Tensor, Tensor], Tensor]


def measure(run: Run) -> None:
    """Report a row for each geometry, product, number of rows and function. A graph uses several
    weights in turn, together larger than the device's cache."""
    for rows, (model, geometry) in product(run.sizes.rows, run.sizes.geometries.items()):
        for name, (inputs, outputs) in geometry.products.items():
            with run.stream():
                _case(run, {"model": model, "product": name, "rows": rows}, inputs, outputs)


def _case(run: Run, case: Mapping[str, Any], inputs: int, outputs: int) -> None:
    rows, size = case["rows"], inputs * outputs * BYTES
    count = min(max(-(-run.sizes.cached // size), 1), MOST)
    weights = [run.random(outputs, inputs) * 0.02 for _ in range(count)]
    given = run.random(rows, inputs)
    for function, call in _functions(run, case["product"]):
        kept = rows * (inputs + (outputs // 2 if function == "gated_linear" else outputs)) * BYTES
        bound = run.bounds.us(size + kept, 2 * rows * inputs * outputs)
        us = run.replayed_us(_each(call, given, weights), max(run.sizes.repeats // count, 1))
        us = None if us is None else us / count
        run.report.row(**case, function=function, us=us, bytes=size + kept, bound_us=bound, share=share(bound, us))


def _functions(run: Run, name: str) -> Iterator[tuple[str, Product]]:
    """Yield torch's function, the table's if it has its own, and the table's fused function."""
    yield "torch", functional.linear
    if _is_own(run, "linear"):
        pack = run.kernels.pack_linear
        yield "linear", _packed(pack, lambda x, weight: run.kernels.linear(x, weight, None))
    gated = run.kernels.gated_linear
    if name == "gate_up" and gated is not None:
        yield "gated_linear", _packed(run.kernels.pack_linear, gated)


def _is_own(run: Run, entry: str) -> bool:
    return entry in run.kernels.replaced


def _packed(pack: Callable[[Tensor], Tensor], call: Product) -> Product:
    """Wrap `call` so that each weight is packed once into the format that the table's functions
    read."""
    forms: dict[int, Tensor] = {}

    def packed(x: Tensor, weight: Tensor) -> Tensor:
        form = forms.get(id(weight))
        if form is None:
            form = forms[id(weight)] = pack(weight)
        return call(x, form)

    return packed


def _each(call: Product, given: Tensor, weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        out = given
        for weight in weights:
            out = call(given, weight)
        return out

    return step

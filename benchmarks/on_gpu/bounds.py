"""Measures the device's bounds: copy and read bandwidth, matrix product throughput, and the time
per node of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .run import Run


def measure(run: Run) -> None:
    """Report a row for each bound: `bound`, `unit` and `value`."""
    run.report.note(about=run.about(), ledger=run.ledger, state=run.state())
    with run.stream():
        _copies(run)
        side = run.sizes.square
        left, right = run.random(side, side), run.random(side, side)
        _say(run, "product", "flop/s", 2 * side**3, run.us(lambda: left @ right, 8))
        _nodes(run)


def _copies(run: Run) -> None:
    size = run.sizes.copy_bytes
    source = run.random(size // 2)
    target, wide = torch.empty_like(source), source.view(torch.float32)
    _say(run, "copy", "bytes/s", 2 * size, run.us(lambda: target.copy_(source), 4))
    _say(run, "read", "bytes/s", size, run.us(wide.sum, 4))


def _nodes(run: Run) -> None:
    """Measure graphs of many tiny kernels: time per node."""
    one, count = run.random(1), run.sizes.nodes

    def adds() -> Tensor:
        for _ in range(count):
            one.add_(1)
        return one

    us = run.replayed_us(adds)
    run.report.row(bound="node", unit="us", value=None if us is None else us / count)
    for name, options in (("empty kernel", {}), ("empty kernel, launched early", {"launch_pdl": True})):
        try:
            launch = _empty(run, options)
            us = run.replayed_us(lambda: _times(launch, count, one))  # noqa: B023  called at once
            run.report.row(bound=name, unit="us", value=None if us is None else us / count)
        except Exception as error:  # no Triton for this device, or its compiler lacks the option
            run.report.skip(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _times(launch: Callable[[], object], count: int, given: Tensor) -> Tensor:
    for _ in range(count):
        launch()
    return given


def _empty(run: Run, options: dict[str, Any]) -> Callable[[], object]:
    """Compile an empty Triton kernel; returns a function that launches it."""
    from .empty import empty

    target = run.random(1)

    def launch() -> None:
        empty[(1,)](target, **options)

    launch()
    return launch


def _say(run: Run, name: str, unit: str, amount: float, us: float | None) -> None:
    run.report.row(bound=name, unit=unit, value=None if us is None else amount / us * 1e6)

"""Draws the roofline of a run: operations per second over operations per byte, with the machine's
bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import Bounds, Case
from .engines import OURS

INK, ACCENT, LINE = "#24221e", "#0b6e63", "#e5e1d8"
OTHERS = {
    "vllm": ("#b3640a", "s"),
    "transformers": ("#6b4fa0", "^"),
    "llama_cpp": ("#a3262c", "D"),
    "openvino": ("#2d6fb0", "v"),
}


def save_roofline(file: Path, rows: Sequence[Mapping[str, Any]], cases: Sequence[Case], bounds: Bounds) -> None:
    """Write the PNG. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(sheet)
    panel: Any = sheet.subplots()
    by_name = {case.name: case for case in cases if case.work() and not case.is_disturbed}
    _roof(panel, bounds, [intensity(case) for case in by_name.values()])
    seen: set[str] = set()
    for row in rows:
        if row["case"] in by_name and "median" in row:
            _point(panel, row, by_name[row["case"]], seen)
    _names(panel, by_name.values(), bounds)
    panel.set_xlabel("operations for each byte that must be read")
    panel.set_ylabel("GFLOP/s")
    panel.set_title("Median speeds below what bandwidth and matrix peak allow", color=INK, fontsize=12)
    panel.grid(True, which="major", color=LINE, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.legend(frameon=False, loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, dpi=110, facecolor="white")


def intensity(case: Case) -> float:
    """Return the operations per byte over all steps of a case."""
    steps = case.work()
    return sum(times * made for times, _, made in steps) / sum(times * read for times, read, _ in steps)


def speed(case: Case, value: float) -> float:
    """Return the operations per second of a reading in the case's unit."""
    operations = sum(times * made for times, _, made in case.work())
    tokens = case.prompt if case.kind == "prefill" else case.batch
    return operations / value if case.is_seconds else operations * value / tokens


def _roof(panel: Any, bounds: Bounds, found: Sequence[float]) -> None:
    low, high = min(found, default=1.0) / 2, max(found, default=1000.0) * 3
    for form, style in (("bf16", "-"), ("int8", ":")):
        peak = bounds.peak(form)
        knee = peak / bounds.bandwidth
        places = [low, min(max(knee, low), high), high]
        heights = [min(bounds.bandwidth * place, peak) / 1e9 for place in places]
        label = f"{bounds.bandwidth / 1e9:.1f} GB/s, {peak / 1e12:.2f} TFLOP/s ({form} weights)"
        panel.loglog(places, heights, style, color=INK, linewidth=1.3, label=label)


def _point(panel: Any, row: Mapping[str, Any], case: Case, seen: set[str]) -> None:
    engine = row["engine"]
    color, mark = (ACCENT, "o") if engine == OURS else OTHERS.get(engine, (INK, "x"))
    label = None if engine in seen else engine
    seen.add(engine)
    size = 9 if engine == OURS else 6
    height = speed(case, row["median"]) / 1e9
    panel.plot([intensity(case)], [height], mark, color=color, markersize=size, alpha=0.85, label=label)


def _names(panel: Any, cases: Any, bounds: Bounds) -> None:
    for case in cases:
        place = intensity(case)
        height = min(bounds.bandwidth * place, bounds.peak(case.form)) / 1e9
        panel.annotate(
            case.name, (place, height), (-4, 6), textcoords="offset points", fontsize=8, color=INK, ha="right"
        )

"""Plots of a benchmark: `save_plot` writes a PNG file about latency, throughput, requests in
flight, draft tokens, and the effect of long prompts.

matplotlib is imported only inside the functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.bench.figures import Figures, percentile, values_of
from sglcore.bench.long_prompt_effect import awaited
from sglcore.bench.request_record import Record
from sglcore.core.errors import ConfigError

INK, ACCENT, SECOND, BAD, LINE = "#24221e", "#0b6e63", "#b3640a", "#a3262c", "#e5e1d8"
RIGHT: Mapping[str, Any] = MappingProxyType({"xytext": (6, -10), "ha": "left"})
LEFT: Mapping[str, Any] = MappingProxyType({"xytext": (-6, 5), "ha": "right"})
"""Positions of a curve's labels relative to its points: RIGHT for the first curve, LEFT for the
second."""
TOGETHER_MS = 0.01
"""Smallest gap that the logarithmic axis shows, in milliseconds; shorter ones are drawn at it."""


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib, which `save_plot` needs, is not installed. Call it before
    the load runs."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib, which is not installed", remedy="pip install matplotlib") from None


def save_plot(path: Path, records: Sequence[Record], found: Figures, title: str) -> None:
    """Write a PNG file to `path` with panels for latency, throughput and requests in flight; an
    existing file is replaced.

    There are two more panels if there were draft tokens, and one more if there were long prompts.
    `records` are those of all requests, and `found` is the result of `figures` for them, which the
    head line shows after `title`. Needs matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drafted = [record for record in records if record.is_whole and record.acceptance_length is not None]
    has_long = any(record.is_long for record in records)
    sheet = Figure(figsize=(11, 7 + 3 * bool(drafted) + 3 * has_long), layout="constrained")
    FigureCanvasAgg(sheet)
    rows = "LLLGGG;TTOOFF" + (";CCCPPP" if drafted else "") + (";BBBBBB" if has_long else "")
    panels: Any = sheet.subplot_mosaic(rows)
    if has_long:
        _beside(panels["B"], records)
    whole = [record for record in records if record.is_whole and not record.is_long]
    _distribution(panels["L"], whole, ("ttft", "e2e"), "Latency: share of requests that took at most")
    _distribution(panels["G"], whole, ("itl",), "Between pieces of text: share that took at most")
    _over_time(panels["T"], records)
    _in_steps(panels["O"], panels["F"], records)
    if drafted:
        shares = [record.cached_tokens / record.input_tokens for record in drafted]
        _acceptance(panels["C"], drafted, shares, "share of the prompt from the prefix cache")
        middles = [record.input_tokens + record.output_tokens / 2 for record in drafted]
        _acceptance(panels["P"], drafted, middles, "position in the context, of the middle of the answer")
    for panel in panels.values():
        _calm(panel)
    figures = f"{found.requests_per_s:.1f} requests/s, {found.output_per_s:.0f} output tokens/s"
    failed = found.requests - found.whole
    sheet.suptitle(f"{title}: {figures}{f', {failed} failed' if failed else ''}", fontsize=12, color=INK)
    sheet.savefig(path, dpi=110, facecolor="white")


def _distribution(panel: Any, records: Sequence[Record], names: Sequence[str], title: str) -> None:
    panel.set_title(title)
    panel.set_xlabel("ms")
    panel.set_ylim(0, 1.02)
    for name, color, aside in zip(names, (ACCENT, SECOND), (RIGHT, LEFT), strict=False):
        values = sorted(value * 1000 for record in records for value in values_of(record, name))
        if not values:
            continue
        shares = [(place + 1) / len(values) for place in range(len(values))]
        panel.plot(values, shares, color=color, linewidth=1.6, label=name.upper())
        for share in (0.5, 0.9, 0.99):
            at = percentile(values, share)
            panel.plot([at], [share], "o", color=color, markersize=4)
            panel.annotate(f"p{share * 100:.0f} {at:.1f}", (at, share), textcoords="offset points", fontsize=8, **aside)
    if panel.lines:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.legend(frameon=False, loc="lower right")


def _acceptance(panel: Any, records: Sequence[Record], places: Sequence[float], what: str) -> None:
    """Plot the mean number of tokens that each request got in a step over `places`, one value per
    request; `what` names them.

    Acceptance should not depend on them: if it falls, drafts may read wrong data.
    """
    lengths = [record.acceptance_length or 1.0 for record in records]
    panel.set_title("Tokens of a step")
    panel.set_xlabel(what)
    panel.plot(places, lengths, "o", color=ACCENT, markersize=3, alpha=0.7)
    panel.set_ylim(1, 1 + 1.1 * max(max(lengths) - 1, 0.1))


def _over_time(panel: Any, records: Sequence[Record]) -> None:
    panel.set_title("Time to first token, by when it was due")
    panel.set_xlabel("s")
    panel.set_ylabel("ms")
    whole = [record for record in records if record.is_whole]
    failed = [record for record in records if not record.is_whole]
    panel.plot([r.due for r in whole], [r.ttft * 1000 for r in whole], "o", color=ACCENT, markersize=3, alpha=0.7)
    if failed:
        panel.plot([r.due for r in failed], [0] * len(failed), "x", color=BAD, markersize=5, label="failed")
        panel.legend(frameon=False)
    panel.set_ylim(bottom=0)


def _in_steps(output: Any, flight: Any, records: Sequence[Record]) -> None:
    """Plot output tokens per second in the panel `output`, and requests in flight in the panel
    `flight`, each over time, in 60 intervals of equal length."""
    steps = 60
    width = (max((record.end for record in records), default=0.0) or 1.0) / steps
    rates, flying = [0.0] * steps, [0] * steps
    for record in records:
        share = record.output_tokens / len(record.marks) if record.marks else 0.0
        for mark in record.marks:
            rates[min(int(mark / width), steps - 1)] += share / width
        first, last = (min(int(moment / width), steps - 1) for moment in (record.sent, record.end))
        for place in range(first, last + 1):
            flying[place] += 1
    times = [(place + 0.5) * width for place in range(steps)]
    for panel, values, title in ((output, rates, "Output tokens per second"), (flight, flying, "Requests in flight")):
        panel.set_title(title)
        panel.set_xlabel("s")
        panel.fill_between(times, values, color=ACCENT, alpha=0.14)
        panel.plot(times, values, color=ACCENT, linewidth=1.4)
        panel.set_ylim(bottom=0)


def _beside(panel: Any, records: Sequence[Record]) -> None:
    """Plot the gaps between pieces of text of chats over time, shaded while a long prompt waited
    for its first token."""
    panel.set_title("Between pieces of text, while long prompts are awaited (shaded) and while none is")
    panel.set_xlabel("s")
    panel.set_ylabel("ms")
    for start, end in awaited(records):
        panel.axvspan(start, end, color=SECOND, alpha=0.16, linewidth=0)
    chats = [record for record in records if record.is_whole and not record.is_long]
    ends = [mark for record in chats for mark in record.marks[1:]]
    gaps = [max(gap * 1000, TOGETHER_MS) for record in chats for gap in record.gaps]
    panel.plot(ends, gaps, "o", color=ACCENT, markersize=2, alpha=0.5)
    if gaps:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")


def _calm(panel: Any) -> None:
    for side in panel.spines.values():
        side.set_color(LINE)
    panel.tick_params(colors=INK, labelsize=8)
    panel.title.set_fontsize(10)
    panel.grid(True, color=LINE, linewidth=0.6)
    panel.set_axisbelow(True)

"""The results of a benchmark as `rich` tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from sglcore.bench.figures import LATENCIES, Figures, Spread
from sglcore.bench.long_prompt_effect import Beside


def totals_table(found: Figures) -> Table:
    """Return a table of totals and rates: requests, tokens, the duration, and, only if there are
    any, cached tokens, draft tokens and goodput."""
    table = Table("", "total", "per second", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row("requests", f"{found.whole} of {found.requests}", f"{found.requests_per_s:.2f}")
    table.add_row("input tokens", f"{found.input_tokens:,}", f"{found.input_per_s:,.1f}")
    if found.cached_tokens:
        table.add_row("  from the prefix cache", f"{found.cached_tokens:,}", "")
    table.add_row("output tokens", f"{found.output_tokens:,}", f"{found.output_per_s:,.1f}")
    if found.acceptance_length is not None:
        table.add_row("  draft tokens", f"{found.proposed_tokens:,}", "")
        right = (
            f"{found.accepted_tokens / found.proposed_tokens:.0%} of them, {found.acceptance_length:.2f} tokens a step"
        )
        table.add_row(f"  accepted ({right})", f"{found.accepted_tokens:,}", "")
    if found.goodput is not None:
        goals = ", ".join(f"{name} at most {limit:g} ms" for name, limit in found.goals.items())
        table.add_row(f"goodput ({goals})", "", f"{found.goodput:.2f}")
    table.add_row("seconds", f"{found.seconds:.2f}", "")
    return table


def latency_table(found: Figures) -> Table:
    """Return a table of latencies in milliseconds (mean, percentiles and maximum), one row for each
    latency that has values, and one for the lag of late requests."""
    names = ("mean", "p50", "p90", "p99", "max")
    table = Table("ms", *names, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, spread in found.latency.items():
        table.add_row(f"{name.upper()} ({LATENCIES[name]})", *_cells(spread))
    if found.lag is not None:
        table.add_row("lag (sent later than due)", *_cells(found.lag))
    return table


def beside_table(found: Beside) -> Table:
    """Return a table of the gaps between pieces of text, in milliseconds, while no long prompt
    waited for its first token and while one did, with their ratio; "-" where there is no value."""
    names = ("mean", "p50", "p90", "p99", "max")
    table = Table("ms between pieces", *names, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, spread in (("no long prompt awaited", found.quiet), ("a long prompt awaited", found.during)):
        table.add_row(label, *(("-",) * len(names) if spread is None else _cells(spread)))
    ratios = {name: found.ratio(name) for name in names}
    table.add_row("times as long", *("-" if value is None else f"{value:.2f}" for value in ratios.values()))
    if found.first is not None:
        table.add_row(f"first token of {found.prompts} long prompts", *_cells(found.first))
    return table


def _cells(spread: Spread) -> tuple[str, ...]:
    return tuple(f"{value:.2f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))

"""Formats the results as a page of text: measurements with their bounds. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]
SHOWN = 12
"""How many kernels of a step are shown; the result file has all."""


def table(content: Mapping[str, Any]) -> str:
    """Format the most important figures of every part that ran, then what did not run and why."""
    parts: Mapping[str, Entry] = content["parts"]
    lines = [_head(content)]
    for name, entry in parts.items():
        form = next((form for start, form in FORMS.items() if name.startswith(start)), None)
        if form is not None and entry["rows"]:
            lines += ["", f"{name}:", *form(entry["rows"])]
    lines += ["", *_verdicts(parts)]
    return "\n".join(lines)


def _head(content: Mapping[str, Any]) -> str:
    about = next((entry["about"] for entry in content["parts"].values() if "about" in entry), {})
    device = f"{about.get('device', 'no device')} ({about.get('package', 'no package')})"
    made = content["machine"]
    figures = "dry run: NO FIGURES; " if content["dry"] else ""
    return f"{figures}{device}, torch {made['torch']}, commit {made['commit']}, {content['date']}"


def _bounds(rows: Sequence[Entry]) -> Iterator[str]:
    for row in rows:
        scale, unit = {"bytes/s": (1e12, "TB/s"), "flop/s": (1e12, "TFLOP/s")}.get(row["unit"], (1, row["unit"]))
        value = None if row["value"] is None else row["value"] / scale
        yield f"  {row['bound']:<30} {_number(value):>8} {unit}"


def _laws(rows: Sequence[Entry]) -> Iterator[str]:
    verdicts = [row["verdict"] for row in rows]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
    yield f"  {counts}"


def _products(rows: Sequence[Entry]) -> Iterator[str]:
    """Yield a line for each product: the share of the bound that its fastest function reaches."""
    sizes = sorted({row["rows"] for row in rows})
    yield f"  {'share of the bound; rows':<28}" + "".join(f"{size:>10}" for size in sizes)
    for model, name in dict.fromkeys((row["model"], row["product"]) for row in rows):
        cells = []
        for size in sizes:
            case = [row for row in rows if (row["model"], row["product"], row["rows"]) == (model, name, size)]
            best = min(case, key=lambda row: row["us"] or float("inf"), default=None)
            mark = "" if best is None or best["function"] == "torch" else "*"
            cells.append(f"{_number(None if best is None else best['share']) + mark:>10}")
        yield f"  {f'{model} {name}':<28}" + "".join(cells)
    if any(row["function"] != "torch" for row in rows):
        yield "  * by the kernel table's own function"


def _attention(rows: Sequence[Entry]) -> Iterator[str]:
    yield f"  {'case':<32} {'backend':<18} {'us':>10} {'of bound':>9}"
    for row in sorted(rows, key=lambda row: (row["mode"], row["case"])):
        yield (
            f"  {row['mode'] + ' ' + row['case']:<32} {row['backend']:<18} "
            f"{_number(row['us']):>10} {_number(row['share']):>9}"
        )


def _engine(rows: Sequence[Entry]) -> Iterator[str]:
    yield f"  {'':<14} {'size':>6} {'us':>12} {'tokens/s':>10} {'of bound':>9}"
    for row in rows:
        figures = (_number(row["us"]), _number(row["tokens_a_second"]), _number(row["share"]))
        yield f"  {row['what']:<14} {row['size']:>6} {figures[0]:>12} {figures[1]:>10} {figures[2]:>9}"


def _profile(rows: Sequence[Entry]) -> Iterator[str]:
    for batch in dict.fromkeys(row["batch"] for row in rows):
        case = [row for row in rows if row["batch"] == batch]
        total, count = _sum(row["us"] for row in case), sum(row["count"] for row in case)
        yield f"  batch {batch}: {count:.0f} kernels a step, {_number(total)} us"
        for row in case[:SHOWN]:
            whose = "/".join(row["entries"]) or "-"
            yield (
                f"    {_number(row['us']):>9} us {row['count']:>7.1f} x {_number(row['share']):>6}  "
                f"{whose:<28} {row['name'][:60]}"
            )


def _peer(rows: Sequence[Entry]) -> Iterator[str]:
    for row in rows:
        alike = f", first tokens alike: {row['first_tokens_alike']}" if row["first_tokens_alike"] else ""
        speed = f"{_number(row['us'])} us a step, {_number(row['tokens_a_second'])} tokens/s"
        yield f"  batch {row['batch']:>4}: {speed} (transformers, {row['compiled']}){alike}"


def _verdicts(parts: Mapping[str, Entry]) -> Iterator[str]:
    for name, entry in parts.items():
        if entry["verdict"] != "passed":
            yield f"{name} {entry['verdict']}: {entry['reason']}"
        for each in entry["skipped"]:
            yield f"{name} skipped {each['what']}: {each['why']}"
    seconds = ", ".join(f"{name} {entry.get('seconds', 0):.0f}" for name, entry in parts.items())
    yield f"seconds: {seconds}"


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else sum(found)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _number(value: float | None) -> str:
    """Format with three significant digits; a dash if nothing was measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


FORMS: Mapping[str, Callable[[Sequence[Entry]], Iterator[str]]] = {
    "bounds": _bounds,
    "laws": _laws,
    "products": _products,
    "attention": _attention,
    "engine": _engine,
    "profile": _profile,
    "peer": _peer,
}
"""Formatters of a part's rows, by the beginning of the part's name."""

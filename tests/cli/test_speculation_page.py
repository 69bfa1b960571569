"""docs/speculation.md shows the recorded acceptance, the measured latency, and the actual kinds and
errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglcore.cli.__main__ import main
from sglcore.config.engine_config import EngineConfig
from sglcore.config.settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
TITLES = {"eagle3": "EAGLE-3", "mtp": "MTP layer", "mtp-layers": "MTP layers, four", "dflash": "DFlash"}
SHOWN_COST, SHOWN_BATCH = 0.1, 8


def rows_below(heading: str) -> list[list[str]]:
    """Return the cells of the table with this heading line, without the heading."""
    lines = PAGE.splitlines()
    start = lines.index(heading) + 2
    table = lines[start : next(at for at in range(start, len(lines)) if not lines[at].startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def recorded() -> Iterator[list[str]]:
    """Yield the acceptance recorded for the embedded model, by head and by number of draft
    tokens."""
    found = json.loads((ROOT / "sglcore" / "assets" / "demo" / "acceptance.json").read_text())
    for kind, temperatures in found["heads"].items():
        greedy, drawn = temperatures["0.0"], temperatures["1.0"]
        yield [TITLES[kind], str(found["drafts"]), f"{greedy['tau']:.2f}", f"{drawn['tau']:.2f}"]
        for drafts, longer in greedy.get("longer", {}).items():
            yield [TITLES[kind], drafts, f"{longer['tau']:.2f}", f"{drawn['longer'][drafts]['tau']:.2f}"]


def measured() -> Iterator[list[str]]:
    """Yield the benchmark's results for the batch size and cost that the page shows."""
    found = json.loads((ROOT / "benchmarks" / "results" / "speculative_latency.json").read_text())
    for row in found["rows"]:
        if (row["c"], row["batch"]) == (SHOWN_COST, SHOWN_BATCH):
            figures = (f"{row['tau']:.2f}", f"{row['step_ms']:.0f}", f"{row['token_ms']:.1f}", f"{row['speed_up']:.2f}")
            yield [TITLES[row["draft"]], str(row["k"]), *figures]


def test_the_page_has_the_recorded_acceptance() -> None:
    assert rows_below("| head | draft tokens | greedy | temperature 1 |") == list(recorded())


def test_the_page_has_what_trees_bring() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "draft_trees.json").read_text())
    assert rows_below("| head | draft | greedy | temperature 1 |") == [
        [TITLES[kind], name, f"{own['0.0']:.2f}", f"{own['1.0']:.2f}"]
        for kind, shapes in found["tokens_of_a_step"].items()
        for name, own in shapes.items()
    ]
    costs = rows_below("| | build the trees (us) | find the accepted paths (us) |")
    taken = [[f"{each['build']:.0f}", f"{each['walk']:.0f}"] for each in found["microseconds"].values()]
    assert sorted(row[1:] for row in costs) == sorted(taken)


def by_forwards() -> Iterator[list[str]]:
    """Yield for each number of draft forwards the chain, the tree width that did best at
    temperature 1, and the highest result of any tree."""
    found = json.loads((ROOT / "benchmarks" / "results" / "draft_trees.json").read_text())
    for kind, by_depth in found["by_forwards_of_the_draft"].items():
        for depth, shapes in by_depth.items():
            chain = shapes["chain"]
            trees = {name: own for name, own in shapes.items() if name.endswith(" beams") and name[0].isdigit()}
            best = max(trees, key=lambda name: trees[name]["1.0"])
            most = max(own["1.0"] for own in shapes.values())
            shown = (chain["0.0"], trees[best]["0.0"], chain["1.0"], trees[best]["1.0"])
            figures = [f"{each:.2f}" for each in shown]
            gained = f"+{trees[best]['1.0'] - chain['1.0']:.2f}"
            yield [TITLES[kind], depth, best.split()[0], *figures, gained, f"{most:.2f}"]


def test_the_page_has_what_trees_bring_by_forwards_of_the_draft() -> None:
    heading = "| head | forward passes | beams | chain, greedy | tree, greedy | chain, sampled | tree, sampled | gain | maximum |"
    assert rows_below(heading) == list(by_forwards())


def test_the_page_has_the_measured_latency() -> None:
    heading = "| head | draft tokens | tokens per step | ms per step | ms per token | speed-up |"
    assert rows_below(heading) == list(measured())


def test_drawn_acceptance_is_the_same_whatever_was_cached() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "speculative_acceptance.json").read_text())
    for views in found["figures"].values():
        assert max(point["at"] for point in views["cached"]) > 0.9
        assert len({point["tau"] for point in views["cached"]}) == 1


def test_the_page_has_every_kind() -> None:
    named = [
        row[0].strip("`")
        for row in rows_below("| `--speculative` | input from the target | forward passes for k draft tokens | file |")
    ]
    assert set(settings_of(EngineConfig)["speculative"].choices) - {"auto", "off"} <= set(named)


REFUSED = rows_below("| requested | error |")


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[words.strip("`") for words, _ in REFUSED])
def test_what_the_page_says_is_refused_is(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("explain", *shlex.split(words.strip("`")))) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and len(error.splitlines()) == 1

"""`sglcore advise` prints what docs/multi-node.md shows, and the same as JSON."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from sglcore.cli.__main__ import main
from sglcore.engine.layouts.cluster import Cluster, read_cluster
from sglcore.engine.layouts.layout_advice import Load, advise_folder
from sglcore.engine.layouts.link_costs import Link
from sglcore.worker.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("advise", "benchmarks/clusters/dense-70b", "--cluster", "benchmarks/clusters/one-host.toml")


def shown() -> list[tuple[str, str]]:
    """Return each command of the document and the output shown below it."""
    text = (ROOT / "docs" / "multi-node.md").read_text(encoding="utf-8")
    found = re.findall(r"^    \$ sglcore (advise .*)\n((?:    .*\n|\n(?=    ))*)", text, re.MULTILINE)
    return [(words, re.sub(r"^    ", "", below, flags=re.MULTILINE)) for words, below in found]


def test_the_document_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    cases = shown()
    assert len(cases) == 3
    for words, below in cases:
        assert main(shlex.split(words)) == 0
        assert capsys.readouterr().out == below, f"docs/multi-node.md shows something else below: sglcore {words}"


def first(model: str, cluster: Cluster, load: Load) -> list[tuple[Topology, int, int]]:
    """Return the topologies in their order, with microseconds per step (rounded to 10) and tokens
    per second."""
    found = advise_folder(ROOT / "benchmarks" / "clusters" / model, cluster, load)
    return [(each.topology, int(round(each.step.total * 1e6, -1)), round(each.rate)) for each in found]


def test_what_the_document_says_beside_its_tables_is_so() -> None:
    text = (ROOT / "docs" / "multi-node.md").read_text(encoding="utf-8")
    one, two, sockets = (
        read_cluster(ROOT / "benchmarks" / "clusters" / f"{name}.toml")
        for name in ("one-host", "two-hosts", "two-sockets")
    )
    few = first("dense-70b", one, Load(1, 2048, 512))
    assert [(form.tp, us) for form, us, _ in few[:2]] == [(8, 7360), (4, 12540)]
    assert first("dense-70b", one, Load(256, 6000, 2000))[0][0] == Topology(8)
    per_expert = first("experts-671b", replace(two, is_copy_per_rank=False), Load(1024, 2048, 512))
    assert per_expert[0][::2] == (Topology(16, 16), 10_363)
    assert (Topology(16, 16, 16), 8448) in [each[::2] for each in per_expert]
    slow = replace(sockets, links=replace(sockets.links, inside=Link(300e-6, 1 / 1.1e9)))
    assert [each[::2] for each in first("dense-8b", slow, Load(16, 512, 256))][::2] == [
        (Topology(), 304),
        (Topology(2), 212),
    ]
    found = advise_folder(ROOT / "benchmarks" / "clusters" / "experts-671b", two, Load(1024, 2048, 512))
    assert {each.cache_tokens for each in found if each.topology in (Topology(16), Topology(16, 16))} == {
        412_391,
        3_567_888,
    }
    for figure in ("412,391", "7.36 ms", "12.54", "10,363", "8,448", "304 tokens", "212"):
        assert figure in text


def test_the_document_gives_the_files_constants() -> None:
    """Every number of the clusters' files is in the table of the document."""
    text = (ROOT / "docs" / "multi-node.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[1:]
        for cells in (re.split(r" *\| *", line.strip("| \n")) for line in text.splitlines() if line.startswith("| `["))
    }
    for place, name in enumerate(("one-host", "two-hosts", "two-sockets")):
        file = (ROOT / "benchmarks" / "clusters" / f"{name}.toml").read_text(encoding="utf-8")
        table, said = "", {}
        for line in file.splitlines():
            table = line.strip("[]") if line.startswith("[") else table
            if " = " in line and not line.startswith("#"):
                key, value = line.split(" = ")
                said[f"`[{table}]` `{key}`"] = value.strip('"')
        assert said == {key: cells[place] for key, cells in rows.items() if cells[place] != "-"}


def test_json_has_every_form_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*WORDS, "--json"]) == 0
    forms = json.loads(capsys.readouterr().out)["forms"]
    assert forms[0]["command"].startswith("sglcore serve benchmarks/clusters/dense-70b --tp ")
    assert all(each["most"] in each["step"] and each["copies"] * each["topology"]["tp"] == 8 for each in forms)
    assert len(forms) > 6


def test_what_is_no_load_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*WORDS, "--requests", "0"]) == 2
    assert "requests is 0" in capsys.readouterr().err

"""A made-up fifth device: a package in a folder of its own, on a simulated machine of its own, and no line of the core."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conformance.site import Site

ROOT = Path(__file__).resolve().parents[2]
FIFTH = Path(__file__).with_name("fifth")
PACKAGE = FIFTH / "acme"
ON_MACHINE = ("-p", "acme_machine", "--hardware", "simulated")
GENERATE = """
import acme_machine
from sglcore import LLM, SamplingParams
with LLM(device="acme", kv_cache_memory="8M") as llm:
    output, = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0.0))
    kind = llm.engine.worker.runner.attn_backend.token_to_kv_pool.kv(0)[0].device
    print(kind, [row.effective for row in llm.ledger.rows if row.topic in ("device", "graph", "attention")])
    print(repr(output.outputs[0].text))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"), (FIFTH, ROOT / "simulator"))
    return made.with_package("acme", PACKAGE)


def test_it_holds_every_law_on_its_simulated_machine(site: Site) -> None:
    ran = site.sglcore("conform", "acme", "--json", *ON_MACHINE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout)
    assert (result["verdict"], result["hardware"]) == ("passed", "simulated")
    assert {law["verdict"] for law in result["laws"]} == {"passed"}
    assert {law["level"] for law in result["laws"]} == {"C0", "C1", "C2", "C3", "C4"}
    replays = [law["law"] for law in result["laws"] if law["law"].startswith("replay_is_eager")]
    assert {name.partition("[")[2].partition("/")[0] for name in replays} == {"full", "breakable"}


def test_the_laws_catch_its_broken_kinds(site: Site) -> None:
    laws = ("replay_is_eager", "attention_is_reference", "padding_is_inert", "overlap_is_sequential")
    laws += ("replay_reads_buffers", "replays_keep_order", "errors_leave_graphs_usable")
    words = [word for law in laws for word in ("--law", law)]
    ran = site.sglcore("conform", "acme", "--mutants", *words, *ON_MACHINE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout


def test_it_generates_text_by_its_own_graphs(site: Site) -> None:
    ran = site.run("-c", GENERATE)
    assert ran.returncode == 0, ran.stderr
    where, text = ran.stdout.strip().splitlines()[-2:]
    assert where == "acme:0 ['acme', 'gathered', 'full']" and len(text) > 10


def test_its_machine_shows_its_four_facts(site: Site) -> None:
    ran = site.run(
        "-c", "import acme_machine; from sglcore.cli.__main__ import main; main(['devices', 'acme', '--json'])"
    )
    (device,) = json.loads(ran.stdout)["devices"]
    assert device["is_chosen"] and all(fact["holds"] for fact in device["facts"].values()), device


def test_it_is_small_and_imports_the_seam_and_the_runtime_only() -> None:
    files = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(len(file.read_text().splitlines()) for file in files) < 300
    text = "".join(file.read_text() for file in files if file.suffix == ".py")
    assert set(re.findall(r"from sglcore\.(\w+)", text)) == {"device", "runtime"}


def test_the_core_does_not_know_it() -> None:
    core = (file.read_text(encoding="utf-8") for file in (ROOT / "sglcore").rglob("*.py"))
    assert not [text for text in core if re.search(r"\bsglcore_acme\b|device == .acme", text)]

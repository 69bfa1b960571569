"""Two invented devices: the output of `sglcore new-device` with a few changed files, each on a
simulated machine that its package brings. One uses torch with Triton; the other differs from the
usual wherever a device may. Neither the core nor the simulator knows them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from difflib import ndiff
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ci.selection import Selection
from tests.conformance.site import Site

ROOT = Path(__file__).resolve().parents[2]
TRIALS = Path(__file__).with_name("trials")
COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType({"acme": ("--torch", "torch_acme"), "quirk": ()})
MOST_LINES = 160
QUICK = ("--level", "C1")
"""Leaves out the laws that take minutes in Triton's interpreter; the lanes of the simulated devices
run those, and a whole run runs them here too."""
SIMULATED = pytest.mark.skipif(
    find_spec("sglcore_sim") is None, reason="needs the simulator, which takes no torch this old"
)
GENERATE = """
from sglcore.cli.__main__ import main
from sglcore import LLM, SamplingParams
with LLM(device="acme", kv_cache_memory="8M", kernels="reference", attention_backend="gathered") as llm:
    output, = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0.0))
    kind = llm.engine.worker.runner.attn_backend.token_to_kv_pool.kv(0)[0].device
    print(kind, [row.effective for row in llm.ledger.rows if row.topic in ("device", "graph", "attention")])
    print(repr(output.outputs[0].text))
main(["devices", "acme", "--json"])
"""


def make(name: str, folder: Path) -> Site:
    """Install the package of a trial: the output of `new-device` with the trial's files over it."""
    package = folder / name
    ran = Site(folder).sglcore("new-device", name, "--path", str(package), *COMMANDS[name])
    assert ran.returncode == 0, ran.stderr
    shutil.copytree(package, folder / "written")
    shutil.copytree(TRIALS / name, package, dirs_exist_ok=True)
    site = Site(folder).with_package(name, package)
    order = site.run("-c", f"from sglcore_{name}.bring_up import BRING_UP; print(BRING_UP.text(), end='')")
    (package / f"sglcore_{name}" / "bring_up.txt").write_text(order.stdout)
    return site


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make("acme", tmp_path_factory.mktemp("acme"))


@pytest.fixture(scope="module")
def quirk(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make("quirk", tmp_path_factory.mktemp("quirk"))


def conform(site: Site, name: str, *words: str) -> dict[str, Any]:
    """Return the result of the kit on the simulated machine of a trial."""
    ran = site.sglcore("conform", name, "--json", "--hardware", "simulated", *words, "--", f"--sim={name}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


@SIMULATED
def test_a_device_of_torch_with_triton_holds_every_law(acme: Site, selection: Selection) -> None:
    result = conform(acme, "acme", *(() if selection.takes_all else QUICK))
    assert (result["verdict"], result["hardware"]) == ("passed", "simulated")
    assert {law["verdict"] for law in result["laws"]} == {"passed"}
    names = [law["law"] for law in result["laws"]]
    kinds = {name.partition("[")[2].partition("/")[0] for name in names if name.startswith("replay_is_eager")}
    is_whole = selection.takes_all
    assert kinds == ({"full", "breakable", "piecewise"} if is_whole else set())
    assert any(name.startswith("attention_is_reference[triton") for name in names) == is_whole


@SIMULATED
def test_an_unusual_device_holds_every_law(quirk: Site) -> None:
    result = conform(quirk, "quirk")
    assert (result["verdict"], result["hardware"]) == ("passed", "simulated")
    passed = {law["law"] for law in result["laws"] if law["verdict"] == "passed"}
    assert {"integers_are_narrow", "lengths_are_on_the_host"} <= passed


@SIMULATED
def test_it_generates_text_by_its_own_graphs_and_shows_its_four_facts(acme: Site) -> None:
    ran = acme.run("-m", "sglcore_sim", "acme", sys.executable, "-c", GENERATE)
    assert ran.returncode == 0, ran.stderr
    where, text, *listed = ran.stdout[ran.stdout.index("acme:0") :].splitlines()
    assert where == "acme:0 ['acme', 'gathered', 'full']" and len(text) > 10
    (device,) = json.loads("\n".join(listed))["devices"]
    assert device["is_chosen"] and all(fact["holds"] for fact in device["facts"].values()), device


def test_the_guide_shows_what_the_trial_has() -> None:
    guide, package = (ROOT / "docs/add-a-device.md").read_text(), TRIALS / "acme"
    assert f"```python\n{(package / 'sglcore_acme/simulated.py').read_text()}```" in guide
    shown = [line.strip() for line in guide.splitlines() if re.match(" +(return Capability|acme = )", line)]
    own = (package / "sglcore_acme/capability.py").read_text() + (package / "pyproject.toml").read_text()
    assert len(shown) == 2 and all(line in own for line in shown)


@pytest.mark.parametrize("name", COMMANDS)
def test_few_lines_of_it_are_its_own(name: str, request: pytest.FixtureRequest) -> None:
    written = request.getfixturevalue(name).path / "written"
    own: list[str] = []
    for file in sorted(path for path in (TRIALS / name).rglob("*") if path.suffix in (".py", ".toml")):
        before = written / file.relative_to(TRIALS / name)
        old = before.read_text().splitlines() if before.is_file() else []
        own += [line for line in ndiff(old, file.read_text().splitlines()) if line.startswith("+ ")]
    assert 20 < len(own) <= MOST_LINES, len(own)


def test_they_import_the_seam_and_the_runtime_only_and_the_core_does_not_know_them() -> None:
    text = "".join(file.read_text() for file in TRIALS.rglob("*.py"))
    assert set(re.findall(r"from sglcore\.(\w+)", text)) == {"core", "device", "runtime"}
    core = (
        file.read_text(encoding="utf-8") for part in ("sglcore", "simulator") for file in (ROOT / part).rglob("*.py")
    )
    assert not [text for text in core if re.search(r"\bsglcore_(acme|quirk)\b|device == .(acme|quirk)", text)]

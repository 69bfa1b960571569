"""A frozen package of contract number 3 works in a core of number 4: a vendor's wheel outlives the
core it was written for.

The core of number 4 is a copy of this one with a sample of what a raise may change (raised.py).
Laws C0 to C2 run in it on the package's simulated machine. No file of the package is edited,
because a released wheel is not edited either.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sglcore.conformance.catalogue import laws_up_to
from sglcore.device.package import resolve
from tests.conformance.site import Site
from tests.device import raised

FROZEN = Path(__file__).with_name("api3")
FILES = "d01d9fb4e2a2ca4d2ca9dc27139a5f5db888f12d9d86c1ef745e83d370ac7631"
"""SHA-256 of every file of the package except simulated.py, which uses the simulator's interface,
and that has no number. A package edited along with the core would prove nothing. A new contract
number gets a new folder."""
PARTS = 8
"""Tests that share the laws; each law is in one of them."""
DISCOVER = """
from sglcore.device.discovery import discover
for item in discover():
    print(item.name, item.package.api if item.package else item.error)
"""
OTHERS = {"two": 2, "five": 5}
POINT = "[sglcore.devices]\n{name} = nowhere:package [api-{number}]\n"


def install(folder: Path, *edits: raised.Edit) -> Site:
    """Install the frozen package with a copy of the core of number 4, changed by further edits."""
    raised.copy_core(folder)
    raised.edit(folder, *raised.RAISE, *edits)
    return Site(folder).with_package("third", shutil.copytree(FROZEN, folder / "package"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return install(tmp_path_factory.mktemp("raised"))


@pytest.fixture(scope="module")
def written(site: Site) -> Site:
    """Also write the bring-up text again, as a vendor does for a core with more steps."""
    order = site.run("-c", "from sglcore_third.bring_up import BRING_UP; print(BRING_UP.text(), end='')")
    assert order.returncode == 0, order.stderr
    (site.path / "package" / "sglcore_third" / "bring_up.txt").write_text(order.stdout)
    return site


def conform(site: Site, *words: str) -> dict[str, Any]:
    """Return the result of the kit in the core of number 4."""
    ran = site.sglcore("conform", "third", "--json", "--hardware", "simulated", *words, "--", "--sim=third")
    assert ran.stdout.startswith("{"), ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def _is_cache(file: Path) -> bool:
    """Whether a file was left by tools and does not belong to the package."""
    return any(part == "__pycache__" or part.startswith(".") for part in file.relative_to(FROZEN).parts)


def test_no_file_of_it_was_edited() -> None:
    files = sorted(file for file in FROZEN.rglob("*") if file.is_file() and not _is_cache(file))
    digest = hashlib.sha256()
    for file in files:
        if file.name != "simulated.py":
            digest.update(f"{file.relative_to(FROZEN).as_posix()}\0{file.read_text(encoding='utf-8')}\0".encode())
    assert digest.hexdigest() == FILES, f"{FROZEN} is frozen: {__doc__}"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FROZEN))
    yield import_module("sglcore_third").package
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglcore_third"]:
        del sys.modules[name]


def test_todays_core_has_all_that_it_imports(package: Any) -> None:
    assert package.written_for is None
    for ref in package.refs():
        assert callable(resolve(ref, package.name)) or ref == package.bring_up
    assert resolve(package.kernels["own"])().replaced.keys() == {"rms_norm", "silu_and_mul", "rotary_and_store"}


@pytest.mark.parametrize("defect", [(), raised.WITHOUT_ADAPTER, raised.WITHOUT_WRAPPERS])
def test_the_sample_of_changes_is_one_of_todays_core(defect: tuple[raised.Edit, ...]) -> None:
    for name, text in raised.edited(raised.ROOT / "sglcore", *raised.RAISE, *defect).items():
        compile(text, name, "exec")


@pytest.mark.parametrize("part", range(PARTS))
def test_it_holds_the_laws_up_to_c2_under_the_next_number(written: Site, part: int) -> None:
    laws = [law.name for law in laws_up_to("C2")][part::PARTS]
    result = conform(written, "--level", "C2", *(word for name in laws for word in ("--law", name)))
    assert (result["verdict"], result.get("not_run", [])) == ("passed", []), result
    assert {law["verdict"] for law in result["laws"]} == {"passed"}


def test_its_triton_kernels_and_attention_serve_under_the_next_number(site: Site) -> None:
    settings = ("--set", "kernels=triton", "--set", "attention_backend=triton")
    result = conform(site, "--level", "C1", "--law", "tiny", *settings)
    assert result["verdict"] == "passed", result


def test_of_other_numbers_both_are_named_and_every_package_of_today_is_taken(site: Site) -> None:
    for name, number in OTHERS.items():
        info = site.path / f"sglcore_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglcore-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(POINT.format(name=name, number=number))
    ran = site.run("-c", DISCOVER)
    assert ran.returncode == 0, ran.stderr
    said = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    for name, number in OTHERS.items():
        assert f"was written for API {number}; wanted API 3 or 4" in said.pop(name)
    assert said.pop("third") == "4" and "cpu" in said and set(said.values()) == {"4"}


def test_without_its_adapter_it_is_not_taken(tmp_path: Path) -> None:
    said = install(tmp_path, *raised.WITHOUT_ADAPTER).run("-c", DISCOVER).stdout
    assert "third DevicePackage.__init__() got an unexpected keyword argument 'summary'" in said


def test_an_adapter_that_wraps_nothing_is_caught_by_the_kit(tmp_path: Path) -> None:
    site = install(tmp_path, *raised.WITHOUT_WRAPPERS)
    result = conform(site, "--level", "C0", "--law", "api_holds")
    assert result["verdict"] == "failed" and "cannot be called with 1 arguments" in json.dumps(result)

"""`sglcore new-device` writes a package that passes C0 at once, and the kit treats it as any
other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglcore.conformance.catalogue import laws_up_to
from sglcore.conformance.device_template import write_package
from sglcore.core.errors import ConfigError
from tests.conformance.site import Site

GAP = """
[[gap]]
law = "{law}"
reason = "planted"
link = "https://example.org/1"
expiry = {expiry}
"""
FEW = ("--law", "order_checks", "--law", "order_is_written_down")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    ran = Site(folder).sglcore("new-device", "acme", "--path", str(folder / "acme"))
    assert ran.returncode == 0, ran.stderr
    assert "The package passes C0" in ran.stdout and "probe.py" in ran.stdout
    yield Site(folder).with_package("acme", folder / "acme")


def test_it_passes_c0_as_it_is(site: Site) -> None:
    ran = site.sglcore("conform", "acme", "--level", "C0", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout)
    assert result["verdict"] == "passed" and result["device"] == "acme"
    assert {law["verdict"] for law in result["laws"]} == {"passed"}
    assert len(result["laws"]) == len(laws_up_to("C0"))


def test_a_run_that_leaves_cases_out_is_incomplete_and_names_them(site: Site) -> None:
    ran = site.sglcore("conform", "acme", "--level", "C0", *FEW, "--json", "--", "-k", "not order_checks")
    result = json.loads(ran.stdout)
    assert (result["verdict"], result["not_run"]) == ("incomplete", ["order_checks"])


def test_processes_side_by_side_make_one_result(site: Site) -> None:
    ran = site.sglcore("conform", "acme", "--level", "C0", "--json", "--", "-n", "2")
    result = json.loads(ran.stdout)
    assert result["verdict"] == "passed", ran.stdout + ran.stderr
    assert len(result["laws"]) == len(laws_up_to("C0")) == len({law["law"] for law in result["laws"]})


def test_its_own_test_file_runs_the_kit_and_skips_what_needs_the_device(site: Site) -> None:
    words = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", "gaps or order_checks or tiny")
    ran = site.run(*words, str(site.path / "acme" / "tests"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout and "acme is not usable here: hardware: no /dev/acme*" in ran.stdout


def test_to_name_a_device_that_is_not_there_is_an_error(site: Site) -> None:
    ran = site.sglcore("conform", "acme", "--level", "C1", "--law", "tiny")
    assert ran.returncode == 1
    assert "acme is not usable here: hardware: no /dev/acme*" in ran.stdout


@pytest.mark.parametrize(
    ("law", "expiry", "message"),
    [
        ("order_checks", "2999-01-01", "order_checks holds, but has a gap"),
        ("no_such_law", "2999-01-01", "the gap 'no_such_law' matches no law"),
        ("tiny", "2020-01-01", "the gap 'tiny' expired on 2020-01-01"),
    ],
)
def test_a_gap_that_passes_matches_nothing_or_has_expired_fails_the_run(
    site: Site, law: str, expiry: str, message: str
) -> None:
    gaps = site.path / "acme" / "sglcore_acme" / "gaps.toml"
    gaps.write_text(GAP.format(law=law, expiry=expiry))
    try:
        ran = site.sglcore("conform", "acme", "--level", "C0", "--law", "order_checks", "--json")
    finally:
        gaps.write_text("")
    assert ran.returncode == 1
    result = json.loads(ran.stdout)
    assert result["verdict"] == "failed" and message in " ".join(result["problems"]), result


def test_a_law_with_a_gap_may_fail(site: Site) -> None:
    folder = site.path / "acme" / "sglcore_acme"
    gaps, order = folder / "gaps.toml", folder / "bring_up.txt"
    text = order.read_text()
    gaps.write_text(GAP.format(law="order_is_written_down", expiry="2999-01-01"))
    order.write_text("another order\n")
    try:
        ran = site.sglcore("conform", "acme", "--level", "C0", *FEW, "--json")
    finally:
        gaps.write_text("")
        order.write_text(text)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["verdict"] == "gaps"
    assert [law["law"] for law in result["laws"] if law["verdict"] == "gap"] == ["order_is_written_down"]


@pytest.mark.parametrize("module", ["torch_acme", "torch.acme"])
def test_a_package_for_a_device_of_torch_passes_c0_without_it(module: str, tmp_path: Path) -> None:
    write_package("acme", tmp_path / "acme", module)
    torch_site = Site(tmp_path).with_package("acme", tmp_path / "acme")
    # Both templates import the same modules, so the import test runs for one of them; references
    # are resolved for both.
    chosen = ("-k", "not imports_touch_no_device") if "." in module else ()
    ran = torch_site.run("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *chosen, "acme/tests")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    own = len(laws_up_to("C0")) + 2 - bool(chosen)  # the laws, a gaps test and a launches test
    assert f"{own} passed" in ran.stdout and "acme is not usable here: hardware: no /dev/acme*" in ran.stdout


@pytest.mark.parametrize("module", ["numpy", "torch", "torch.", "torch.Acme", "torch_a.b", "", "torch-acme"])
def test_a_module_that_is_no_device_of_torch_is_refused(module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a device module of torch.*torch.TYPE.*torch_TYPE"):
        write_package("acme", tmp_path / "new", module)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["Acme", "a-b", "1st", "class", "", "a.b", "../up"])
def test_a_name_that_can_not_be_a_modules_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot name a device"):
        write_package(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        write_package("acme", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]

"""The installer reads a checkout without installed packages, and prints what it would do and
why."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.tools.planted_checkout import LABELLED, PLAIN, ROOT, Plan, checkout, commands, dry_run, offer, plan, seen
from tools.installer.needs import InstallError

EDIT = "--no-build-isolation -e "


def test_the_host_and_present_accelerators_are_installed_after_the_pinned_torch(tmp_path: Path) -> None:
    checkout(tmp_path, "host", is_host=True)
    checkout(tmp_path, "here")
    checkout(tmp_path, "absent", hardware=False)
    ran = dry_run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert commands(ran) == ["torch==1.2.3", "setuptools>=77", f"{EDIT}.", f"{EDIT}devices/here -e devices/host"]
    assert "absent: planted: not on this machine" in ran.stdout
    assert "torch 1.2.3: the plain build, about 1 MB to download: here was seen\n" in ran.stdout


def test_a_probe_that_raises_stops_the_installation_with_its_traceback(tmp_path: Path) -> None:
    checkout(tmp_path, "host", is_host=True)
    checkout(tmp_path, "one", body="raise RuntimeError('the node is locked')")
    ran = dry_run(tmp_path)
    assert ran.returncode == 1
    assert "RuntimeError: the node is locked" in ran.stderr
    assert commands(ran) == []


def test_an_extra_and_an_index_for_torch_are_passed_on(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True)
    first, _, *last = plan(tmp_path, [host], "--extra", "docs", "--torch-index", "https://example.org/whl").commands
    assert first == "--index-url https://example.org/whl torch==1.2.3"
    assert last == [f"{EDIT}.[docs]", f"{EDIT}devices/host"]


def test_an_extra_is_taken_from_the_packages_that_declare_it_too(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one")]
    declared = found[1].folder / "pyproject.toml"
    declared.write_text('[project.optional-dependencies]\ntest = ["an-oracle"]\n' + declared.read_text())
    assert plan(tmp_path, found, "--extra", "test").commands[-1] == f"{EDIT}devices/host -e devices/one[test]"
    assert plan(tmp_path, found).commands[-1] == f"{EDIT}devices/host -e devices/one"


def test_a_seen_accelerator_decides_on_the_build_and_the_version(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one", torch=LABELLED)]
    made = plan(tmp_path, found, ask=offer)
    assert made.commands[0] == "--extra-index-url http://127.0.0.1:9/whl torch==1.1.0+one9"
    line = "torch 1.1.0+one9: the build for one, about 1 MB to download from http://127.0.0.1:9/whl: one was seen"
    assert made.choice.why == line
    assert (tmp_path / "build/constraints-torch-1.1.0.txt").read_text() == "# pins\ntorch==1.1.0\nnumpy==2\n"


def test_a_named_device_is_installed_as_if_it_were_there_and_others_are_not(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "here")]
    found.append(seen(tmp_path, "absent", hardware=False, torch=LABELLED))
    made = plan(tmp_path, found, "--device", "absent", ask=offer)
    assert (made.commands[0].split()[-1], made.choice.why[-16:]) == ("torch==1.1.0+absent9", "absent was named")
    assert made.commands[-1] == f"{EDIT}devices/host -e devices/absent"


def test_the_variable_that_chooses_a_device_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [seen(tmp_path, "host", is_host=True), seen(tmp_path, "one"), seen(tmp_path, "two", torch=LABELLED)]
    monkeypatch.setenv("SGLCORE_DEVICE", "two:1")
    assert plan(tmp_path, found, ask=offer).commands[-1] == f"{EDIT}devices/host -e devices/two"
    monkeypatch.setenv("SGLCORE_DEVICE", "unknown")
    monkeypatch.delenv("SGLCORE_DEVICE")
    with pytest.raises(InstallError, match="one, two; one can be served"):
        plan(tmp_path, found, ask=offer)


def test_two_accelerators_with_different_builds_are_refused_until_one_is_named(tmp_path: Path) -> None:
    found = [seen(tmp_path, "host", is_host=True)]
    found += [seen(tmp_path, name, torch=LABELLED) for name in ("one", "two")]
    with pytest.raises(InstallError) as caught:
        plan(tmp_path, found, ask=offer)
    assert str(caught.value) == (
        "found accelerators that need different builds of torch: one, two; one can be served: choose it by --device NAME"
        ' (make demo INSTALL="--device one"), or take none by --processor'
    )
    made = plan(tmp_path, found, "--processor")
    assert made.commands[0] == "torch==1.2.3"
    assert made.choice.why == "torch 1.2.3: the plain build, about 1 MB to download: --processor was given"


def test_another_version_must_be_one_that_the_packages_support(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True)
    with pytest.raises(InstallError) as caught:
        plan(tmp_path, [host], "--torch", "9.9.9")
    assert str(caught.value) == "torch 9.9.9 is not among those that host support: 1.2.3, 1.1.0; name one by --torch"
    assert plan(tmp_path, [host], "--torch", "1.1.0").commands[0] == "torch==1.1.0"


def test_an_unknown_device_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True)
    with pytest.raises(InstallError, match="there is no device x; name by --device one of host"):
        plan(tmp_path, [host], "--device", "x")


@pytest.mark.parametrize(
    ("words", "has"), [((), True), (("--without-simulator",), False), (("--torch", "1.1.0"), False)]
)
def test_the_simulator_comes_with_everything_where_it_allows_the_torch(
    tmp_path: Path, words: tuple[str, ...], has: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    host = seen(tmp_path, "host", is_host=True)
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator/pyproject.toml").write_text('[project]\ndependencies = ["torch>=1.2,<1.3"]\n')
    assert ("-e simulator" in plan(tmp_path, [host], "--all", *words).commands[-1]) == has
    said = capsys.readouterr().out
    assert (said == "the simulator is left out: it does not allow torch 1.1.0\n") == ("--torch" in words)
    assert ("this torch has an accelerator's runtime" in said) == has


@pytest.mark.parametrize(("extra", "triton", "count"), [("test", "false", 1), ("test", "true", 0), ("", "false", 0)])
def test_tests_get_a_triton_where_torch_brings_none(tmp_path: Path, extra: str, triton: str, count: int) -> None:
    host = seen(tmp_path, "host", is_host=True, torch=PLAIN.replace("{triton}", triton))
    made: Plan = plan(tmp_path, [host], "--extra", extra)
    assert made.commands[: 1 + count] == ["torch==1.2.3", "triton==4.5.6"][: 1 + count]
    assert made.commands.count("triton==4.5.6") == count


def test_a_table_with_an_unknown_word_is_refused(tmp_path: Path) -> None:
    host = seen(tmp_path, "host", is_host=True, torch=PLAIN.replace("versions", "version"))
    with pytest.raises(InstallError, match=r"unknown version; it has versions, builds, beside, vendor, note"):
        plan(tmp_path, [host])


def test_this_checkout_installs_the_processor_with_the_pinned_torch() -> None:
    ran = dry_run(ROOT)
    assert ran.returncode == 0, ran.stderr
    assert commands(ran)[0].split()[-1].startswith("torch==2.13.0")
    assert "devices/cpu" in commands(ran)[-1]


def test_this_checkouts_tests_get_every_package_and_what_their_oracles_need() -> None:
    ran = dry_run(ROOT, "--extra", "test", "--all", "--processor")
    words = commands(ran)[-1].split()
    folders = {path.parent.name for path in (ROOT / "devices").glob("*/pyproject.toml")}
    assert {word.partition("[")[0] for word in words if word.startswith("devices/")} == {
        f"devices/{x}" for x in folders
    }
    assert "devices/mlx[test]" in words and "simulator[test]" in words


def test_nothing_of_the_product_pins_triton() -> None:
    for path in (ROOT / "pyproject.toml", *ROOT.glob("devices/*/pyproject.toml"), ROOT / "simulator/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        every = [text for texts in (project.get("dependencies", ()), *extras) for text in texts]
        assert not [text for text in every if text.startswith("triton") and "==" in text], path
    assert "triton" not in {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}

"""Every distribution contains exactly the files that git tracks, and the same bytes for the same
commit. Its wheel works away from the checkout and without a compiler.

torch and the other dependencies are those of the tests, linked into the environment; `python -m
tools.wheels try` fetches them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.wheels import building, checking, trial
from tools.wheels.distributions import ROOT, Distribution, ReleaseError, distributions

SMALL = "sglcore-xpu"
KEPT = ROOT / "build" / "release" / "tested"
NOTES = "sglcore_xpu/notes.txt"


def contents() -> str:
    """Return a digest of the contents of all distributions, and of the code that builds them."""
    total = hashlib.sha256()
    for name in sorted(
        checking.git_files(ROOT, "sglcore", "devices", "simulator", "tools/wheels", "pyproject.toml", "README.md")
    ):
        if "/tests/" not in name:
            total.update(name.encode() + (ROOT / name).read_bytes())
    return total.hexdigest()[:16]


@pytest.fixture(scope="module")
def dist() -> Path:
    """All distributions, built once for each state of the checkout by the first process."""
    KEPT.mkdir(parents=True, exist_ok=True)
    folder = KEPT / contents()
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in KEPT.glob("*/"):
                shutil.rmtree(old)
            building.build(KEPT / "building", say=lambda _: None)
            (KEPT / "building").rename(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of one small package."""
    folder = tmp_path_factory.mktemp("small")
    return next(path for path in building.build(folder, [SMALL], say=lambda _: None) if path.suffix == ".whl")


def of(name: str) -> Distribution:
    """Return a distribution by its name."""
    return next(each for each in distributions() if each.name == name)


def test_nothing_is_wrong_with_any_distribution(dist: Path) -> None:
    assert checking.problems(dist) == []
    native = [path.name for path in dist.glob("sglcore_cpu-*.whl")]
    assert len(native) == 2 and sum("manylinux" in name for name in native) == 1
    assert len([*dist.iterdir()]) == 2 * len(distributions()) + 1


def test_wheels_away_from_the_checkout_generate_serve_prove_a_device_and_begin_one(dist: Path, tmp_path: Path) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    linked = trial.links(packages, tmp_path / "linked")
    names = [each.name for each in distributions()]
    place = trial.install(dist, tmp_path / "trial", sys.executable, names, linked=linked)
    told = place.run(
        "where", str(place.programs / "python"), "-c", "import sglcore, sglcore_cpu; print(sglcore, sglcore_cpu)"
    )
    assert told.count(str(place.folder)) == 2 and str(ROOT) not in told
    trial.use(place)
    (plain,) = dist.glob("sglcore_cpu-*-any.whl")
    pip = (
        str(place.programs / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--force-reinstall",
    )
    place.run("plain", *pip, str(plain))
    told = place.sglcore("torch's kernels", "generate", "--prompt", trial.PROMPT, "--max-tokens", "2")
    said = " ".join(told.split())
    assert (
        "kernels torch: the native kernels are not compiled: there is no C++ compiler 'no-compiler-here' here;" in said
    )
    assert trial.PROMPT in told and "Traceback" not in told


FULL = "x" * 100
PAGE = f"<title>sglcore</title><style>{FULL}</style><script>{FULL}</script>"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<title>another</title>", "found 0 styles and 0 scripts in the page: <title>another"),
        (PAGE.replace("script", "b"), "found 1 styles and 0 scripts"),
        (PAGE.replace("style", "b"), "found 0 styles and 1 scripts"),
        (PAGE.replace(f"<style>{FULL}", "<style>"), "a style or a script of the page is empty"),
        (PAGE + '<script src="page.js"></script>', "a style or a script of the page is empty"),
    ],
)
def test_a_page_without_its_parts_is_found(page: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_get", lambda url: page if url.endswith("/") else "")
    with pytest.raises(ReleaseError, match=said):
        trial.fetch_page("http://host")


@pytest.mark.parametrize(
    ("told", "said"),
    [("nothing\n", "found no text"), (f"{trial.PROMPT}, there\n   kernels   torch\n", "wanted native kernels")],
)
def test_a_text_of_other_kernels_or_none_is_found(
    told: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial.Place, "sglcore", lambda *_: told)
    with pytest.raises(ReleaseError, match=said):
        trial.generate(trial.Place(tmp_path, {}))


@pytest.mark.parametrize("name", [SMALL, "sglcore-sim"])
def test_the_same_commit_gives_the_same_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {path.name: path.read_bytes() for path in building.build(tmp_path / "first", [name], say=lambda _: None)}
    time.sleep(2)  # archives round times to 2 seconds
    before = os.umask(0o077)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    try:
        second = {
            path.name: path.read_bytes() for path in building.build(tmp_path / "second", [name], say=lambda _: None)
        }
    finally:
        os.umask(before)
    assert len(first) == 2 and first == second


def repacked(
    wheel: Path, folder: Path, change: Callable[[str, bytes], bytes | None], name: str = "", more: str = ""
) -> Path:
    """Return a copy with each file changed by `change` (None: left out), and with one additional
    file, if given. RECORD stays unchanged."""
    target = folder / (name or wheel.name)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            content = change(entry, old.read(entry))
            if content is not None:
                new.writestr(entry, content)
        if more:
            new.writestr(more, b"\x7fELF" + bytes(14) + b"\x3e\x00")
    return target


def without(part: str) -> Callable[[str, bytes], bytes | None]:
    """Leave out the files with names that end so."""
    return lambda name, content: None if name.endswith(part) else content


def other(old: bytes, new: bytes) -> Callable[[str, bytes], bytes | None]:
    """Replace some bytes wherever they occur."""
    return lambda name, content: content.replace(old, new)


DEFECTS = {
    "package data is left out": (without("bring_up.txt"), "", "", "sglcore_xpu/bring_up.txt is missing"),
    "a test is in it": (other(b"", b""), "", "tests/test_x.py", "tests/test_x.py is stray"),
    "a note lies about": (other(b"", b""), "", NOTES, f"{NOTES} is stray"),
    "a file was changed": (other(b"Intel", b"Other"), "", "", "differs from RECORD"),
    "a listed file is gone": (without("facts.py"), "", "", "RECORD lists sglcore_xpu/facts.py, which is missing"),
    "no licence": (without("LICENSE"), "", "", "the text of the licence is missing"),
    "another licence": (
        other(b"License-Expression: Apache-2.0", b"License-Expression: MIT"),
        "",
        "",
        "License-Expression is 'MIT'",
    ),
    "a library where none belongs": (other(b"", b""), "", "sglcore_xpu/x.so", "binaries are sglcore_xpu/x.so"),
    "a name for one Python": (other(b"", b""), "sglcore_xpu-0.1.0-cp311-cp311-linux_x86_64.whl", "", "for any Python"),
    "a machine without its library": (
        other(b"", b""),
        "sglcore_xpu-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
        "",
        "binaries are missing",
    ),
    "a library of another machine": (
        other(b"", b""),
        "sglcore_xpu-0.1.0-py3-none-manylinux_2_28_aarch64.whl",
        checking.LIBRARY,
        "is for the machine 62, wanted 183",
    ),
}


def test_every_defect_of_a_wheel_is_found(small: Path, tmp_path: Path) -> None:
    assert checking.wheel_problems(small, of(SMALL)) == []
    for change, name, more, wanted in DEFECTS.values():
        found = checking.wheel_problems(repacked(small, tmp_path, change, name, more), of(SMALL))
        assert any(wanted in problem for problem in found), (wanted, found)


def test_a_wheel_that_is_too_large_or_not_there_is_found(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "OTHERS", 0.001)
    assert any("MB, at most 0.001" in problem for problem in checking.wheel_problems(small, of(SMALL)))
    assert checking.problems(tmp_path, [SMALL])[0].startswith("sglcore-xpu 0.1.0: found no wheel in ")


def test_a_source_distribution_without_a_source_is_found(small: Path, tmp_path: Path) -> None:
    (whole,) = small.parent.glob("*.tar.gz")
    assert checking.source_problems(whole, of(SMALL)) == []
    folder = tmp_path / "unpacked"
    shutil.unpack_archive(whole, folder, filter="data")
    (inside,) = folder.iterdir()
    (inside / "sglcore_xpu" / "gaps.toml").unlink()
    (inside / "tests").mkdir()
    (inside / "tests" / "test_x.py").write_text("")
    broken = Path(shutil.make_archive(str(tmp_path / "broken"), "gztar", folder, inside.name))
    found = checking.source_problems(broken, of(SMALL))
    assert "sglcore_xpu/gaps.toml is missing" in found and any("tests" in each and "stray" in each for each in found)


def test_a_file_that_git_does_not_know_is_in_no_wheel(tmp_path: Path) -> None:
    """Uses a checkout that holds only this package."""
    root = tmp_path / "checkout"
    source = root / "devices" / "xpu"
    for name in checking.git_files(
        ROOT, "LICENSE", "devices/xpu/pyproject.toml", "devices/xpu/README.md", "devices/xpu/sglcore_xpu"
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    git = ("git", "-c", "user.name=x", "-c", "user.email=x")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        subprocess.run((*git, *words), cwd=root, check=True)
    (source / NOTES).write_text("mine")
    (source / "sglcore_xpu" / "scratch.py").write_text("")
    made = building._copied(Distribution(source, of(SMALL).declared), root, tmp_path / "tree")
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert {"LICENSE", "pyproject.toml", "sglcore_xpu/gaps.toml"} <= names
    assert not names & {NOTES, "sglcore_xpu/scratch.py"}


def test_what_can_not_be_built_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReleaseError, match="found no distribution sglcore-tpu; wanted some of sglcore, sglcore-sim, "):
        building.build(tmp_path / "out", ["sglcore-tpu"])
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    with pytest.raises(ReleaseError, match="wheels are built from the files that git tracks: .*; build in a clone"):
        building._epoch(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseError, match="git cannot be run"):
        building._epoch(tmp_path)

"""An installation without compiled kernels compiles them at its first start, prints one line, and
uses torch's kernels if it can not compile."""

from __future__ import annotations

import errno
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from devices.cpu.tests.native.libraries import tiny_sources
from sglcore_cpu.choice import choose_kernels, load_library
from sglcore_cpu.compile import source_digest
from sglcore_cpu.first_start import OBJECTS, find_library
from sglcore_cpu.kernels.table import is_native
from sglcore_cpu.native import NativeUnavailable

FAKE = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
  *-o*/level) printf '#!/bin/sh\\nexit 6\\n' > "{level}"; chmod +x "{level}"; for last; do :; done; cp "{level}" "$last";;
  *" -E "*) echo "$*";;
  *{broken}*) echo "cloudy.cpp:1: error: no memory" >&2; exit 1;;
  *" -c "*) for last; do :; done; echo object > "$last";;
  *-shared*) sleep 0.05; touch "{linked}"; while [ $# -gt 0 ]; do [ "$1" = -o ] && echo no library > "$2"; shift; done;;
esac
"""
"""A fake compiler: it compiles nothing but writes the requested output files."""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources of a library without kernels."""
    return tiny_sources(tmp_path / "sources")


def fake(folder: Path, broken: str = "nothing-is-broken") -> str:
    """Write a fake compiler that fails for files named `broken`, and return its path. The file
    `log` next to it gets one line per call."""
    program = folder / "fake-compiler"
    names = {name: folder / name for name in ("log", "level", "linked")}
    program.write_text(FAKE.format(broken=broken, **names))
    program.chmod(0o755)
    return str(program)


def count(folder: Path, word: str) -> int:
    """Count the calls of the fake compiler that contain a word."""
    return sum(word in line for line in (folder / "log").read_text().splitlines())


def test_the_first_start_compiles_and_says_so_and_the_second_does_neither(
    sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = find_library(tmp_path / "none.so", tmp_path, None, sources)
    assert library.path.parent == tmp_path / f"{source_digest(sources)}-{platform.machine()}"
    mine = load_library().usable()
    assert set(library.levels) == {mine[0], mine[-1]}
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "this installation has no compiled kernels; compiling them for" in said[0]
    assert not (library.path.parent / OBJECTS).exists()
    assert find_library(tmp_path / "none.so", tmp_path, "no-such-compiler", sources).path == library.path
    assert capfd.readouterr().err == ""


def test_a_library_beside_the_package_needs_no_compiler(tmp_path: Path) -> None:
    assert find_library(cache=tmp_path, compiler="no-such-compiler").path == load_library().path
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_torchs_kernels_serve_and_one_line_says_what_is_missing(tmp_path: Path) -> None:
    table, row = choose_kernels(
        "auto", 1, load=lambda: find_library(tmp_path / "none.so", tmp_path, "no-such-compiler")
    )
    assert not is_native(table) and row.downgrade
    assert row.reason == (
        "the native kernels are not compiled: there is no C++ compiler 'no-such-compiler' here; "
        "install one (g++, or CXX=PATH), and the next start compiles them"
    )


def test_a_folder_that_can_not_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(NativeUnavailable, match=r"cannot be stored: .*Not a directory.*file.*; set XDG_CACHE_HOME"):
        find_library(tmp_path / "none.so", tmp_path / "file", "no-such-compiler")


def test_a_disk_without_room_is_told_with_the_remedy(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sglcore_cpu.compile._objects", refuse)
    with pytest.raises(
        NativeUnavailable, match=r"not compiled: .*No space left on device; free some space, or set XDG_CACHE_HOME"
    ):
        find_library(tmp_path / "none.so", tmp_path / "cache", fake(tmp_path, "nothing"), sources)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(NativeUnavailable, match=r"cannot be stored: .*No space left on device; set XDG_CACHE_HOME"):
        find_library(tmp_path / "none.so", tmp_path / "other", fake(tmp_path, "nothing"), sources)


def test_a_start_after_one_that_failed_goes_on_from_where_it_was(sources: Path, tmp_path: Path) -> None:
    for broken in ("pool.cpp", "nothing"):
        compiler = fake(tmp_path, broken)
        with pytest.raises(NativeUnavailable) as caught:
            find_library(tmp_path / "none.so", tmp_path / "cache", compiler, sources)
        if broken != "nothing":
            assert re.search("not compiled: .*fake-compiler failed: cloudy.cpp:1: error: no memory$", str(caught.value))
    assert "cannot be loaded" in str(caught.value), "all was compiled, though by a compiler that makes no libraries"
    assert [count(tmp_path, f"-c {sources / name}") for name in ("api.cpp", "pool.cpp")] == [1, 2]


def test_of_two_processes_that_start_together_one_compiles(sources: Path, tmp_path: Path) -> None:
    compiler = fake(tmp_path)

    def start(_: int) -> str:
        with pytest.raises(NativeUnavailable) as caught:
            find_library(tmp_path / "none.so", tmp_path / "cache", compiler, sources)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(start, range(2)))
    assert all("cannot be loaded" in text for text in texts)
    assert count(tmp_path, "-shared") == 1

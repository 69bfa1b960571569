"""The build of the native library: its choice of instruction sets, its cache, and its error
messages."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from devices.cpu.tests.native.libraries import OBJECTS, PROBE, loaded, tiny_sources
from sglcore_cpu import compile
from sglcore_cpu.choice import load_library
from sglcore_cpu.compile import (
    ALL,
    HERE,
    NONE,
    PROCESSOR,
    SETTING,
    SOURCES,
    X86,
    BuildError,
    Variant,
    as_asked,
    build,
    main,
    registry_text,
    source_digest,
    topics,
)
from sglcore_cpu.native import Library, NativeUnavailable

ALONE = Variant(topics=("probe",), names=("avx2", "neon"))
HEADERS = ("isa_avx512.h", "isa_avx2.h", "isa_neon.h")
FUNCTION = re.compile(
    r"^(?:SGL_INLINE (?:f32x16|i32x16|line|void|float) |SGL_TWICE\(|SGL_EACH\(\w+, )(\w+)", re.MULTILINE
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the sources that every library has, and the topic `probe`."""
    folder = tmp_path / "sources"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns(*topics()))
    shutil.copytree(PROBE, folder / PROBE.name)
    return folder


def test_a_library_is_built_from_any_copy_and_knows_it(sources: Path, tmp_path: Path) -> None:
    library = loaded(build(tmp_path / "library.so", ALONE, OBJECTS, sources))
    assert set(library.levels) == {one.name for one in ALONE.instruction_sets}
    assert not library.emulates
    kernels = library.engine(library.usable()[0], 1).kernels
    assert set(kernels) == {"probe_lanes", "probe_pool", "probe_defect"}
    assert kernels["probe_defect"].names == ("out", "kind")


def test_a_library_older_than_its_sources_is_refused(sources: Path, tmp_path: Path) -> None:
    library = build(tmp_path / "library.so", ALONE, OBJECTS, sources)
    (sources / "probe" / "more.h").write_text("// a change\n")
    with pytest.raises(
        NativeUnavailable, match="built from sources that differ from the installed ones; build it with"
    ):
        Library(library, sources)


def test_compiled_files_are_kept_by_their_content(sources: Path, tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    build(tmp_path / "library.so", ALONE, objects, sources)
    first = {path.name: path.stat().st_mtime_ns for path in objects.iterdir()}
    moved = shutil.copytree(sources, tmp_path / "moved")
    (moved / "probe" / "lanes.cpp").write_text((moved / "probe" / "lanes.cpp").read_text() + "\nstatic_assert(true);\n")
    build(tmp_path / "other.so", ALONE, objects, moved)
    second = {path.name: path.stat().st_mtime_ns for path in objects.iterdir()}
    assert first.items() <= second.items()
    assert len(second) == len(first) + 3, "the changed file, the registry, which names the sources, and the library"


def test_a_broken_source_says_where_and_what(sources: Path, tmp_path: Path) -> None:
    (sources / "probe" / "broken.cpp").write_text("int f() { return unknown_name; }\n")
    with pytest.raises(BuildError, match=r"failed: .*broken.cpp:1:\d+: error: .*unknown_name"):
        build(tmp_path / "library.so", ALONE, OBJECTS, sources)
    assert not (tmp_path / "library.so").exists()


def test_a_topic_without_kernels_is_an_error(sources: Path, tmp_path: Path) -> None:
    (sources / "empty").mkdir()
    (sources / "empty" / "empty.cpp").write_text("int unused;\n")
    with pytest.raises(BuildError, match="no file of .*empty offers kernels; wanted SGL_KERNELS"):
        build(tmp_path / "library.so", Variant(topics=("probe", "empty"), names=ALONE.names), OBJECTS, sources)


def test_a_library_of_the_same_sources_is_not_built_twice(tmp_path: Path) -> None:
    objects, sources = tmp_path / "objects", tiny_sources(tmp_path / "sources")
    tiny = Variant(names=ALONE.names)
    build(tmp_path / "early.so", tiny, objects, sources)
    for path in objects.glob("*.o"):
        path.unlink()
    build(tmp_path / "library.so", tiny, objects, sources)
    assert not [*objects.glob("*.o")] and loaded(tmp_path / "library.so").levels
    build(tmp_path / "other.so", replace(tiny, emulate=True), objects, sources)
    assert [*objects.glob("*.o")], "another variant is another library"


def test_what_this_processor_needs_is_the_lowest_and_its_highest() -> None:
    mine = load_library().usable()
    assert set(as_asked(Variant(), HERE).names) == {mine[0], mine[-1]}
    assert as_asked(Variant(), ALL).instruction_sets == Variant().instruction_sets
    assert as_asked(Variant(), f"{mine[0]}, {mine[-1]}").names == (mine[0], mine[-1])
    with pytest.raises(BuildError, match="found SGLCORE_CPU_BUILD=everything; wanted here, all, none, or some of "):
        as_asked(Variant(), "everything")


def test_on_a_processor_without_any_nothing_is_compiled_in_vain(tmp_path: Path) -> None:
    sources = shutil.copytree(SOURCES, tmp_path / "sources", ignore=shutil.ignore_patterns(*topics()))
    (sources / PROCESSOR).write_text('#include "processor.h"\nint sgl::processor_level() { return 0; }\n')
    with pytest.raises(
        BuildError, match="this processor has none of the instruction sets that kernels are written for: "
    ):
        as_asked(Variant(), HERE, sources)


def test_a_compiler_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "LONGEST_SECONDS", 0.05)
    (tmp_path / "cxx").write_text("#!/bin/sh\ncase $1 in --version) sleep 9;; esac\n")
    (tmp_path / "cxx").chmod(0o755)
    with pytest.raises(BuildError, match=r"cxx did not end within 0.05 seconds: .*cxx --version"):
        build(tmp_path / "library.so", Variant(str(tmp_path / "cxx")))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler 'no-such-compiler' here"):
        build(tmp_path / "library.so", Variant("no-such-compiler"))
    with pytest.raises(BuildError, match="there are no kernels for the machine 'riscv64'"):
        build(tmp_path / "library.so", Variant(machine="riscv64"))


def test_by_hand_a_failure_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "library.so"), "--compiler", "no-such-compiler"]) == 1
    assert capsys.readouterr().err == "there is no C++ compiler 'no-such-compiler' here\n"


def test_what_is_compiled_is_the_environments_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, NONE)
    assert main(["--out", str(tmp_path / "library.so"), "--compiler", "no-such-compiler"]) == 0
    assert main(["--out", str(tmp_path / "library.so"), "--sets", "sse9"]) == 1
    assert capsys.readouterr().err.startswith("found SGLCORE_CPU_BUILD=sse9; wanted here, all, none, or some of ")
    assert not [*tmp_path.iterdir()]


def test_a_changed_file_changes_the_digest(sources: Path) -> None:
    before = source_digest(sources)
    (sources / "probe" / "notes.txt").write_text("no source")
    assert source_digest(sources) == before
    (sources / "probe" / "probe.h").rename(sources / "probe" / "renamed.h")
    assert source_digest(sources) != before


def test_the_registry_lists_each_instruction_set_with_its_kernels(sources: Path) -> None:
    text = registry_text(Variant(machine="x86_64", topics=("probe",)), sources)
    for one in X86:
        assert f'{{"{one.name}", {one.level}, {one.name}_lists, 2}}' in text
        assert f"{one.name}_lists[] = {{&{one.name}::probe_lanes_kernels, &{one.name}::probe_pool_kernels}};" in text


def test_two_files_with_lists_of_one_name_are_an_error(sources: Path) -> None:
    (sources / "twin").mkdir()
    (sources / "twin" / "twin.cpp").write_text((sources / "probe" / "lanes.cpp").read_text())
    with pytest.raises(BuildError, match="two files .* name their list of kernels probe_lanes"):
        registry_text(Variant(topics=("probe", "twin")), sources)


def test_levels_ascend_and_every_set_has_its_header() -> None:
    assert [one.level for one in X86] == sorted({one.level for one in X86})
    plain = {one.name: one for one in Variant(machine="x86_64").instruction_sets}
    emulated = {one.name: one for one in Variant(machine="x86_64", emulate=True).instruction_sets}
    assert emulated["avx2"] == plain["avx2"] and "-mamx-tile" not in emulated["amx"].flags


def test_all_processors_have_the_same_lanes() -> None:
    offered = {name: set(FUNCTION.findall((SOURCES / name).read_text())) for name in HEADERS}
    assert len(offered[HEADERS[0]]) > 40
    for name in HEADERS[1:]:
        assert offered[name] == offered[HEADERS[0]], name

"""The choice of kernels, and its row in the ledger: native ones where they can run, else torch's
with the reason."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore_cpu.choice import choose_kernels, load_library
from sglcore_cpu.kernels.table import is_native
from sglcore_cpu.native import Library, NativeUnavailable


@dataclass
class Announced:
    """The real library, on a processor that announces the instruction sets `names` only; with
    `built`, a library that was built for those only."""

    names: tuple[str, ...]
    built: tuple[str, ...] = ()
    processor_level: int = 0

    @property
    def levels(self) -> dict[str, int]:
        return {
            name: level
            for name, level in load_library().levels.items()
            if name in (self.built or load_library().levels)
        }

    def usable(self) -> tuple[str, ...]:
        return self.names

    def engine(self, name: str, threads: int, cores: Sequence[Sequence[int]]) -> Any:
        return load_library().engine(name, threads, cores)


def test_the_highest_announced_instruction_set_serves() -> None:
    table, row = choose_kernels("auto", 1)
    assert is_native(table)
    assert row.effective == f"native, {load_library().usable()[-1]}"
    assert not row.downgrade and "torch's own for" in row.reason
    assert "group_limited_routing" in row.reason and "sparse_mqa" not in row.reason


def test_native_ones_asked_for_are_the_highest_or_none() -> None:
    assert choose_kernels("native", 1)[1].effective == choose_kernels("auto", 1)[1].effective
    with pytest.raises(ConfigError, match="kernels 'native' cannot serve: this processor has none"):
        choose_kernels("native", 1, load=lambda: Announced(()))  # pyright: ignore[reportArgumentType]


def test_one_can_be_asked_for_by_name() -> None:
    name = load_library().usable()[0]
    table, row = choose_kernels(name, 1)
    assert is_native(table)
    assert (row.requested, row.effective) == (name, f"native, {name}")


def test_what_the_processor_does_not_announce_is_refused_by_name() -> None:
    library = Announced(("avx2",))
    with pytest.raises(ConfigError, match="'amx', but this processor does not announce it.*one of avx2"):
        choose_kernels("amx", 1, load=lambda: library)  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one instruction set")
def test_a_library_without_the_processors_best_is_a_downgrade_with_the_remedy() -> None:
    library = Announced(("avx2",), built=("avx2",), processor_level=4)
    _, row = choose_kernels("auto", 1, load=lambda: library)  # pyright: ignore[reportArgumentType]
    assert row.effective == "native, avx2" and row.downgrade
    assert "the highest in the library, but this processor announces avx512_vnni;" in row.reason
    assert row.remedy == "python -m sglcore_cpu.compile --sets all"
    assert not choose_kernels("avx2", 1, load=lambda: library)[1].downgrade  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="'avx512', but the library was built without it.*--sets all"):
        choose_kernels("avx512", 1, load=lambda: library)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="'amx', but this processor does not announce it"):
        choose_kernels("amx", 1, load=lambda: library)  # pyright: ignore[reportArgumentType]


def test_a_processor_without_any_falls_back_to_torch_with_the_reason() -> None:
    library = Announced(())
    table, row = choose_kernels("auto", 1, load=lambda: library)  # pyright: ignore[reportArgumentType]
    assert not is_native(table)
    assert row.effective == "torch" and row.downgrade
    assert "none of the instruction sets" in row.reason


def test_a_library_that_was_not_built_gives_what_the_compiler_said(tmp_path: Path) -> None:
    (tmp_path / "lib.error").write_text("c++ failed: fatal error: out of ideas\n")

    def load() -> Library:
        return Library(tmp_path / "lib.so")

    table, row = choose_kernels("auto", 1, load=load)
    assert not is_native(table)
    assert "lib.so is not there; c++ failed: fatal error: out of ideas" in row.reason
    with pytest.raises(ConfigError, match="kernels 'avx2' cannot serve: lib.so is not there"):
        choose_kernels("avx2", 1, load=load)


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"no library")
    with pytest.raises(NativeUnavailable, match=r"lib.so cannot be loaded: .*python -m sglcore_cpu.compile"):
        Library(tmp_path / "lib.so")


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new.cpp").write_text("int x;")
    with pytest.raises(NativeUnavailable, match="built from sources that differ"):
        Library(load_library().path, tmp_path)

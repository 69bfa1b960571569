"""Kinds: every chip's machine satisfies the probe of its own package and no other; names select
chips, and an unknown name lists the known ones."""

from __future__ import annotations

import importlib
import shutil
from types import MappingProxyType

import pytest

from sglcore_sim.kinds import Kind, chips, kind_of, known
from sglcore_sim.machine import lay_out

EVERY = [chip for name in known() for chip in chips(name)]
NAMED = [f"{chip.name}:{chip.chip}" for chip in EVERY]


def report(name, root):
    system = pytest.importorskip("sglcore.device.system").System(root, MappingProxyType({}))
    return importlib.import_module(f"sglcore_{name}.probe").probe(False, system)


@pytest.mark.parametrize("name", NAMED)
def test_the_probe_of_a_kind_sees_its_machine_and_no_other_probe_does(name) -> None:
    root = lay_out(kind_of(name), 2)
    try:
        own = name.partition(":")[0]
        found = report(own, root)
        assert found.hardware.holds and found.driver.holds and found.runtime.holds, found
        for other in sorted(set(known()) - {own}):
            assert not report(other, root).hardware.holds, other
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("missing", ["dev", "sys", "usr", "opt"])
def test_a_machine_without_one_of_its_folders_does_not_satisfy_every_fact(missing) -> None:
    chip = next(
        chip
        for chip in EVERY
        if any(path.startswith(missing) for path in chip.files) and (missing != "opt" or chip.name == "hip")
    )
    if missing == "sys":
        chip = kind_of("hip")
    root = lay_out(chip, 1)
    try:
        shutil.rmtree(root / missing)
        found = report(chip.name, root)
        assert not (found.hardware.holds and found.driver.holds and found.runtime.holds)
    finally:
        shutil.rmtree(root)


def test_every_device_has_its_node() -> None:
    root = lay_out(kind_of("cuda"), 3)
    assert sorted(path.name for path in (root / "dev").glob("nvidia[0-9]")) == ["nvidia0", "nvidia1", "nvidia2"]
    assert len(list((root / "sys/bus/pci/devices").iterdir())) == 3


def test_names_find_chips_by_chip_and_by_target() -> None:
    assert kind_of("hip").arch == "gfx942"
    assert kind_of("hip", "MI355X") is kind_of("hip:gfx950")
    assert kind_of("hip:rx7900xtx").properties["warp_size"] == 32
    assert kind_of("npu", "910C").properties["cube_core_num"] == 24


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="wanted one of cuda, hip, musa, npu.*, or a Kind"):
        kind_of("tpu")
    with pytest.raises(ValueError, match=r"wanted one of H100 \(sm_90\)"):
        kind_of("cuda", "V100")


def test_a_made_up_device_is_a_record_of_its_own() -> None:
    made = Kind("acme", "acme", files={"dev/acme{i}": "", "usr/lib/libacme.so": ""})
    assert kind_of(made) is made
    root = lay_out(made, 2)
    assert (root / "dev/acme1").exists() and (root / "usr/lib/libacme.so").exists()


def test_no_chip_has_a_round_number_of_gigabytes_for_every_kind() -> None:
    odd = [chip for chip in EVERY if chip.properties["total_memory"] % (1 << 30)]
    assert {chip.name for chip in odd} >= {"cuda", "hip", "npu"}


def test_waves_are_as_wide_as_the_target_says() -> None:
    assert {chip.properties["warp_size"] for chip in chips("hip") if chip.arch.startswith("gfx9")} == {64}

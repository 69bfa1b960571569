"""Launch parameters follow the GPU's properties; a missing library is refused with a remedy, and
every fallback is in the ledger."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton.backends

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.attention.backend_selection import AttentionNeeds, select_attention
from sglcore.runtime.bring_up import kernels as kernels_step
from sglcore.runtime.kernels.compilers import triton_gap
from sglcore.runtime.kernels.triton import rounding
from sglcore_xpu import package
from sglcore_xpu.capability import Capability, read_capability
from sglcore_xpu.kernels import COMPILER, kernels, tuning

NEEDS = AttentionNeeds((64,), 16, "float16", frozenset({"capture"}))
CARD = Capability("B580", 20, 160, (16, 32), 1024, 128 << 10, True)
OLDER = Capability("A770", 32, 512, (8, 16, 32), 1024, 64 << 10, True)
GRAPHICS = Capability("UHD", 2, 32, (8, 16), 256, 32 << 10, False)


def warps(capability: Capability, entry: str) -> object:
    """Return the number of sub-groups per program of an entry."""
    made = tuning(capability)
    return made.options(getattr(made, entry))["num_warps"]


def test_products_run_in_the_sub_groups_of_the_matrix_engines_and_the_rest_in_wide_ones() -> None:
    assert [warps(CARD, name) for name in ("rms_norm", "decode", "extend")] == [8, 8, 8]
    assert [warps(OLDER, name) for name in ("rms_norm", "decode", "extend")] == [8, 16, 16]
    assert [warps(GRAPHICS, name) for name in ("rms_norm", "decode", "extend")] == [16, 8, 8]


def test_programs_tiles_and_registers_follow_the_figures_of_the_gpu() -> None:
    assert tuning(CARD).programs == 40 and tuning(OLDER).programs == 64
    assert tuning(GRAPHICS).tile_bytes == 8 << 10 < tuning(OLDER).tile_bytes
    assert tuning(CARD).options(tuning(CARD).extend)["grf_mode"] == "large"
    assert "grf_mode" not in tuning(CARD).options(tuning(CARD).rms_norm)
    assert max(tile.config.threads for tile in tuning(replace(GRAPHICS, most_threads=128)).moe) == 128


def test_the_current_gpu_is_described_for_the_ledger() -> None:
    found = read_capability()
    assert found.engines > found.cores > 0 and found.lanes == tuple(sorted(found.lanes))
    assert f"{found.cores} Xe cores" in str(found) and "matrix engines" in found.evidence
    assert f"{found.engines} vector engines" in found.evidence


def test_each_figure_is_the_drivers_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(
        name="card",
        gpu_subslice_count=3,
        gpu_eu_count=5,
        sub_group_sizes=[32, 16],
        max_work_group_size=7,
        local_mem_size=11,
        has_subgroup_matrix_multiply_accumulate=False,
    )
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: told)
    assert read_capability() == Capability("card", 3, 5, (16, 32), 7, 11, False)


def test_the_ledger_says_which_entries_are_replaced() -> None:
    ledger = DecisionLedger()
    table = kernels_step(EngineConfig(), package, ledger, torch.device("xpu:0"))
    assert "triton" in table.origin["rms_norm"] and "sglcore.runtime.kernels.triton" in ledger.rows[-1].reason


def test_without_triton_the_start_ends_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglcore.runtime.kernels.triton.rounding", None)
    with pytest.raises(DeviceError, match="pip install"):
        kernels()


def test_a_triton_that_compiles_for_others_is_refused_by_what_it_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(triton.backends, "backends", {"nvidia": object(), "amd": object()})
    with pytest.raises(DeviceError, match="compiles for amd, nvidia.*xpu index"):
        kernels()
    with pytest.raises(ConfigError, match="compiles for amd, nvidia"):
        select_attention(package.attention, NEEDS, "triton", "xpu", DecisionLedger())
    monkeypatch.setitem(triton.backends.backends, "intel", object())
    assert not triton_gap(COMPILER)


def test_an_encoder_gets_the_backend_that_serves_it() -> None:
    needs = AttentionNeeds((64,), 16, "float16", frozenset({"encoder"}))
    assert select_attention(package.attention, needs, None, "xpu", DecisionLedger()).__name__ == "GatheredAttention"

"""Launch parameters follow the GPU's properties; a missing library is refused with a remedy, and
every fallback is in the ledger."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.attention.backend_selection import AttentionNeeds, select_attention
from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.bring_up import kernels as kernels_step
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ
from sglcore_hip import package
from sglcore_hip.capability import Capability, read_capability
from sglcore_hip.kernels import kernels, tuning

NEEDS = AttentionNeeds((64,), 16, "float16", frozenset({"capture"}))
SERVER, DESKTOP = Capability("MI300X", "gfx942", 64, 304), Capability("RX 7900", "gfx1100", 32, 96)


def reimport() -> ModuleType:
    """Import the attention module anew."""
    sys.modules.pop("sglcore_hip.attention_aiter", None)
    return importlib.import_module("sglcore_hip.attention_aiter")


def test_waves_are_as_wide_as_the_gpu_says_and_programs_follow_its_compute_units() -> None:
    wide, narrow = tuning(SERVER), tuning(DESKTOP)
    assert (wide.lanes, narrow.lanes) == (64, 32)
    assert (wide.programs, narrow.programs) == (2 * 304, 2 * 96)
    assert wide.options(wide.decode)["num_warps"] == narrow.options(narrow.decode)["num_warps"] == 4


def test_the_current_gpu_is_described_for_the_ledger() -> None:
    found = read_capability()
    assert found.compute_units > 0 and found.wave_size in (32, 64) and found.target in str(found)


@pytest.mark.parametrize(
    ("generation", "converted", "stored"),
    [((9, 4), E4M3FNUZ, E4M3FNUZ), ((9, 5), E4M3FN, E4M3FN), ((9, 0), None, E4M3FN), ((11, 0), None, E4M3FN)],
)
def test_rows_have_the_floats_that_the_gpu_s_generation_converts(
    generation: tuple[int, int], converted: str | None, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.cuda.get_device_properties(0)
    found = SimpleNamespace(
        name="whatever",
        gcnArchName="gfx0",
        warp_size=own.warp_size,
        multi_processor_count=own.multi_processor_count,
        major=generation[0],
        minor=generation[1],
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert tuning(read_capability()).float8 == read_capability().float8 == converted and kernels().float8 == stored
    assert ("converts" in read_capability().evidence) == (converted is not None)


def test_the_ledger_says_which_entries_are_replaced() -> None:
    ledger = DecisionLedger()
    table = kernels_step(EngineConfig(), package, ledger, torch.device("cuda:0"))
    assert "triton" in table.origin["rms_norm"] and "sglcore.runtime.kernels.triton" in ledger.rows[-1].reason


def test_without_triton_the_start_ends_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglcore.runtime.kernels.triton", None)
    with pytest.raises(DeviceError, match="pip install"):
        kernels()


def test_aiter_that_is_missing_is_a_refused_candidate_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    sys.modules.pop("sglcore_hip.attention_aiter", None)
    ledger = DecisionLedger()
    assert select_attention(package.attention, NEEDS, None, "hip", ledger).__name__ == "TritonAttention"
    assert "aiter refused" in ledger.rows[-1].reason and "pip install amd-aiter" in ledger.rows[-1].reason
    with pytest.raises(ConfigError, match="pip install amd-aiter"):
        select_attention(package.attention, NEEDS, "aiter", "hip", DecisionLedger())


def test_aiter_is_refused_by_the_waves_of_the_gpu_and_not_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = reimport()
    pretender, unheard_of = Capability("MI300X", "gfx942", 32, 304), Capability("a later one", "gfx9999", 64, 512)
    monkeypatch.setattr(backend, "read_capability", lambda: pretender)
    assert "waves of 32" in backend.AiterAttention.unavailable()
    monkeypatch.setattr(backend, "read_capability", lambda: unheard_of)
    assert not backend.AiterAttention.unavailable()


def test_a_version_without_a_function_is_refused_by_that_function(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("aiter")
    old.paged_attention_v1 = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "aiter", old)
    with pytest.raises(Unavailable, match="no mha_batch_prefill_func"):
        reimport()


def test_a_version_whose_decode_takes_no_window_serves_models_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(out: Any, workspace_buffer: Any) -> None: ...

    old = ModuleType("aiter")
    old.paged_attention_v1, old.mha_batch_prefill_func = decode, decode  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "aiter", old)
    assert "sliding_window" not in reimport().AiterAttention.facts.features
    monkeypatch.undo()
    assert reimport()


def test_an_encoder_gets_the_backend_that_serves_it() -> None:
    needs = AttentionNeeds((64,), 16, "float16", frozenset({"encoder"}))
    assert select_attention(package.attention, needs, None, "hip", DecisionLedger()).__name__ == "GatheredAttention"

"""Launch parameters follow the GPU's properties; a missing library is refused with a remedy, and
every fallback is in the ledger."""

from __future__ import annotations

import sys

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, DeviceError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.attention.backend_selection import AttentionNeeds, select_attention
from sglcore.runtime.bring_up import kernels as kernels_step
from sglcore_cuda import package
from sglcore_cuda.capability import Capability, read_capability
from sglcore_cuda.kernels import kernels, tuning

NEEDS = AttentionNeeds((64,), 16, "float16", frozenset({"capture"}))
AMPERE, VOLTA = Capability("A100", (8, 0), 108), Capability("V100", (7, 0), 80)


def test_programs_follow_the_multiprocessors_and_loads_in_flight_the_capability() -> None:
    assert tuning(AMPERE).programs == 2 * 108 and tuning(VOLTA).programs == 2 * 80
    assert tuning(AMPERE).decode.stages > tuning(VOLTA).decode.stages == 1


def test_the_current_gpu_is_described_for_the_ledger() -> None:
    found = read_capability()
    assert found.multiprocessors > 0 and f"{found.version[0]}.{found.version[1]}" in str(found)


def test_the_ledger_says_which_entries_are_replaced() -> None:
    ledger = DecisionLedger()
    table = kernels_step(EngineConfig(), package, ledger, torch.device("cuda:0"))
    assert "triton" in table.origin["rms_norm"] and "sglcore.runtime.kernels.triton" in ledger.rows[-1].reason


def test_without_triton_the_start_ends_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglcore.runtime.kernels.triton", None)
    with pytest.raises(DeviceError, match="pip install triton"):
        kernels()


@pytest.mark.parametrize(
    ("library", "name", "remedy"),
    [("flashinfer", "flashinfer", "pip install"), ("flash_attn_interface", "flash_attention", "hopper")],
)
def test_a_library_that_is_missing_is_a_refused_candidate_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, library: str, name: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    sys.modules.pop(package.attention[name].partition(":")[0], None)
    ledger = DecisionLedger()
    chosen = select_attention(
        dict.fromkeys((name,), package.attention[name]) | {"triton": package.attention["triton"]},
        NEEDS,
        None,
        "cuda",
        ledger,
    )
    assert chosen.__name__ == "TritonAttention"
    assert f"{name} refused" in ledger.rows[-1].reason and remedy in ledger.rows[-1].reason
    with pytest.raises(ConfigError, match=remedy):
        select_attention(package.attention, NEEDS, name, "cuda", DecisionLedger())


def test_flash_attention_is_refused_by_the_capability_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"9\.0, this one has \(8, 0\)"):
        select_attention(package.attention, NEEDS, "flash_attention", "cuda", DecisionLedger())


def test_an_explicit_backend_that_does_not_fit_is_an_error_and_not_another_one() -> None:
    needs = AttentionNeeds((48,), 16, "float32", frozenset())
    with pytest.raises(ConfigError, match="flashinfer refused: heads of 48"):
        select_attention(package.attention, needs, "flashinfer", "cuda", DecisionLedger())


def test_an_encoder_gets_the_backend_that_serves_it() -> None:
    needs = AttentionNeeds((64,), 16, "float16", frozenset({"encoder"}))
    assert select_attention(package.attention, needs, None, "cuda", DecisionLedger()).__name__ == "GatheredAttention"

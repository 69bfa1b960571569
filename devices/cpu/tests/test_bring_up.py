"""The processor's bring-up: missing steps and a wrong order fail before any work; the choice of
kernels, threads and sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.target import GIVEN
from sglcore.core.errors import BringUpError, ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.device.package import resolve
from sglcore.runtime import bring_up
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory import memory_bring_up as memory
from sglcore.runtime.memory.pools import PER_HEAD, PoolKind
from sglcore.step.sizing import MemorySizes
from sglcore.worker.topology import Place, Topology
from sglcore_cpu import package
from sglcore_cpu.bring_up import BRING_UP, library_threads, processor_kernels, sums_of_ranks
from sglcore_cpu.facts import facts
from sglcore_cpu.kernels.kv_pool import INT8_POOL
from sglcore_cpu.native import Engine, NativeUnavailable


def test_the_standard_order_names_what_a_device_must_add() -> None:
    with pytest.raises(BringUpError, match="device_memory"):
        STANDARD.check(GIVEN)


def test_attention_before_hisparse_fails_on_a_laptop_naming_the_need() -> None:
    steps = list(BRING_UP.steps)
    hisparse = next(step for step in steps if step.provides == "hisparse")
    steps.remove(hisparse)
    steps.insert(next(i for i, step in enumerate(steps) if step.provides == "attention") + 1, hisparse)
    with pytest.raises(BringUpError, match="'attention' needs 'hisparse', which a later step provides"):
        BringUp(steps).check(GIVEN)


def model(is_encoder: bool = False) -> Any:
    """A model as bring-up sees it: one layer with two heads of 8, in float32."""
    return SimpleNamespace(
        config=SimpleNamespace(is_encoder=is_encoder, context_length=32),
        dtype=torch.float32,
        attention_layers=(Attention(0, 2, 2, 8, cached=not is_encoder),),
        state_layers=(),
        kernels=KernelTable(),
    )


@pytest.mark.parametrize(
    ("asked", "graph", "taken"),
    [
        ("torch", "off", "torch"),
        ("reference", "off", bring_up.REFERENCE),
        ("native", "compiled", "torch"),
        ("ipex", "compiled", "torch"),
    ],
)
def test_the_kernels_that_were_asked_for_serve_unless_a_compiler_wants_others(
    asked: str, graph: str, taken: str
) -> None:
    ledger, none = DecisionLedger(), cast("Any", None)
    processor_kernels(EngineConfig(kernels=asked, graph=graph), package, facts(0), none, ledger, none)
    (row,) = ledger.rows
    assert (row.requested, row.effective, row.downgrade) == (asked, taken, graph == "compiled")
    assert not row.downgrade or row.remedy == ("--graph native" if asked == "native" else "--graph off")


@pytest.mark.parametrize(
    ("calls_library", "table", "threads", "left"),
    [(True, "native", 4, 1), (True, "native", 1, 1), (False, "native", 4, 4), (True, "torch", 4, 4)],
)
def test_torchs_threads_do_not_contend_with_those_of_native_kernels(
    calls_library: bool, table: str, threads: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    kernels = resolve(package.kernels[table], package.name)()
    ledger, placed = DecisionLedger(), cast("Any", SimpleNamespace(threads=threads))
    made = cast("Any", SimpleNamespace(calls_library=calls_library))
    assert library_threads(made, kernels, placed, ledger) == left
    assert asked == ([1] if left != threads else [])
    assert [row.effective for row in ledger.rows] == ([] if left == threads else ["1"])


def test_kernels_that_are_none_list_those_that_are() -> None:
    none = cast("Any", None)
    with pytest.raises(ConfigError, match="kernels is 'sse'; wanted one of auto, native, torch, .*reference, avx2"):
        processor_kernels(EngineConfig(kernels="sse"), package, facts(0), none, none, none)


@pytest.mark.parametrize(("kind", "size"), [(PER_HEAD, 2 * 2 * 8 * 4), (INT8_POOL, 2 * 2 * (8 + 4))])
def test_pages_are_counted_by_what_the_cells_take_that_are_made(
    kind: PoolKind, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "size_pools", lambda config, **given: given["geometry"].page)
    config, none = EngineConfig(kv_cache_dtype=kind.kv_cache_dtype, page_size=4), cast("Any", None)
    assert memory.sizes(config, Facts(tensor_device="cpu"), model(), none, none, kind) == 4 * size


def test_what_layers_with_states_say_of_prompts_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "size_pools", lambda config, **given: None)
    made, ledger, none = model(), DecisionLedger(), cast("Any", None)
    made.state_layers = [SimpleNamespace(kept={}, remark=said) for said in ("", "slow", "slow")]
    memory.sizes(EngineConfig(page_size=4), Facts(tensor_device="cpu"), made, none, ledger)
    assert [(row.topic, row.reason) for row in ledger.rows] == [("prompts", "slow")]


@pytest.mark.parametrize(("is_encoder", "pages"), [(False, 64), (True, 1)])
def test_an_encoder_has_cells_for_one_page_beside_that_of_padding(is_encoder: bool, pages: int) -> None:
    sizes = MemorySizes(page_size=4, num_pages=64, max_model_len=32, max_requests=2)
    facts = Facts(tensor_device="cpu", shares_host_memory=True)
    made = memory.pools(EngineConfig(), facts, model(is_encoder), sizes)
    assert made.token_to_kv.num_cells == (1 + pages) * 4


def place(neighbours: int) -> Place:
    """The place of rank 0 of two, with `neighbours` ranks on this machine."""
    return Place(0, Topology(2), "file:///nowhere/meeting", 0, neighbours)


def test_ranks_of_one_machine_sum_through_its_memory() -> None:
    make, what, _ = sums_of_ranks(place(2), "gloo")
    assert make is not None and what.startswith("shared memory")


def test_ranks_without_memory_or_kernels_in_common_sum_by_the_back_end() -> None:
    def nothing() -> Engine:
        raise NativeUnavailable("libsglcore_cpu.so is not there")

    for found in (sums_of_ranks(place(1), "gloo"), sums_of_ranks(place(2), "gloo", nothing)):
        assert found[:2] == (None, "gloo")
    assert "is not there" in sums_of_ranks(place(2), "gloo", nothing)[2]

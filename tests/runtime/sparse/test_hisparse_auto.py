"""`--hisparse auto` in an engine: entries go to host memory if that is predicted to pay, and what
was predicted is in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.engine.start import Started, start
from sglcore.runtime.hisparse.hisparse_auto import chosen_hisparse
from sglcore.runtime.hisparse.hisparse_bring_up import beside_buffers
from sglcore.runtime.hisparse.hisparse_shape import SwapShape
from sglcore.runtime.memory import memory_bring_up
from sglcore.runtime.memory.kv_rows import KeptRows, Place, RowPool, swapped_rows
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.step.hisparse_choice import Speeds
from sglcore.step.hisparse_config import HiSparseConfig
from sglcore.step.sizing import Geometry, MemoryBudget, MemorySizes, size_pools
from tests.checkpoints import llama, save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import INDEXER, deepseek_v32
from tests.laws.attention.test_hisparse_laws import CONTEXT, PAGE, TOLERANCE
from tests.laws.engine import TokenEngine, check_logprobs, environ, on_this_device, random_prompts

FAST, SLOW = Speeds(1e12, 1e12), Speeds(1e3, 1e12)
TOP_K = INDEXER["index_topk"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    oracle = deepseek_v32(max_position_embeddings=CONTEXT)
    yield oracle, save(oracle, tmp_path_factory.mktemp("auto"))


def settings(**more: Any) -> dict[str, Any]:
    given = {"attention_backend": "latent", "page_size": PAGE, "max_model_len": CONTEXT, "graph": "off"}
    return {**given, "max_batch_tokens": 24, "poison": True, **more}


def started(folder: Path, **more: Any) -> Started:
    given = {"dtype": "float32", "max_requests": 32, "kv_cache_memory": 1 << 20, **on_this_device(), **settings(**more)}
    return start(resolve_config({**given, "model": str(folder)}, environ()))


def told(found: Started) -> tuple[Row, RowPool]:
    """The row of the choice, and the pool."""
    (row,) = [row for row in found.ledger.rows if row.topic == "hisparse choice"]
    assert isinstance(found.worker, TpModelWorker)
    pool = found.worker.runner.attn_backend.token_to_kv_pool
    hisparse = found.worker.runner.attn_backend.hisparse
    assert (hisparse is None) == all(swapped_rows(layer) is None for layer in pool.layers)
    assert (hisparse is None) == row.effective.startswith("off")
    found.worker.close()
    return row, pool


def with_speeds(speeds: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_bring_up, "measure_with", lambda *given: lambda shape: speeds)


TIGHT = json.dumps({"auto": True, "host_to_device_ratio": 100, "device_buffer_size": TOP_K, "prompt_buffer_size": 0})


@pytest.mark.needs("host_rows", "streams")
def test_it_pays_where_few_requests_fit_on_the_device(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with_speeds(FAST, monkeypatch)
    row, pool = told(started(saved[1], hisparse=TIGHT, kv_cache_memory=200_000))
    assert row.effective.startswith("on: 16 entries on the device, 0 tokens") and "GB/s from the host" in row.reason
    assert (row.requested, row.downgrade) == (TIGHT, False)
    assert any(swapped_rows(layer) for layer in pool.layers)


@pytest.mark.needs("host_rows", "streams")
def test_it_is_left_off_on_a_slow_link(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with_speeds(SLOW, monkeypatch)
    row, _ = told(started(saved[1], hisparse=TIGHT, kv_cache_memory=200_000))
    assert row.effective == "off" and "1e-06 GB/s from the host" in row.reason


PER_PAGE, ON_DEVICE, LONGEST = 64 * 656, 64 * 132, 16_384
"""Bytes of a page of 64 tokens in a layer, of entries and of index keys; tokens of a request."""


def choice_within(memory: int, link: float, **asked: Any) -> tuple[HiSparseConfig | None, Row]:
    """What auto chooses for a model of ten layers with entries of 656 bytes, of which a token reads
    2,048, if so many bytes of the device are free for pools and buffers."""
    config, ledger, facts = EngineConfig(max_requests=64, max_model_len=LONGEST), DecisionLedger(), Facts("acme:0")
    budget = MemoryBudget(memory, memory, "all", 1.0)
    kept = KeptRows(656, torch.uint8, Place.HOST_PAGES)

    def shape_of(setting: HiSparseConfig) -> SwapShape:
        held, rows = -(-setting.held_tokens(LONGEST) // 64), setting.buffer_rows(2048)
        names = dict.fromkeys(range(10), "latent")
        return SwapShape(names, tuple(range(10)), kept, 2048, rows, 64, LONGEST // 64 + 1, 2, held)

    def sized(setting: HiSparseConfig | None) -> MemorySizes:
        geometry = Geometry(10 * ON_DEVICE, host_page=10 * PER_PAGE)
        left = budget
        if setting is None:
            geometry = Geometry(10 * (ON_DEVICE + PER_PAGE))
        else:
            geometry, left = beside_buffers(setting, shape_of(setting), facts, geometry, budget)
        given = {"context_len": LONGEST, "geometry": geometry, "page_size": 64, "ledger": DecisionLedger()}
        return size_pools(config, budget=left, **given)

    weights = SimpleNamespace(parameters=[torch.empty(32 << 30, dtype=torch.uint8, device="meta")])
    model: Any = SimpleNamespace(config=SimpleNamespace(architecture="X"), attention_layers=(), weights=weights)
    setting = HiSparseConfig(host_to_device_ratio=8, is_auto=True, **asked)
    speeds = Speeds(link, 2e12)
    found = chosen_hisparse(setting, "", config, model, shape_of, sized, lambda shape: speeds, ledger)
    (row,) = ledger.rows
    return found, row


MIB = 1 << 20


def test_with_room_for_all_buffers_they_are_as_large_as_without_auto() -> None:
    found, row = choice_within(3000 * MIB, 50e9)
    assert found == HiSparseConfig(4096, 8)
    assert row.effective == "on: 4096 entries on the device, 16384 tokens of a prompt in chunks"


def test_buffers_shrink_where_whole_ones_leave_room_for_fewer_requests() -> None:
    found, row = choice_within(500 * MIB, 50e9)
    assert found is not None and (found.device_buffer_size, found.prompt_buffer_size) == (2048, 0)
    assert row.effective == "on, smaller: 2048 entries on the device, 0 tokens of a prompt in chunks"


def test_given_sizes_are_kept() -> None:
    found, _ = choice_within(500 * MIB, 50e9, device_buffer_size=3000)
    assert found is not None and found.device_buffer_size == 3000


@pytest.mark.parametrize(("memory", "link"), [(60_000 * MIB, 50e9), (3000 * MIB, 0.2e9), (20 * MIB, 50e9)])
def test_it_is_left_off_where_all_fits_where_the_link_is_slow_and_where_nothing_fits(memory: int, link: float) -> None:
    found, row = choice_within(memory, link)
    assert (found, row.effective) == (None, "off")


def test_a_measured_hit_rate_and_shorter_requests_change_what_is_chosen() -> None:
    assert choice_within(3000 * MIB, 2e9)[0] is None
    assert choice_within(3000 * MIB, 2e9, hit_rate=0.99)[0] is not None
    assert choice_within(3000 * MIB, 50e9, request_tokens=512)[0] is None


def test_a_measured_hit_rate_of_nothing_is_not_an_assumed_one() -> None:
    assert choice_within(3000 * MIB, 10e9)[0] is not None
    found, row = choice_within(3000 * MIB, 10e9, hit_rate=0.0)
    assert found is None and "a hit rate of 0%, given" in row.reason


@pytest.mark.needs("host_rows", "streams")
def test_speeds_are_measured(saved: tuple[Any, Path]) -> None:
    row, _ = told(started(saved[1], hisparse="auto"))
    assert "measured" in row.reason and "85%, assumed" in row.reason


@pytest.mark.needs("host_rows")
def test_texts_are_those_of_transformers_whatever_is_chosen(
    saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for speeds in (FAST, SLOW):
        with_speeds(speeds, monkeypatch)
        engine = TokenEngine(saved[1], **settings(hisparse=TIGHT, max_requests=4, kv_cache_memory=200_000))
        check_logprobs(engine.run(random_prompts(1, (60, 34)), 6, stagger=1), saved[0], TOLERANCE)


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("make", [deepseek_v32, deepseek_v4, llama])
def test_nothing_is_offloaded_where_it_can_not_help(make: Any, tmp_path: Path) -> None:
    """One memory for host and device, or a model that chooses no entries: no error, but a row."""
    backend = {deepseek_v32: "latent", deepseek_v4: "compressed"}.get(make)
    folder = save(make(max_position_embeddings=CONTEXT), tmp_path)
    found = started(folder, hisparse="auto", attention_backend=backend)
    (row,) = [row for row in found.ledger.rows if row.topic == "hisparse choice"]
    assert (row.requested, row.effective, row.remedy) == ("auto", "off", "--hisparse on")
    assert row.reason.startswith("host and device share memory")
    same = started(folder, attention_backend=backend)
    assert found.worker.limits == same.worker.limits

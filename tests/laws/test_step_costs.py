"""Limits of a decode step on a device with streams, with the device's preferred attention and
graphs: it waits for nothing but the ticket's event, and copies at most twice to the device, or
three times if sliding-window layers plan separately."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ci.lanes import Lane
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.checkpoints import gemma3, llama, save
from tests.laws.engine import TokenEngine, random_prompts

COPIES = 1
"""The copy of the step's inputs. Each attention backend's plan may add one."""


@pytest.fixture(scope="module", params=[llama, gemma3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with a head size that every vendor's library supports: with one pool, and with a
    second pool for sliding windows."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    return save(request.param(**sizes, max_position_embeddings=256), tmp_path_factory.mktemp("step_costs"))


@pytest.mark.needs("streams", "simulator", "graphs.full")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_replayed_decode_step_waits_for_nothing_and_copies_few_times(
    folder: Path, lane: Lane, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    sim: Any = sys.modules["sglcore_sim"].current()
    engine = TokenEngine(
        folder,
        dtype="float16",
        graph="full",
        overlap=overlap,
        attention_backend=None,
        kernels="reference",
        page_size=None,
        kv_cache_memory=64 << 20,
    )
    real, copies = engine.worker.submit, []

    def submit(batch: ScheduleBatch) -> Any:
        before = sim.stats()
        with sim.no_sync():
            ticket = real(batch)
        after = sim.stats()
        if batch.forward_mode.is_decode:
            copies.append(after["h2d_copies"] - before["h2d_copies"])
            assert after["pageable_h2d"] == before["pageable_h2d"]
            assert after["host_syncs"] == before["host_syncs"]
        return ticket

    monkeypatch.setattr(engine.worker, "submit", submit)
    engine.run(random_prompts(5, (3, 20, 9)), 18, stagger=3)
    print(
        f"{type(engine.worker.runner.attn_backend).__name__}: copies of {len(copies)} decode steps: {sorted(set(copies))}"
    )
    assert len(copies) > 16 and max(copies) <= COPIES + len(engine.worker.runner.attn_backend.parts)
    assert any(path.startswith("full:") for path in engine.paths)

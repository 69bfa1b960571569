"""Ranks on simulated accelerators, one each: the device's own collective back end, streams, and a
fault where an ordering is missing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ci.lanes import Lane
from sglcore.core.errors import ConfigError, WorkerLost
from tests.checkpoints import llama, olmo2, qwen3_moe, qwen3_next, save
from tests.drafts import TARGET, eagle
from tests.latent import deepseek_v3
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine
from tests.parallel.hosts import OtherNode, free_port

pytestmark = pytest.mark.needs("device", "simulator", "streams")
PLAIN: dict[str, Any] = {"graph": "off", "kernels": "reference", "attention_backend": "gathered", "threads": None}


@pytest.fixture
def oracle() -> Any:
    return llama(max_position_embeddings=128)


def test_two_devices_hold_one_model(lane: Lane, oracle: Any, tmp_path: Path) -> None:
    """Steps are planned ahead, in each rank's own streams."""
    kind = partial(defects.simulated, lane.simulator)
    with RankedEngine(save(oracle, tmp_path), kind, **PLAIN) as engine:
        check_logprobs(engine.run(random_prompts(5, (1, 5, 17)), 6, stagger=2), oracle)
        rows = {row.topic: row for row in engine.started.ledger.rows}
        assert engine.started.choice.package.communication is not None
        assert engine.started.choice.package.communication.backend in rows["ranks"].reason


def test_two_devices_of_two_hosts_hold_one_model(lane: Lane, oracle: Any, tmp_path: Path) -> None:
    """Each host's ranks count its devices from the first."""
    kind = partial(defects.simulated, lane.simulator)
    port, folder = free_port(), save(oracle, tmp_path)
    other = OtherNode(folder, port, defect=kind, **PLAIN)
    with RankedEngine(folder, kind, nodes=2, node_rank=0, leader=f"127.0.0.1:{port}", **PLAIN) as engine:
        check_logprobs(engine.run(random_prompts(5, (1, 5, 17)), 6, stagger=2), oracle)
    assert other.ended() == 0


def test_a_host_without_so_many_devices_is_refused(oracle: Any, tmp_path: Path) -> None:
    """The machine has two devices; the second of two nodes on it would need the third and the
    fourth."""
    port, folder = free_port(), save(oracle, tmp_path)
    other = OtherNode(folder, port, tp=4, local=1, **PLAIN)
    with pytest.raises(ConfigError, match=r"node 1 \(host 127\.0\.0\.1\) needs .* up to number 3, and has 2"):
        RankedEngine(folder, tp=4, nodes=2, node_rank=0, leader=f"127.0.0.1:{port}", **PLAIN)
    other.join(60)
    assert isinstance(other.error, ConfigError)


@pytest.mark.parametrize("settings", [{"dp": 2}, {"dp": 2, "ep": 2}, {"ep": 2, "expert_dispatch": "fixed"}], ids=str)
def test_two_devices_serve_shards_and_hold_experts(lane: Lane, settings: dict[str, Any], tmp_path: Path) -> None:
    """A device with an idle shard computes no rows, but takes part in the exchanges of the
    other."""
    kind = partial(defects.simulated, lane.simulator)
    oracle = qwen3_moe(num_experts=4, max_position_embeddings=128)
    with RankedEngine(save(oracle, tmp_path), kind, **{**PLAIN, **settings}) as engine:
        check_logprobs(engine.run(random_prompts(5, (1, 5, 17)), 6, stagger=2), oracle)


@pytest.mark.needs("graphs.full")
@pytest.mark.parametrize("settings", [{"dp": 2}, {"dp": 2, "ep": 2, "expert_dispatch": "fixed"}], ids=str)
def test_two_devices_replay_graphs_with_their_collectives(lane: Lane, settings: dict[str, Any], tmp_path: Path) -> None:
    """Where the device's library cannot be captured, the ledger says so and steps run eagerly."""
    kind = partial(defects.simulated, lane.simulator)
    oracle = qwen3_moe(num_experts=4, max_position_embeddings=128)
    given = {**PLAIN, "graph": "full", "graph_buckets": (1, 3), **settings}
    with RankedEngine(save(oracle, tmp_path), kind, **given) as engine:
        check_logprobs(engine.run(random_prompts(5, (1, 5, 17)), 6, stagger=2), oracle)
        row = next(row for row in engine.started.ledger.rows if row.topic == "graph")
        communication = engine.started.choice.package.communication
        assert communication is not None
        if communication.in_graphs:
            assert row.effective == "full" and {"full:1", "full:3"} & engine.paths
        else:
            assert row.effective == "eager" and communication.backend in row.reason and engine.paths == {"eager"}


def test_a_sum_on_a_stream_that_does_not_wait_is_a_race(lane: Lane, oracle: Any, tmp_path: Path) -> None:
    kind = partial(defects.unordered, lane.simulator)
    with RankedEngine(save(oracle, tmp_path), kind, **PLAIN) as engine, pytest.raises(WorkerLost, match="race"):
        engine.run(random_prompts(5, (5,)), 4)


def test_more_ranks_than_devices_are_refused(oracle: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tp is 4, and '.*' has 2 devices"):
        RankedEngine(save(oracle, tmp_path), tp=4, **PLAIN)


@pytest.mark.parametrize("make", [deepseek_v3, qwen3_next, olmo2])
def test_sums_inside_of_layers_are_in_the_order_of_a_stream(make: Any, lane: Lane, tmp_path: Path) -> None:
    """Latent rows, recurrent states, and norms of rows split over both devices."""
    kind, oracle = partial(defects.simulated, lane.simulator), make()
    given = {**PLAIN, "attention_backend": "latent"} if make is deepseek_v3 else PLAIN
    with RankedEngine(save(oracle, tmp_path), kind, **given) as engine:
        check_logprobs(engine.run(random_prompts(5, (1, 5, 17)), 6, stagger=2), oracle)


@pytest.mark.parametrize("settings", [{}, {"dp": 2}], ids=str)
def test_proposals_of_a_divided_draft_leave_no_trace_in_a_text(
    lane: Lane, settings: dict[str, Any], tmp_path: Path
) -> None:
    target, kind = llama(**TARGET), partial(defects.simulated, lane.simulator)
    folder, found = save(target, tmp_path), []
    eagle(target, folder / "draft")
    for speculative in ("eagle", "off"):
        with RankedEngine(folder, kind, speculative=speculative, **PLAIN, **settings) as engine:
            results = engine.run(random_prompts(5, (5, 17)), 12, temperature=1.5, seed=3, stagger=2)
            found.append([result.tokens for result in results])
            assert bool(engine.scheduler.drafts) == (speculative == "eagle")
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{}, {"dp": 2, "ep": 2}], ids=str)
def test_two_devices_run_halves_in_turn(lane: Lane, settings: dict[str, Any], tmp_path: Path) -> None:
    """With collectives on a stream of their own: nothing in one micro-batch races with the other's
    computation."""
    kind = partial(defects.simulated, lane.simulator)
    oracle = qwen3_moe(num_experts=4, max_position_embeddings=128)
    given = {**PLAIN, "two_batch_overlap": "on", "max_batch_tokens": 12, **settings}
    with RankedEngine(save(oracle, tmp_path), kind, **given) as engine:
        check_logprobs(engine.run(random_prompts(5, (3, 5, 17, 9)), 6), oracle)
        assert "eager:halves" in engine.paths


WHOLE_EXPERTS = {"ep": 2, "expert_dispatch": "ragged"}
DEFECTS: list[tuple[Any, dict[str, Any], str]] = [
    (defects.launched_unordered, {}, "race"),
    (defects.never_awaited, {}, "race"),
    (defects.awaited_elsewhere, {}, "race"),
    (defects.written_while_under_way, {}, "race"),
    (defects.freed_while_under_way, WHOLE_EXPERTS, "use_after_free"),
]


@pytest.mark.parametrize(("defect", "settings", "fault"), DEFECTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_missing_edge_between_halves_and_collectives_is_a_fault(
    defect: Any, settings: dict[str, Any], fault: str, lane: Lane, tmp_path: Path
) -> None:
    oracle = qwen3_moe(num_experts=4, max_position_embeddings=128)
    given = {**PLAIN, "two_batch_overlap": "on", "max_batch_tokens": 12, **settings}
    kind = partial(defect, lane.simulator)
    with RankedEngine(save(oracle, tmp_path), kind, **given) as engine, pytest.raises(WorkerLost, match=fault):
        engine.run(random_prompts(5, (3, 5, 17, 9)), 6)

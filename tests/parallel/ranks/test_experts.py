"""Whole experts on ranks: the chosen sets equal transformers', then the outputs; with idle and
uneven ranks too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.checkpoint.model_config import read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology, legal_tp
from sglcore.core.errors import ConfigError
from sglcore.runtime.parallel.expert_placement import Placement, in_order
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.topology import Topology
from tests.checkpoints import glm4_moe, granite_moe, llama, qwen3_moe, save
from tests.parallel import dispatch_defects
from tests.parallel.topologies import block_on_rows, held_experts, on_topology, rows_of

NEAR = 1e-5
"""Scores closer than this are a tie: a sum in another order may decide it otherwise."""
PLANS = [StepPlan(counts, is_padded) for counts in ((5, 2), (0, 3), (4, 4), (1, 0)) for is_padded in (False, True)]
ALONE = [StepPlan((5,)), StepPlan((1,)), StepPlan((8,))]
TOPOLOGIES = MappingProxyType(
    {
        "experts on two ranks": (Topology(2, 1, 2), ALONE),
        "experts on two ranks, each of a shard": (Topology(2, 2, 2), PLANS),
        "experts on four ranks": (Topology(4, 1, 4), ALONE),
        "experts on four ranks, two of a shard": (Topology(4, 2, 4), PLANS),
        "experts twice on two of four ranks": (Topology(4, 2, 2), PLANS),
        "parts of all experts on two ranks of two shards": (Topology(2, 2, 1), PLANS),
        "parts of all experts on four ranks of two shards": (Topology(4, 2, 1), PLANS),
    }
)


DEFECTS = (
    dispatch_defects.pads_reach_the_router,
    dispatch_defects.shifted_places,
    dispatch_defects.another_order,
    dispatch_defects.twice_weighed,
)


def oracle() -> Any:
    return qwen3_moe(num_experts=8, num_experts_per_tok=3)


def run(topology: Topology, plans: list[StepPlan], folder: Path, tmp_path: Path, **given: Any) -> list[Any]:
    given = {"folder": folder, "plans": plans, "hidden": 48, "dtype": torch.float32, **given}
    return on_topology(topology, tmp_path, block_on_rows, **given)


def check(model: Any, topology: Topology, plans: list[StepPlan], found: list[Any]) -> None:
    """Check the chosen experts of each row and step, then the outputs. Rows with a tie are skipped,
    and there must be few."""
    block, ties, rows = model.model.layers[0].mlp, 0, 0
    for rank, told in enumerate(found):
        assert isinstance(told, list), told
        shard, place, width = rank // topology.attn_tp, rank % topology.attn_tp, topology.attn_tp
        for (made, chosen), plan in zip(told, plans, strict=True):
            count = plan.global_num_tokens[shard]
            x = rows_of(shard, count, made.shape[1], torch.float32)
            if topology.ep > 1:
                each = -(-count // width)
                routed = x[place * each : (place + 1) * each]
            else:
                every = [rows_of(*one, made.shape[1], torch.float32) for one in enumerate(plan.global_num_tokens)]
                routed = torch.cat(every)
            ties += check_chosen(block, routed, chosen)
            rows += len(routed)
            with torch.no_grad():
                wanted = block(x[None])[0] if count else x
            torch.testing.assert_close(made, wanted, atol=1e-4, rtol=0)
    assert ties <= rows // 50


def check_chosen(block: Any, routed: Tensor, chosen: Tensor) -> int:
    """Check that every real row was routed once, and no other row; return the number of ties."""
    assert len(chosen) == len(routed), f"{len(chosen)} rows reached the router, of {len(routed)}"
    with torch.no_grad():
        scores = torch.nn.functional.linear(routed, block.gate.weight).softmax(-1)
    top = scores.topk(chosen.shape[1] + 1 if len(chosen) else 1)
    is_near = (top.values[:, -2] - top.values[:, -1] < NEAR) if len(chosen) else torch.zeros(0, dtype=torch.bool)
    wanted = top.indices[:, : chosen.shape[1]].sort(-1).values
    same = (chosen.long().sort(-1).values == wanted).all(-1) if len(chosen) else is_near
    assert bool((same | is_near).all())
    return int(is_near.sum())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = oracle()
    return model, save(model, tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_choose_and_compute_as_transformers(name: str, saved: tuple[Any, Path], tmp_path: Path) -> None:
    topology, plans = TOPOLOGIES[name]
    check(saved[0], topology, plans, run(topology, plans, saved[1], tmp_path))


def test_fixed_places_give_the_same(saved: tuple[Any, Path], tmp_path: Path) -> None:
    topology = Topology(4, 2, 4)
    check(saved[0], topology, PLANS, run(topology, PLANS, saved[1], tmp_path, capacity=6))


def test_one_row_beyond_the_places_is_told_by_name(saved: tuple[Any, Path], tmp_path: Path) -> None:
    topology, plans = Topology(2, 2, 2), [StepPlan((5, 5))]
    model, folder = saved
    (tmp_path / "fits").mkdir()
    check(model, topology, plans, run(topology, plans, folder, tmp_path / "fits", capacity=5))
    for rank, told in enumerate(run(topology, plans, folder, tmp_path, capacity=4)):
        assert told == (
            f"CapacityExceeded: rank {rank} of 2 has 5 rows for experts, and the fixed dispatcher takes 4;"
            " lower max_batch_tokens or max_requests, or set expert_dispatch to ragged"
        )


@pytest.mark.parametrize("make", [glm4_moe, lambda: granite_moe(num_local_experts=4)], ids=["by expert", "as a stack"])
def test_experts_are_read_however_a_checkpoint_has_them(make: Callable[[], Any], tmp_path: Path) -> None:
    """Each of two ranks has exactly its half."""
    model: Any = make()
    folder = save(model, tmp_path)
    found = on_topology(Topology(2, 1, 2), tmp_path, held_experts, folder=folder)
    count = read_config(folder).moe.num_experts  # pyright: ignore[reportOptionalMemberAccess]
    layer = model.model.layers[1]
    down = ((layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).experts.down_proj).detach()
    assert torch.equal(torch.cat(found), down) and [len(each) for each in found] == [count // 2] * 2


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_dispatch_is_caught(defect: Callable[[], None], saved: tuple[Any, Path], tmp_path: Path) -> None:
    topology = Topology(4, 2, 4)
    found = run(topology, PLANS, saved[1], tmp_path, defect=defect)
    with pytest.raises(AssertionError):
        check(saved[0], topology, PLANS, found)


def test_rows_that_are_dropped_in_silence_are_caught(saved: tuple[Any, Path], tmp_path: Path) -> None:
    topology, plans = Topology(2, 2, 2), [StepPlan((5, 5))]
    found = run(topology, plans, saved[1], tmp_path, capacity=4, defect=dispatch_defects.drops_silently)
    with pytest.raises(AssertionError):
        check(saved[0], topology, plans, found)


def test_a_placement_loses_no_expert_and_sends_to_the_nearest_place() -> None:
    twice = Placement(np.array([0, 1, 2, 3, 2, 0], np.int32), 4, 3)
    assert twice.of_rank(1).tolist() == [2, 3]
    assert [twice.places_for(rank).tolist() for rank in range(3)] == [[0, 1, 2, 3], [5, 1, 2, 3], [5, 1, 4, 3]]
    assert in_order(6, 3).places_for(2).tolist() == list(range(6))
    with pytest.raises(ConfigError, match=r"no place for \[3\]"):
        Placement(np.array([0, 1, 2, 0], np.int32), 4, 2)
    with pytest.raises(ConfigError, match="a multiple of 3 ranks"):
        in_order(4, 3)


@pytest.mark.parametrize(
    ("make", "topology", "said"),
    [
        (oracle, Topology(3, 1, 3), "ep is 3, and this model has 8 experts; wanted one of 1; set --ep to one of them"),
        (oracle, Topology(8, 8, 8), ""),
        (oracle, Topology(8, 4, 4), ""),
        (
            oracle,
            Topology(8, 1, 2),
            "tp is 8, and this model has 4 attention heads; wanted one of 2, 4; set --tp to one of them",
        ),
        (llama, Topology(2, 1, 2), "ep is 2, and this model has no experts; --ep 1"),
        (
            llama,
            Topology(12, 2),
            "tp is 12 in 2 shards of requests, and this model has 4 attention heads; wanted one of 2, 4, 8",
        ),
    ],
)
def test_widths_that_do_not_divide_are_told_with_those_that_do(
    make: Callable[[], Any], topology: Topology, said: str, tmp_path: Path
) -> None:
    config = read_config(save(make(), tmp_path))
    if not said:
        check_topology(config, topology)
        assert topology.tp in legal_tp(config, topology)
        return
    with pytest.raises(ConfigError) as caught:
        check_topology(config, topology)
    assert said in str(caught.value)

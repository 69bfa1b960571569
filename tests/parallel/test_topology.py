"""The members of each group, and the widths that fit a model: arithmetic, over every small
topology."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from sglcore.checkpoint.model_config import ModelConfig, MoeConfig, read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.checkpoint.parallel.tensor_parallel import MOST_WIDTH, Shard, legal_widths
from sglcore.core.errors import ConfigError
from sglcore.engine.start import embedded_model
from sglcore.worker.topology import GROUPS, Place, Topology

EVERY = [
    Topology(tp, dp, ep, pp)
    for tp, dp, ep, pp in itertools.product(range(1, 9), range(1, 9), range(1, 9), range(1, 4))
    if tp % dp == 0 and tp % ep == 0
]


@pytest.mark.parametrize("name", GROUPS)
def test_every_rank_is_in_one_group_of_a_kind(name: str) -> None:
    for topology in EVERY:
        ranks = [rank for group in topology.groups(name) for rank in group]
        assert sorted(ranks) == list(range(topology.world))
        assert all(list(group) == sorted(group) for group in topology.groups(name))
        assert len({len(group) for group in topology.groups(name)}) == 1


def test_a_rank_of_attention_meets_one_of_each_shard_of_requests() -> None:
    for topology in EVERY:
        for rank in range(topology.world):
            heads, shards = topology.group_of("attn_tp", rank), topology.group_of("attn_dp", rank)
            assert set(heads) & set(shards) == {rank}
            assert len(heads) * len(shards) == topology.tp
            assert set(heads) | set(shards) <= set(topology.group_of("tp", rank))


def test_ranks_count_heads_first_then_shards_then_stages() -> None:
    for topology in EVERY:
        places = itertools.product(range(topology.pp), range(topology.dp), range(topology.attn_tp))
        assert [topology.rank_of(pp=pp, dp=dp, tr=tr) for pp, dp, tr in places] == list(range(topology.world))


def test_a_place_outside_and_a_group_that_is_none_are_refused() -> None:
    with pytest.raises(ValueError, match="tr is 2"):
        Topology(2).rank_of(tr=2)
    with pytest.raises(ValueError, match="'heads' is not a group"):
        Topology(2).groups("heads")


@pytest.mark.parametrize("widths", [{"tp": 4, "dp": 3}, {"tp": 4, "ep": 8}, {"tp": 0}])
def test_widths_that_do_not_divide_are_refused_with_those_that_do(widths: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        Topology(**widths)


def test_a_place_crosses_to_another_process() -> None:
    place = Place(3, Topology(4, 2), "file:///x", 1, 2)
    assert Place.from_plain(place.as_plain()) == place


def config_with(**changes: int) -> ModelConfig:
    return dataclasses.replace(read_config(embedded_model()), **changes)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 32])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
def test_each_query_head_finds_its_own_keys_on_its_rank(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        return
    config = config_with(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=heads * 8)
    for size in legal_widths(config):
        held = [Shard(rank, size) for rank in range(size)]
        assert [head for shard in held for head in range(*shard.part(heads))] == list(range(heads))
        for shard in held:
            (first, last), (first_kv, last_kv) = shard.part(heads), shard.kv_heads(kv_heads)
            of_local = (last - first) // (last_kv - first_kv)
            for head in range(first, last):
                assert first_kv + (head - first) // of_local == head * kv_heads // heads
            assert (last_kv - first_kv) == max(kv_heads // size, 1)


def test_parts_of_a_vocabulary_are_alike_and_hold_every_row_once() -> None:
    for rows, size in itertools.product(range(1, 60), range(1, 9)):
        parts = [Shard(rank, size).vocabulary(rows) for rank in range(size)]
        assert {last - first for first, last in parts} == {math.ceil(rows / size)}
        assert [row for first, last in parts for row in range(first, last)][:rows] == list(range(rows))


def test_a_width_that_does_not_fit_is_refused_with_all_that_do() -> None:
    config = config_with(num_attention_heads=6, num_key_value_heads=2, intermediate_size=48)
    assert legal_widths(config) == (1, 2, 6)
    with pytest.raises(ConfigError, match="tp is 4, and this model has 6 attention heads; wanted one of 1, 2, 6"):
        check_topology(config, Topology(4))
    assert (
        max(legal_widths(config_with(num_attention_heads=256, num_key_value_heads=1, intermediate_size=512)))
        == MOST_WIDTH
    )


def test_what_is_inside_of_shared_experts_is_divided_too() -> None:
    """Over all ranks, for any expert parallel size."""
    moe = MoeConfig((True, True), 8, 2, 64, True, shared_size=36)
    config = dataclasses.replace(config_with(num_attention_heads=16, num_key_value_heads=8), moe=moe)
    check_topology(config, Topology(4, 1, 4))
    for ep in (1, 8):
        with pytest.raises(
            ConfigError, match="tp is 8, and this model has 36 intermediate features in the shared expert"
        ):
            check_topology(config, Topology(8, 1, ep))


def test_experts_that_are_whole_need_not_be_divided() -> None:
    moe = MoeConfig((True, True), 8, 2, 36, True)
    config = dataclasses.replace(config_with(num_attention_heads=16, num_key_value_heads=8), moe=moe)
    check_topology(config, Topology(8, 1, 8))
    with pytest.raises(ConfigError, match="this model has 36 intermediate features in an expert"):
        check_topology(config, Topology(8))


def test_the_embedded_model_may_be_divided_by_two(tmp_path: Path) -> None:
    assert 2 in legal_widths(read_config(embedded_model()))

"""Costs of a step part by part: with the bytes of its own elements, and with the messages that its
rows need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglcore.engine.layouts.cluster import Cluster, DeviceNumbers
from sglcore.engine.layouts.layout_cost import Costs, Rows, copies_to_ranks, distinct
from sglcore.engine.layouts.link_costs import Link, Links
from sglcore.engine.layouts.model_shape import LayerShape, ModelShape
from sglcore.worker.topology import Topology

HIDDEN, VOCABULARY = 20, 100
LAYER = LayerShape(
    whole=40,
    by_heads=800,
    by_keys=400,
    cache_whole=6,
    cache_by_keys=40,
    score_flops=160,
    window=None,
    block=1200,
    num_blocks=1,
    expert=60,
)
MODEL = ModelShape(
    (LAYER,), HIDDEN, VOCABULARY, 4000, 2, 16, 2, row_bytes=4.0, attention_bytes=1.0, block_bytes=2.0, expert_bytes=0.5
)
"""Each part has elements of another size."""
READING = DeviceNumbers(memory=1e6, bandwidth=1.0, flops=1e30, flops_8bit=1e30, launch=0.0)
COMPUTING = DeviceNumbers(memory=1e6, bandwidth=1e30, flops=1.0, flops_8bit=2.0, launch=0.0)
FREE = Links(Link(0.0, 0.0), Link(0.0, 0.0), 8)
SENDING = Links(Link(3.0, 0.25), Link(10.0, 0.5), 2)
"""A device that only reads, one that only computes, and links that take time or none."""


def costs(topology: Topology, device: DeviceNumbers = READING, links: Links = FREE, **changes: Any) -> Costs:
    return Costs(MODEL, replace(Cluster(device, links, 4), **changes), topology)


@pytest.mark.parametrize(("element", "rate"), [(1.0, 2.0), (0.5, 1.0), (2.0, 1.0)])
def test_weights_of_each_part_are_read_with_their_bytes_and_multiplied_at_their_rate(
    element: float, rate: float
) -> None:
    """Only elements of one byte are multiplied at the rate of 8 bits."""
    rows = Rows(3, 2, 10)
    parts = {
        "attention_bytes": ("attention", 40 + 800 + 400, 2 * 3 * (40 + 800 + 400)),
        "block_bytes": ("blocks", 1200, 2 * 3 * 1200),
        "expert_bytes": ("blocks", 0, 2 * 3 * 2 * 60),
    }
    for name, (method, elements, flops) in parts.items():
        model = replace(MODEL, row_bytes=4.0, attention_bytes=8.0, block_bytes=8.0, expert_bytes=8.0)
        layer = replace(LAYER, expert=60 if name == "expert_bytes" else 0, score_flops=0)
        if name == "expert_bytes":
            layer, elements = replace(layer, block=0), distinct(3 * 2, 16, 2) * 60
        found = [
            getattr(Costs(replace(model, **{name: element}), Cluster(device, FREE, 1), Topology(1)), method)(
                layer, rows
            )
            for device in (READING, COMPUTING)
        ]
        assert found[0].weights == pytest.approx(elements * element), name
        assert found[1].arithmetic == pytest.approx(flops / rate), name


@pytest.mark.parametrize(("element", "rate"), [(1.0, 2.0), (2.0, 1.0)])
def test_scores_and_the_output_layer_have_the_elements_of_hidden_states(element: float, rate: float) -> None:
    rows, model = Rows(3, 2, 10), replace(MODEL, row_bytes=element, attention_bytes=8.0)
    reading, computing = (Costs(model, Cluster(device, FREE, 1), Topology(1)) for device in (READING, COMPUTING))
    layer = replace(LAYER, whole=0, by_heads=0, by_keys=0)
    assert reading.attention(layer, rows).cache == 2 * 10 * 46 * element
    assert computing.attention(layer, rows).arithmetic == pytest.approx(3 * 10 * 160 / rate)
    bare = replace(LAYER, whole=0, by_heads=0, by_keys=0, cache_whole=0, cache_by_keys=0, score_flops=0, block=0)
    empty = replace(model, layers=(replace(bare, expert=0, num_blocks=0),))
    reads, computes = (replace(each, model=empty).step(rows) for each in (reading, computing))
    assert reads.weights == HIDDEN * VOCABULARY * element
    assert computes.arithmetic == pytest.approx(2 * 2 * HIDDEN * VOCABULARY / rate)


def test_weights_on_a_rank_are_its_parts_with_their_bytes() -> None:
    for topology, whole, heads, keys, tables in (
        (Topology(1), 1, 1, 1, 1),
        (Topology(4), 1, 4, 2, 4),
        (Topology(4, dp=2), 1, 2, 2, 2),
        (Topology(4, dp=4, ep=4), 1, 1, 1, 1),
    ):
        experts = 16 * 60 / (topology.ep if topology.ep > 1 else topology.tp)
        wanted = 4000 / tables * 4.0 + (40 / whole + 800 / heads + 400 / keys) * 1.0
        wanted += 1200 / topology.tp * 2.0 + experts * 0.5
        assert costs(topology).weight_bytes() == pytest.approx(wanted)
        assert costs(topology).request_bytes(10) == pytest.approx(10 * (6 + 40 / keys) * 4.0)


ROWS = Rows(3, 2, 10)
ROW = HIDDEN * 4.0


@pytest.mark.parametrize(
    ("topology", "sums"),
    [
        (Topology(4), 2),
        (Topology(4, dp=2), 2),
        (Topology(4, dp=4), 2),
        (Topology(4, ep=4), 1),
        (Topology(8, dp=2, ep=8), 1),
    ],
)
def test_rows_of_dense_blocks_and_divided_experts_are_summed_over_all_ranks(topology: Topology, sums: int) -> None:
    """With shards the rows of all are gathered before, and scattered after; experts that are whole
    on one rank need no sum."""
    links, tp, dp, width = SENDING, topology.tp, topology.dp, topology.attn_tp
    once = links.all_reduce(tp, 3 * ROW)
    if dp > 1:
        once = 2 * links.all_gather(tp, 3 * dp * ROW) + 2 * links.all_gather(width, 3 * ROW)
    assert costs(topology, links=links).blocks(LAYER, ROWS).links == pytest.approx(sums * once)
    for layer, number in ((replace(LAYER, expert=0), 1), (replace(LAYER, num_blocks=0), sums - 1)):
        assert costs(topology, links=links).blocks(layer, ROWS).links == pytest.approx(number * once)
    assert costs(topology, links=links).attention(LAYER, ROWS).links == pytest.approx(links.all_reduce(width, 3 * ROW))


@pytest.mark.parametrize("out", [None, 1.0])
@pytest.mark.parametrize("topology", [Topology(4, dp=4, ep=4), Topology(4, dp=2, ep=4), Topology(4, ep=4)])
@pytest.mark.parametrize("is_copy_per_rank", [True, False])
def test_rows_go_to_experts_with_their_bytes_and_come_back_as_hidden_states(
    is_copy_per_rank: bool, topology: Topology, out: float | None
) -> None:
    """The busiest rank has a quarter more rows; each rank sends its part of its shard's rows."""
    own = 3 / topology.attn_tp * 1.25
    found = costs(topology, links=SENDING, imbalance=1.25, bytes_out=out, is_copy_per_rank=is_copy_per_rank).experts(
        LAYER, ROWS
    )

    def sent(element: float) -> float:
        each = own * HIDDEN * element
        if not is_copy_per_rank:
            return SENDING.all_to_all(4, each * 2)
        return SENDING.all_to_all(4, each * copies_to_ranks(4, 2), each * copies_to_ranks(2, 2))

    gathered = SENDING.all_gather(topology.attn_tp, 3 * ROW)
    assert found.links == pytest.approx(sent(4.0 if out is None else out) + sent(4.0) + gathered)
    assert costs(topology, links=SENDING).experts(replace(LAYER, expert=0), ROWS).total == 0


def test_all_ranks_of_a_shard_get_the_logits_of_its_requests() -> None:
    for topology in (Topology(1), Topology(4), Topology(4, dp=2)):
        bare = replace(costs(topology, links=SENDING), model=replace(MODEL, layers=()))
        assert bare.step(ROWS).links == pytest.approx(SENDING.all_gather(topology.attn_tp, 2 * VOCABULARY * 4))


@pytest.mark.parametrize(("choices", "found"), [(0, 0.0), (2, 2.0), (4, 2 + 2 * 14 / 16)])
def test_tokens_meet_experts_that_others_have_chosen_too(choices: float, found: float) -> None:
    assert distinct(choices, 16, 2) == pytest.approx(found)


def test_no_room_for_weights_is_no_room_for_tokens() -> None:
    need = costs(Topology(1)).weight_bytes()
    for memory, tokens in ((need / 0.9 - 1, 0), (need / 2, 0), ((need + 46 * 4 * 30) / 0.9 + 1, 30)):
        assert costs(Topology(1), device=replace(READING, memory=memory)).cache_tokens(10) == tokens

"""Parallel configurations: parameter counts match the published ones, the cost of a step matches a
calculation by hand, and the fastest configuration comes first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.model_config import read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.core.errors import ConfigError
from sglcore.engine.layouts import layout_cost, model_shape
from sglcore.engine.layouts.cluster import Cluster, DeviceNumbers, read_cluster
from sglcore.engine.layouts.layout_advice import Load, advise, text_of
from sglcore.engine.layouts.link_costs import Link, Links
from sglcore.engine.layouts.model_shape import LayerShape, ModelShape
from sglcore.worker.topology import Topology
from tests.planted import planted

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "benchmarks" / "clusters"

LAYER = LayerShape(
    whole=0, by_heads=800, by_keys=400, cache_whole=0, cache_by_keys=40, score_flops=160, window=None, block=1200,
    num_blocks=1, expert=0,
)  # fmt: skip
DENSE = ModelShape((LAYER, LAYER), 20, 100, 4000, 2, 0, 0, 2.0, 2.0, 2.0, 2.0)
SPARSE = replace(DENSE, layers=(replace(LAYER, block=0, num_blocks=0, expert=60),), experts=16, chosen=2)
SLOW = DeviceNumbers(memory=1e6, bandwidth=10.0, flops=1e9, flops_8bit=2e9, launch=0.5)
FREE = Links(Link(0.0, 0.0), Link(0.0, 0.0), 8)
"""Links take no time (FREE), or compute takes no time, so that each number has one cause."""


NORMS = 4e-5
"""The relative share of norms and biases, which are not counted."""


def cluster(links: Links = FREE, hosts: int = 1, **changes: Any) -> Cluster:
    """A cluster with those numbers."""
    return replace(Cluster(SLOW, links, hosts), **changes)


def moe(hidden: int, n: int, links: Links, **changes: Any) -> Any:
    """The costs of experts distributed over `n` ranks, with DP attention on each rank."""
    model = replace(SPARSE, hidden=hidden, experts=256, chosen=8)
    return layout_cost.Costs(model, cluster(links, **changes), Topology(n, n, n))


@pytest.mark.parametrize(
    ("name", "billions"), [("dense-70b", 70.553_706), ("dense-8b", 8.030_261), ("experts-671b", 671.026_419)]
)
def test_a_model_has_the_parameters_that_its_makers_say(name: str, billions: float) -> None:
    """Llama 3 and DeepSeek-V3, compared with the files on the hub."""
    found = model_shape.shape_of(read_config(CLUSTERS / name))
    assert found.parameters / 1e9 == pytest.approx(billions, rel=NORMS)


def test_a_token_keeps_what_the_papers_say() -> None:
    """GQA has 8 heads of 128 in 80 layers; MLA has 576 values in 61 layers. Eight ranks divide the
    first and not the second."""
    for name, tp, wanted in (("dense-70b", 1, 327_680), ("dense-70b", 8, 40_960), ("dense-70b", 16, 40_960)):
        config = read_config(CLUSTERS / name)
        costs = layout_cost.Costs(model_shape.shape_of(config), cluster(), Topology(tp))
        assert costs.request_bytes(1) == wanted
    latent = model_shape.shape_of(read_config(CLUSTERS / "experts-671b"))
    assert {layout_cost.Costs(latent, cluster(), Topology(tp)).request_bytes(1) for tp in (1, 8)} == {61 * 576 * 2}


def test_eight_bit_weights_are_counted_as_such() -> None:
    found = model_shape.shape_of(read_config(CLUSTERS / "experts-671b"))
    assert (found.row_bytes, found.attention_bytes, found.block_bytes, found.expert_bytes) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("quantized", "wanted"),
    [
        (r".*\.self_attn\..*", (2, 1, 2, 2)),
        (r".*\.mlp\.experts\..*", (2, 2, 2, 1)),
        (r".*\.layers\.[0-2]\..*", (2, 2, 1, 2)),
        (r".*\.layers\.(?![0-2]\.).*", (2, 1, 2, 1)),
    ],
    ids=["attention", "experts", "dense layers", "sparse layers"],
)
def test_what_is_quantized_in_parts_is_counted_part_by_part(quantized: str, wanted: tuple[float, ...]) -> None:
    """For a model with three dense layers first: attention, blocks and experts each average over
    the layers that have them."""
    config = read_config(CLUSTERS / "experts-671b")
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"group_0": {"targets": [f"re:{quantized}"], "weights": weights}}
    given = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    found = model_shape.shape_of(replace(config, raw={**config.raw, "quantization_config": given}))
    assert (found.row_bytes, found.attention_bytes, found.block_bytes, found.expert_bytes) == wanted


@pytest.mark.parametrize(
    ("n", "summed", "out_8bit", "as_they_are", "per_expert"),
    [
        (2, 2.00, 1.49, 1.99, 8.00),
        (8, 3.50, 1.72, 2.30, 3.50),
        (16, 3.75, 1.13, 1.51, 1.88),
        (32, 3.88, 0.65, 0.87, 0.97),
    ],
)
def test_bytes_of_a_sparse_layer_are_those_of_the_table(
    n: int, summed: float, out_8bit: float, as_they_are: float, per_expert: float
) -> None:
    """In units of rows times hidden size, with eight experts per token: the time if one byte takes
    one second."""
    rows, hidden = 64, 32
    bytes_only = Links(Link(0.0, 1.0), Link(0.0, 1.0), n)
    assert bytes_only.all_reduce(n, 2 * rows * hidden) / rows / hidden == pytest.approx(summed, abs=0.006)
    for wanted, out, is_copy_per_rank in ((out_8bit, 1, True), (as_they_are, 2, True), (per_expert, 2, False)):
        costs = moe(hidden, n, bytes_only, is_copy_per_rank=is_copy_per_rank)
        found = costs.carried(rows / n, out) + costs.carried(rows / n, 2)
        assert found / rows / hidden == pytest.approx(wanted, abs=0.006)


def test_copies_are_those_of_the_table() -> None:
    found = [layout_cost.copies_to_ranks(n, 8) for n in (2, 4, 8, 16, 32, 64)]
    assert found == pytest.approx([1.99, 3.60, 5.25, 6.45, 7.18, 7.58], abs=0.006)


def test_what_goes_to_another_host_goes_there_once() -> None:
    """One row for eight experts goes to 1.992 of two hosts on average, including its own."""
    only_between = Links(Link(0.0, 0.0), Link(0.0, 1.0), 8)
    found = moe(1, 16, only_between, hosts=2, is_copy_per_rank=True).carried(1, 1)
    assert found == pytest.approx(0.5 * 2 * (1 - 0.5**8))
    assert moe(1, 16, only_between, hosts=2).carried(1, 1) == 0.5 * 8


def check_step(module: Any) -> None:
    """Memory time at 10 bytes per second: two layers, three rows of requests with ten tokens
    each."""
    rows = module.Rows(3, 3, 10)
    for topology, weights, cache in (
        (Topology(1), 2 * (1200 + 1200) * 2 + 2000 * 2, 2 * 3 * 10 * 40 * 2),
        (Topology(2), 2 * (600 + 600) * 2 + 1000 * 2, 2 * 3 * 10 * 20 * 2),
        (Topology(4), 2 * (200 + 200 + 300) * 2 + 500 * 2, 2 * 3 * 10 * 20 * 2),
        (Topology(2, dp=2), 2 * (1200 + 600) * 2 + 2000 * 2, 2 * 3 * 10 * 40 * 2),
    ):
        found = module.Costs(DENSE, cluster(), topology).step(rows)
        assert found.weights == pytest.approx(weights / 10) and found.cache == pytest.approx(cache / 10)
        assert found.launches == 2 * 10 * 0.5 and found.arithmetic == found.links == 0


def check_arithmetic(module: Any) -> None:
    """Compute time at one operation per second and free memory: two operations per weight and row,
    and 160 per row and earlier token."""
    slow = replace(SLOW, bandwidth=1e18, flops=1.0, flops_8bit=2.0, launch=0.0)
    for topology, wanted in (
        (Topology(1), 2 * (2 * 3 * (1200 + 1200) + 3 * 10 * 160) + 2 * 3 * 2000),
        (Topology(2), 2 * (2 * 3 * (600 + 600) + 3 * 10 * 80) + 2 * 3 * 1000),
        (Topology(2, dp=2), 2 * (2 * 3 * 1200 + 2 * 6 * 600 + 3 * 10 * 160) + 2 * 3 * 2000),
    ):
        found = module.Costs(DENSE, cluster(device=slow), topology).step(module.Rows(3, 3, 10))
        assert found.total == found.arithmetic == wanted
    halved = module.Costs(replace(DENSE, block_bytes=1.0), cluster(device=slow), Topology(1))
    assert halved.blocks(LAYER, module.Rows(3, 3, 10)).arithmetic == 2 * 3 * 1200 / 2


def check_experts(module: Any) -> None:
    """Sixteen experts of 60 weights, two per token: four tokens use 16 (1 - (7/8)^4) of them."""
    met = 16 * (1 - (7 / 8) ** 4)
    (layer,) = SPARSE.layers
    one = module.Costs(SPARSE, cluster(), Topology(1)).blocks(layer, module.Rows(4, 4, 10))
    divided = module.Costs(SPARSE, cluster(), Topology(2)).blocks(layer, module.Rows(4, 4, 10))
    assert one.weights == pytest.approx(met * 60 * 2 / 10) and divided.weights == pytest.approx(one.weights / 2)
    whole = module.Costs(SPARSE, cluster(imbalance=1.25), Topology(2, dp=2, ep=2))
    assert whole.experts(layer, module.Rows(2, 2, 10)).weights == pytest.approx(1.25 * met / 2 * 60 * 2 / 10)
    assert whole.blocks(layer, module.Rows(2, 2, 10)).total == 0
    many = whole.experts(layer, module.Rows(500, 500, 10))
    assert many.weights == pytest.approx(8 * 60 * 2 / 10), "no rank reads more than it has"
    slow = replace(SLOW, bandwidth=1e18, flops=1.0, launch=0.0)
    busiest = module.Costs(SPARSE, cluster(imbalance=1.25, device=slow), Topology(2, dp=2, ep=2))
    assert busiest.experts(layer, module.Rows(2, 2, 10)).arithmetic == 2 * (2 * 2 * 60) * 1.25


def check_links(module: Any) -> None:
    """One message takes one second. Each layer has two blocks: attention sums over a DP shard, the
    MLP over all ranks."""
    messages = Links(Link(1.0, 0.0), Link(1.0, 0.0), 8)
    rows, model = module.Rows(2, 2, 10), replace(DENSE, layers=(LAYER,))
    for topology, wanted in (
        (Topology(1), 0),
        (Topology(4), 1 + 1 + 3),  # two sums, and logits from four parts
        (Topology(4, dp=4), 3 + 3),  # rows to all ranks, and sums back
        (Topology(4, dp=2), 1 + (3 + 3 + 1 + 1) + 1),
    ):
        assert module.Costs(model, cluster(messages), topology).step(rows).links == wanted
    whole = module.Costs(SPARSE, cluster(messages), Topology(4, dp=2, ep=4))
    assert whole.experts(SPARSE.layers[0], rows).links == 2 + 2 + 1  # dispatch, combine, gather


def check_memory(module: Any) -> None:
    """Nine tenths of 1 MB are usable; a token keeps 2 layers of 40 values of 2 bytes."""
    one = module.Costs(DENSE, cluster(), Topology(1))
    assert one.weight_bytes() == 2 * (2 * 2400 + 4000)
    assert one.cache_tokens(10) == (900_000 - 17_600) * 10 // 1600
    shards = module.Costs(DENSE, cluster(), Topology(2, dp=2))
    assert shards.weight_bytes() == 2 * (2 * (1200 + 600) + 4000)
    assert shards.cache_tokens(10) == 2 * ((900_000 - 15_200) * 10 // 1600)
    assert module.Costs(DENSE, cluster(device=replace(SLOW, memory=1e4)), Topology(1)).cache_tokens(10) == 0
    whole = module.Costs(SPARSE, cluster(), Topology(2, dp=2, ep=2))
    assert whole.weight_bytes() == 2 * (1200 + 4000 + 60 * 8)
    windowed = replace(DENSE, layers=(LAYER, replace(LAYER, window=4)))
    assert module.Costs(windowed, cluster(), Topology(1)).request_bytes(10) == 80 * (10 + 4)


CHECKS = (check_step, check_arithmetic, check_experts, check_links, check_memory)


@pytest.mark.parametrize("check", CHECKS)
def test_a_step_costs_what_is_worked_out_by_hand(check: Any) -> None:
    check(layout_cost)


@pytest.mark.parametrize(
    ("check", "sound", "defect"),
    [
        (check_step, "min(self.topology.attn_tp, self.model.kv_heads)", "self.topology.attn_tp"),
        (check_step, "rows.sequences * seen *", "seen *"),
        (check_step, "held = model.vocabulary * model.hidden / width", "held = model.vocabulary * model.hidden"),
        (check_arithmetic, "rows.count * self.topology.dp\n", "rows.count\n"),
        (check_arithmetic, "layer.score_flops / width", "layer.score_flops"),
        (check_arithmetic, "device.flops_8bit if element == 1 else device.flops", "device.flops"),
        (check_arithmetic, "if computing > reading:", "if computing < reading:"),
        (check_experts, "distinct(every * self.model.chosen,", "distinct(every,"),
        (check_experts, "min(touched * most, model.experts / ep)", "touched * most"),
        (check_experts, "min(touched * most, model.experts / ep)", "min(touched, model.experts / ep)"),
        (check_experts, "layer.expert * most,", "layer.expert,"),
        (check_experts, "tokens = choices / at_once", "tokens = choices"),
        (check_links, "there_and_back = 2 *", "there_and_back ="),
        (check_links, "if topology.dp == 1:", "if topology.dp < 9:"),
        (check_links, "links.all_reduce(width, self", "links.all_reduce(self.topology.tp, self"),
        (check_links, "return work + self._links(moved + together)", "return work + self._links(moved)"),
        (check_memory, "room * length / self.request_bytes(length)), 0) * self.topology.dp", "room * length / self.request_bytes(length)), 0)"),
        (check_memory, "self.topology.ep if self.topology.ep > 1 else tp", "tp * self.topology.ep"),
        (check_memory, "layer.seen(length) for layer", "length for layer"),
    ],
)  # fmt: skip
def test_a_wrong_cost_is_caught(check: Any, sound: str, defect: str) -> None:
    with pytest.raises(AssertionError):
        check(planted(layout_cost, sound, defect))


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ('"by_heads": 2 * config.hidden_size * heads', '"by_heads": config.hidden_size * heads'),
        ("q_rank + kv + rope),", "q_rank + kv),"),
        ("(q_rank or hidden) * heads", "hidden * heads"),
        ("block = 3 * hidden * config.intermediate_size", "block = 2 * hidden * config.intermediate_size"),
    ],
)
def test_a_wrong_count_is_caught(sound: str, defect: str) -> None:
    module, found = planted(model_shape, sound, defect), []
    for name, billions in (("dense-70b", 70.553_706), ("experts-671b", 671.026_419)):
        count = module.shape_of(read_config(CLUSTERS / name)).parameters / 1e9
        found.append(count == pytest.approx(billions, rel=NORMS))
    assert not all(found)


def test_more_of_anything_is_never_slower() -> None:
    config = read_config(CLUSTERS / "experts-671b")
    given = read_cluster(CLUSTERS / "two-hosts.toml")
    model = model_shape.shape_of(config)
    for topology in (Topology(16), Topology(16, 8), Topology(16, 16, 16)):
        times = [
            layout_cost.Costs(model, given, topology).step(layout_cost.Rows(count, count, 1000)).total
            for count in (1, 4, 64, 900)
        ]
        contexts = [
            layout_cost.Costs(model, given, topology).step(layout_cost.Rows(8, 8, seen)).total
            for seen in (1, 100, 9000)
        ]
        assert times == sorted(times) and contexts == sorted(contexts)
        for changes in ({"bandwidth": 1e13}, {"flops": 1e16}, {"launch": 0.0}):
            better = replace(given, device=replace(given.device, **changes))
            fast = layout_cost.Costs(model, better, topology).step(layout_cost.Rows(64, 64, 1000)).total
            assert fast <= times[2]


def test_only_forms_that_the_model_fits_are_named_and_the_fastest_first() -> None:
    config, given = read_config(CLUSTERS / "experts-671b"), read_cluster(CLUSTERS / "two-hosts.toml")
    found = advise(config, given, Load(64, 2048, 512))
    for each in found:
        check_topology(config, each.topology)
        assert each.copies * each.topology.tp == 16
    rates = [each.rate for each in found]
    assert rates == sorted(rates, reverse=True) and rates[0] > 0
    assert all(each.rate == 0 for each in found if not each.running)
    assert len({(each.topology, each.copies) for each in found}) == len(found)


def test_a_rate_counts_the_prompts_between_steps() -> None:
    """The time of a request is the steps of its answer plus the time in which the prompts of all
    requests are computed."""
    config, given = read_config(CLUSTERS / "dense-8b"), read_cluster(CLUSTERS / "two-sockets.toml")
    for each in advise(config, given, Load(16, 512, 256)):
        seconds = 256 * each.step.total + 16 * 512 / each.prompt_rate
        assert each.running == 16 and each.rate == pytest.approx(16 * 256 / seconds)


def test_no_more_requests_run_than_fit() -> None:
    config, given = read_config(CLUSTERS / "dense-70b"), read_cluster(CLUSTERS / "one-host.toml")
    for each in advise(config, given, Load(100_000, 8000, 192)):
        assert each.running * 8192 <= each.cache_tokens
        if each.running:
            assert (each.running + each.copies * each.topology.dp) * 8192 > each.cache_tokens


def test_where_nothing_fits_it_is_said_how_much_weights_need() -> None:
    config, given = read_config(CLUSTERS / "experts-671b"), read_cluster(CLUSTERS / "one-host.toml")
    told = text_of(advise(config, given, Load(1, 8, 8)), "M", given, 3)
    assert told == "no layout has room for a request: a device needs 85.0 GB for weights alone, and has 80\n"


def test_commands_say_widths_and_hosts() -> None:
    config, given = read_config(CLUSTERS / "experts-671b"), read_cluster(CLUSTERS / "two-hosts.toml")
    commands = {each.command("M", 8) for each in advise(config, given, Load(64, 2048, 512))}
    assert "sglcore serve M" in commands and "sglcore serve M --tp 8 --dp 2 --ep 8 --two-batch-overlap auto" in commands
    shards = "sglcore serve M --tp 16 --dp 8 --ep 16 --two-batch-overlap auto"
    assert f"{shards} --nodes 2 --node-rank R --leader HOST:PORT" in commands


def test_two_halves_take_the_longer_of_what_each_computes_and_waits_for_twice() -> None:
    """On one rank there is nothing to overlap, and costs that do not shrink with the rows are paid
    twice."""
    rows = layout_cost.Rows(64, 8, 100)
    for alpha in (1.0, 1e6):
        found = layout_cost.Costs(DENSE, cluster(Links(Link(alpha, 0.0), Link(alpha, 0.0), 8)), Topology(2))
        half = found.step(layout_cost.Rows(32, 4, 100))
        assert half.links > 0
        assert found.halves(rows) == pytest.approx(2 * max(half.links, half.total - half.links))
    alone = layout_cost.Costs(DENSE, cluster(), Topology(1))
    assert alone.halves(rows) == pytest.approx(2 * alone.step(layout_cost.Rows(32, 4, 100)).total)
    assert alone.halves(rows) > alone.step(rows).total
    assert alone.halves(layout_cost.Rows(3, 3, 100)) == pytest.approx(2 * alone.step(layout_cost.Rows(2, 2, 100)).total)


@pytest.mark.parametrize(("prompts", "step", "is_said"), [(1.06, 0.5, True), (0.5, 1.06, True), (1.04, 1.04, False)])
def test_a_command_has_halves_where_one_of_both_is_enough_faster(prompts: float, step: float, is_said: bool) -> None:
    found = advise(read_config(CLUSTERS / "dense-8b"), read_cluster(CLUSTERS / "one-host.toml"), Load(8, 512, 128))
    each = replace(found[0], topology=Topology(2), halved_prompts=prompts, halved_step=step)
    assert ("--two-batch-overlap auto" in each.command("M", 8)) == is_said


def test_halves_of_a_form_are_predicted_for_its_prompts_and_its_steps() -> None:
    config, given, load = (
        read_config(CLUSTERS / "dense-8b"),
        read_cluster(CLUSTERS / "one-host.toml"),
        Load(8, 512, 128),
    )
    each = next(each for each in advise(config, given, load) if each.topology.tp == 8 and each.topology.dp == 1)
    costs = layout_cost.Costs(model_shape.shape_of(config), given, each.topology)
    chunk, rows = layout_cost.Rows(512, 1, 256), layout_cost.Rows(8, 8, 576)
    assert each.halved_prompts == pytest.approx(costs.step(chunk).total / costs.halves(chunk))
    assert each.halved_step == pytest.approx(costs.step(rows).total / costs.halves(rows))


@pytest.mark.parametrize(
    ("changes", "found", "wanted"),
    [
        ({"hidden_size": 64, "linear_num_key_heads": 2}, "has linear_num_key_heads", "plain or latent"),
        ({"conv_L_cache": 3}, "has conv_L_cache", "plain or latent"),
    ],
)
def test_layers_whose_costs_are_not_known_are_refused(
    changes: dict[str, Any], found: str, wanted: str, tmp_path: Path
) -> None:
    raw = json.loads((CLUSTERS / "dense-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ConfigError, match=found) as refused:
        model_shape.shape_of(read_config(tmp_path))
    assert wanted in str(refused.value)


def test_encoders_and_files_of_mixed_types_are_refused(tmp_path: Path) -> None:
    config = read_config(CLUSTERS / "dense-8b")
    pooling: Any = object()
    with pytest.raises(ConfigError, match="an encoder, which has no KV cache"):
        model_shape.shape_of(replace(config, pooling=pooling))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ConfigError, match="in which each tensor has its own type"):
        model_shape.shape_of(replace(config, path=tmp_path / "m.gguf"))


GOOD = (CLUSTERS / "two-hosts.toml").read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[device", "is not TOML"),
        (GOOD.replace("memory_gb", "memory"), r"\[device\] has no memory_gb"),
        (GOOD.replace("gb_s = 450", "gb_s = 0"), r"\[inside\] has gb_s = 0"),
        *((GOOD.replace("count = 2", f"count = {n}"), rf"\[hosts\] has count = {n}; wanted") for n in (2.5, 0)),
        (GOOD.replace("tflops = 989", "tflops = true"), r"\[device\] has tflops = True"),
        (GOOD.replace('"rank"', '"token"'), r"\[experts\] has copies = 'token'"),
        (GOOD.replace("imbalance", "balance"), r"\[experts\] has balance"),
        (GOOD.replace("[between]", "[beside]"), r"has \[beside\]"),
        (GOOD.replace("[between]", "").replace("alpha_us = 10\ngb_s = 50\n", ""), r"has no \[between\]"),
    ],
)
def test_a_clusters_file_says_what_is_wrong_with_it(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=found):
        read_cluster(tmp_path / "c.toml")


def test_a_clusters_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_cluster(tmp_path / "c.toml")


def test_a_clusters_numbers_are_read_in_their_units() -> None:
    given = read_cluster(CLUSTERS / "two-hosts.toml")
    assert given.devices == 16 and given.device.memory == 80e9 and given.device.flops_8bit == 1979e12
    assert given.links.between.alpha == pytest.approx(1e-5) and given.links.between.beta == pytest.approx(1 / 50e9)
    assert given.is_copy_per_rank and given.bytes_out == 1 and given.imbalance == 1.3


def test_what_a_clusters_file_leaves_out_promises_nothing(tmp_path: Path) -> None:
    """Defaults: one host has no links to others; 8 bits are no faster, launches take no time, and
    each expert gets its own copy of a row."""
    file = tmp_path / "c.toml"
    file.write_text(
        "[device]\nmemory_gb = 80\nbandwidth_gb_s = 3350\ntflops = 989\n"
        "[hosts]\ncount = 1\ndevices = 8\n[inside]\nalpha_us = 3\ngb_s = 450\n"
    )
    given = read_cluster(file)
    assert given.device.flops == given.device.flops_8bit == 989e12 and given.device.launch == 0.0
    assert given.links.between == given.links.inside and given.links.per_host == given.devices == 8
    assert (given.is_copy_per_rank, given.bytes_out, given.imbalance) == (False, None, 1.0)


def test_layers_count_what_they_have() -> None:
    """A tied output layer counts once, a layer without shared experts has no dense block, and
    sparse layers keep their sliding windows."""
    dense, sparse = read_config(CLUSTERS / "dense-8b"), read_config(CLUSTERS / "experts-671b")
    table = dense.vocab_size * dense.hidden_size
    tables = [model_shape.shape_of(replace(dense, tie_word_embeddings=is_tied)).tables for is_tied in (True, False)]
    assert tables == [table, 2 * table]
    assert sparse.moe is not None
    windows = tuple(range(1, sparse.num_hidden_layers + 1))
    alone = model_shape.shape_of(replace(sparse, moe=replace(sparse.moe, shared_size=0), sliding_windows=windows))
    assert [layer.num_blocks for layer in alone.layers] == [0 if each else 1 for each in sparse.moe.layers]
    assert tuple(layer.window for layer in alone.layers) == windows

"""What is predicted for a load, how configurations are ordered, and what the table says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import ConfigError
from sglcore.engine.layouts.cluster import Cluster, read_cluster
from sglcore.engine.layouts.layout_advice import CHUNK, ENOUGH, Advice, Load, advise, text_of
from sglcore.engine.layouts.layout_cost import Costs, Rows, Seconds
from sglcore.engine.layouts.model_shape import shape_of
from sglcore.worker.topology import Topology

CLUSTERS = Path(__file__).resolve().parents[3] / "benchmarks" / "clusters"


def cluster(name: str = "one-host", **device: float) -> Cluster:
    found = read_cluster(CLUSTERS / f"{name}.toml")
    return replace(found, device=replace(found.device, **device))


def advice(running: int = 4, rate: float = 100.0, copies: int = 1, **given: Any) -> Advice:
    """Advice on four ranks of tensors, if not said otherwise."""
    fields = {"topology": Topology(4), "step": Seconds(weights=0.004, links=0.001), "prompt_rate": 12345.6}
    fields |= {"cache_tokens": 1234567, "weight_bytes": 5e9, **given}
    return Advice(copies=copies, running=running, rate=rate, **fields)


@pytest.mark.parametrize("name", ["requests", "input_len", "output_len"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_load_has_at_least_one_of_each(name: str, value: int) -> None:
    whole = {"requests": 1, "input_len": 1, "output_len": 1}
    assert Load(**whole).length == 2 and Load(3, 5, 7).length == 12
    with pytest.raises(ConfigError, match=f"{name} is {value}; wanted 1 or more"):
        Load(**{**whole, name: value})


@pytest.mark.parametrize("requests", [1, 5, 8, 13, 100_000])
@pytest.mark.parametrize(("input_len", "output_len"), [(100, 31), (CHUNK + 1, 2), (5000, 1000)])
def test_a_prediction_is_that_of_the_steps_of_its_load(requests: int, input_len: int, output_len: int) -> None:
    """Requests go evenly to all shards of all copies; a step sees a prompt and half of an answer,
    a chunk half of its prompt."""
    config, given, load = read_config(CLUSTERS / "dense-70b"), cluster(), Load(requests, input_len, output_len)
    found = advise(config, given, load)
    assert found and any(each.copies > 1 for each in found) and any(each.topology.dp > 1 for each in found)
    for each in found:
        costs, topology = Costs(shape_of(config), given, each.topology), each.topology
        shards = each.copies * topology.dp
        room = costs.cache_tokens(load.length)
        fitting = room // topology.dp // load.length
        rows = min((requests + shards - 1) // shards, fitting)
        assert each.copies * topology.tp == 8 and each.cache_tokens == room * each.copies
        assert each.running == min(requests, rows * shards)
        chunk = min(CHUNK, input_len)
        prompts = costs.step(Rows(chunk, 1, input_len // 2)).total
        step = costs.step(Rows(max(rows, 1), max(rows, 1), input_len + output_len // 2))
        assert each.step == step and each.prompt_rate == pytest.approx(shards * chunk / prompts)
        seconds = output_len * step.total + each.running * input_len / each.prompt_rate
        assert each.rate == pytest.approx(each.running * output_len / seconds)
        assert each.weight_bytes == costs.weight_bytes()


def test_of_configurations_that_are_as_fast_those_with_shorter_steps_and_fewer_ranks_come_first() -> None:
    config, load = read_config(CLUSTERS / "dense-70b"), Load(64, 1000, 100)
    without = advise(config, cluster(memory=1e9), load)
    assert not any(each.running or each.rate for each in without)
    order = [(each.step.total, each.topology.tp) for each in without]
    assert order == sorted(order) and len(order) > 4
    some = advise(config, cluster(memory=24e9), load)
    fits = [bool(each.running) for each in some]
    assert any(fits) and not all(fits) and fits == sorted(fits, reverse=True)


def test_a_copy_takes_an_equal_part_of_a_host_or_whole_hosts() -> None:
    config = read_config(CLUSTERS / "dense-8b")
    found = cluster("two-hosts")
    for per_host, hosts, widths in (
        (8, 2, {1, 2, 4, 8, 16}),
        (6, 2, {1, 2}),
        (3, 4, {1}),
        (1, 4, {1, 2, 4}),
        (2, 2, {1, 2, 4}),
    ):
        given = replace(found, hosts=hosts, links=replace(found.links, per_host=per_host))
        forms = [each.topology for each in advise(config, given, Load(8, 100, 100))]
        assert {each.tp for each in forms} == widths and len(forms) == len(set(forms))


@pytest.mark.parametrize(
    ("topology", "per_host", "words"),
    [
        (Topology(1), 8, ""),
        (Topology(8), 8, " --tp 8"),
        (Topology(8, dp=2), 8, " --tp 8 --dp 2"),
        (Topology(8, dp=8, ep=8), 8, " --tp 8 --dp 8 --ep 8"),
        (Topology(8), 4, " --tp 8 --nodes 2 --node-rank R --leader HOST:PORT"),
        (Topology(16), 4, " --tp 16 --nodes 4 --node-rank R --leader HOST:PORT"),
    ],
)
def test_a_command_has_the_widths_above_one_and_the_hosts_above_one(
    topology: Topology, per_host: int, words: str
) -> None:
    assert advice(topology=topology).command("M", per_host) == f"sglcore serve M{words}"


@pytest.mark.parametrize(("prompts", "step"), [(ENOUGH, 1.0), (1.0, ENOUGH), (ENOUGH, ENOUGH)])
def test_exactly_enough_is_enough_for_two_micro_batches(prompts: float, step: float) -> None:
    each = advice(halved_prompts=prompts, halved_step=step)
    assert each.is_for_halves and not advice(halved_prompts=ENOUGH - 0.01).is_for_halves


def test_json_has_the_largest_part_of_a_step_and_the_command() -> None:
    found = advice(topology=Topology(8)).as_json("M", 4)
    assert found["most"] == "weights" and found["command"].endswith("--nodes 2 --node-rank R --leader HOST:PORT")
    assert (found["topology"]["tp"], found["topology"]["dp"], found["step"]["links"]) == (8, 1, 0.001)
    parts = ("weights", "cache", "arithmetic", "links", "launches")
    for name in parts:
        assert replace(Seconds(*[0.1] * 5), **{name: 0.2}).most == name


def lines_of(*found: Advice, top: int = 9) -> list[str]:
    return text_of(found, "M", cluster(), top).splitlines()


def test_a_table_has_a_row_for_each_of_the_first_and_the_command_of_the_best() -> None:
    found = [advice(rate=100.0 - number, topology=Topology(2 ** (3 - number))) for number in range(3)]
    for top in (1, 2, 3, 4):
        head, *rest = lines_of(*found, top=top)
        assert head.split()[:4] == ["tp", "dp", "ep", "copies"]
        rows = rest[: rest.index("")]
        assert [row.split()[0] for row in rows] == ["8", "4", "2"][:top]
        assert rest[rest.index("") + 1] == "fastest: sglcore serve M --tp 8"
    row = lines_of(advice(rate=98765.4))[1].split()
    assert row == ["4", "1", "1", "1", "5.00", "weights", "12,346", "1,234,567", "4", "98,765"]
    assert not any(line.endswith(" ") for line in lines_of(*found))


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("width", [1, 2])
def test_a_table_ends_with_what_is_to_be_known_of_the_best_and_of_what_does_not_fit(
    copies: int, others: int, width: int
) -> None:
    best = advice(copies=copies, topology=Topology(width), halved_prompts=1.021, halved_step=0.987)
    after = lines_of(best, *[advice(running=0, rate=0.0)] * others)
    halves = "prompts 1.02, decode steps 0.99 times as fast, at best"
    assert after[4:] == [
        *([f"with two micro-batches (--two-batch-overlap): {halves}"] if width > 1 else []),
        *([f"{copies} servers of it, each with its own devices"] if copies > 1 else []),
        *([f"{others} other layouts have no room for a request"] if others else []),
    ]


def test_where_nothing_fits_the_least_that_a_device_needs_is_told() -> None:
    found = [advice(running=0, rate=0.0, weight_bytes=size) for size in (9e9, 5.06e9, 7e9)]
    assert lines_of(*found) == ["no layout has room for a request: a device needs 5.1 GB for weights alone, and has 80"]

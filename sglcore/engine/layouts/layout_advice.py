"""All parallel configurations in which a cluster can hold a model, fastest first for a given load,
with the command that starts each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglcore.checkpoint.model_config import ModelConfig, read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.core.errors import ConfigError
from sglcore.engine.layouts.cluster import Cluster
from sglcore.engine.layouts.layout_cost import Costs, Rows, Seconds
from sglcore.engine.layouts.model_shape import shape_of
from sglcore.worker.topology import Topology, divisors

CHUNK = 2048
"""Assumed prompt tokens in one prefill step of a shard."""
ENOUGH = 1.05
"""The predicted speed-up that two micro-batches must have; a start with `auto` measures and
decides."""


@dataclass(frozen=True, slots=True)
class Load:
    """The assumed load: `requests` running requests, each with a prompt of `input_len` tokens and
    an answer of `output_len` tokens."""

    requests: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are not above zero."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}", wanted="1 or more")

    @property
    def length(self) -> int:
        """Tokens of a request at its end, prompt included."""
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Advice:
    """One parallel configuration and its predicted performance; `advise` makes it.

    Rates, `running` and `cache_tokens` are sums over all copies.
    """

    topology: Topology
    """How the ranks of one copy divide the model."""
    copies: int
    """Copies of the model on the cluster."""
    step: Seconds
    """Seconds of one decode step, divided by use."""
    prompt_rate: float
    """Prompt tokens per second while only prompts are prefilled."""
    rate: float
    """Output tokens per second, with the time of the prompts counted. 0: not one request fits."""
    running: int
    """Requests of the load that run at the same time."""
    cache_tokens: int
    """Tokens that fit in the KV caches."""
    weight_bytes: float
    """Bytes of weights on each device."""
    halved_prompts: float = 1.0
    """Predicted speed-up of a prefill step that runs as two micro-batches."""
    halved_step: float = 1.0
    """Predicted speed-up of a decode step that runs as two micro-batches."""

    @property
    def is_for_halves(self) -> bool:
        """Whether the predicted speed-up of two micro-batches is at least ENOUGH, so that `command`
        has `--two-batch-overlap auto`."""
        return max(self.halved_prompts, self.halved_step) >= ENOUGH

    def command(self, model: str, per_host: int) -> str:
        """Return the command that starts one copy of `model`, to run on each of its hosts;
        `per_host`: devices of a host. For several hosts it has R and HOST:PORT to fill in."""
        topology = self.topology
        widths = (("tp", topology.tp), ("dp", topology.dp), ("ep", topology.ep))
        words = [f"--{name} {value}" for name, value in widths if value > 1]
        words += ["--two-batch-overlap auto"] if self.is_for_halves else []
        if topology.tp > per_host:
            words += [f"--nodes {topology.tp // per_host}", "--node-rank R", "--leader HOST:PORT"]
        return " ".join(("sglcore serve", model, *words))

    def as_json(self, model: str, per_host: int) -> dict[str, Any]:
        """Return all fields as plain values, with `command` (made with `model` and `per_host`), and
        `most`: the use that takes the most time in a step."""
        return {**asdict(self), "most": self.step.most, "command": self.command(model, per_host)}


def advise(config: ModelConfig, cluster: Cluster, load: Load) -> tuple[Advice, ...]:
    """Return the ways to divide the model over all devices of the cluster, best first.

    They are sorted by output tokens per second, then by the time of a step; those without room for
    one request come last. Raises ConfigError if the costs of the model's layers are unknown.
    """
    model = shape_of(config)
    found = [_advice(Costs(model, cluster, each), load) for each in _forms(config, cluster)]
    return tuple(sorted(found, key=lambda each: (-each.rate, each.step.total, each.topology.tp)))


def advise_folder(folder: Path, cluster: Cluster, load: Load) -> tuple[Advice, ...]:
    """Return what `advise` returns for the model of a checkpoint folder: the ways to divide it over
    all devices, best first. Raises ConfigError if the folder cannot be read or its costs are
    unknown."""
    return advise(read_config(folder), cluster, load)


def _forms(config: ModelConfig, cluster: Cluster) -> Iterator[Topology]:
    """Yield the topologies that use all devices and that the model allows; a copy takes an equal
    part of a host, or whole hosts."""
    per_host = cluster.links.per_host
    for tp in divisors(cluster.devices):
        if (tp <= per_host and per_host % tp) or (tp > per_host and tp % per_host):
            continue
        for dp in divisors(tp):
            for ep in dict.fromkeys((1, tp)):
                topology = Topology(tp, dp, ep)
                try:
                    check_topology(config, topology)
                except ConfigError:
                    continue
                yield topology


def _advice(costs: Costs, load: Load) -> Advice:
    topology = costs.topology
    copies, dp = costs.cluster.devices // topology.tp, topology.dp
    tokens = costs.cache_tokens(load.length)
    fitting = tokens // dp // load.length
    each = min(-(-load.requests // (copies * dp)), fitting)  # requests of each shard
    running = min(load.requests, each * copies * dp)
    rows = Rows(max(each, 1), max(each, 1), load.input_len + load.output_len // 2)
    chunk = min(CHUNK, load.input_len)
    chunks = Rows(chunk, 1, load.input_len // 2)
    step, prompts = costs.step(rows), costs.step(chunks)
    prompt_rate = copies * dp * chunk / prompts.total
    answers = running * load.output_len
    seconds = load.output_len * step.total + running * load.input_len / prompt_rate
    return Advice(
        topology,
        copies,
        step,
        prompt_rate,
        answers / seconds,
        running,
        tokens * copies,
        costs.weight_bytes(),
        halved_prompts=prompts.total / costs.halves(chunks),
        halved_step=step.total / costs.halves(rows),
    )


def text_of(found: Sequence[Advice], model: str, cluster: Cluster, top: int) -> str:
    """Return a table of the first `top` configurations of `found`, which `advise` returned, then
    the command of the best. Configurations without room for one request are only counted; if all
    are, one line says what the weights need."""
    fitting = [each for each in found if each.running]
    per_host = cluster.links.per_host
    if not fitting:
        need = min(each.weight_bytes for each in found) / 1e9
        return (
            f"no layout has room for a request: a device needs {need:.1f} GB for weights alone, "
            f"and has {cluster.device.memory / 1e9:g}\n"
        )
    head = ("tp", "dp", "ep", "copies", "step ms", "most of it", "prompt tok/s", "cache tokens", "running", "tok/s")
    rows = [head, *(_row(each) for each in fitting[:top])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    best = fitting[0]
    lines += ["", f"fastest: {best.command(model, per_host)}"]
    if best.topology.tp > 1:
        faster = f"prompts {best.halved_prompts:.2f}, decode steps {best.halved_step:.2f} times as fast"
        lines.append(f"with two micro-batches (--two-batch-overlap): {faster}, at best")
    if best.copies > 1:
        lines.append(f"{best.copies} servers of it, each with its own devices")
    if len(found) > len(fitting):
        lines.append(f"{len(found) - len(fitting)} other layouts have no room for a request")
    return "".join(f"{line}\n" for line in lines)


def _row(each: Advice) -> tuple[str, ...]:
    topology = each.topology
    numbers = (topology.tp, topology.dp, topology.ep, each.copies)
    return (
        *map(str, numbers),
        f"{each.step.total * 1e3:.2f}",
        each.step.most,
        f"{each.prompt_rate:,.0f}",
        f"{each.cache_tokens:,}",
        str(each.running),
        f"{each.rate:,.0f}",
    )

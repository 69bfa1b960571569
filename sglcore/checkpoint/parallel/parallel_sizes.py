"""Which topologies fit a model: applies each constraint of `tensor_parallel.py` to the number of
ranks that divide its object."""

from __future__ import annotations

from dataclasses import replace

from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.parallel.tensor_parallel import MOST_WIDTH, Constraint, constraints
from sglcore.core.errors import ConfigError
from sglcore.worker.topology import Topology, divisors


def check_topology(config: ModelConfig, topology: Topology) -> None:
    """Raise ConfigError if the model can not be divided over the topology; the error names what
    does not divide, and the sizes of `tp` that fit, or those of `ep` if experts do not divide."""
    _check_experts(config, topology)
    for rule in constraints(config):
        if not _fits(rule, topology):
            legal = ", ".join(map(str, legal_tp(config, topology)))
            shards = f" in {topology.dp} shards of requests" if topology.dp > 1 else ""
            raise ConfigError(
                f"tp is {topology.tp}{shards}, and this model has {rule.size} {rule.name}",
                wanted=f"one of {legal}" if legal else "another dp or ep: no tp fits these",
                remedy="set --tp to one of them" if legal else "",
            )


def legal_tp(config: ModelConfig, topology: Topology) -> tuple[int, ...]:
    """Return each tensor parallel size up to MOST_WIDTH that fits `dp` and `ep` of the topology,
    ascending. Its own `tp` does not count, and neither does the number of experts.
    """
    rules = constraints(config)
    widths = [tp for tp in range(1, MOST_WIDTH + 1) if not tp % topology.dp and not tp % topology.ep]
    return tuple(tp for tp in widths if all(_fits(rule, replace(topology, tp=tp)) for rule in rules))


def _fits(rule: Constraint, topology: Topology) -> bool:
    width = {"attn_tp": topology.attn_tp, "tp": topology.tp, "expert": 1 if topology.ep > 1 else topology.tp}[rule.axis]
    return rule.fits(rule.size, width)


def _check_experts(config: ModelConfig, topology: Topology) -> None:
    if topology.ep == 1:
        return
    if config.moe is None:
        raise ConfigError(f"ep is {topology.ep}, and this model has no experts", remedy="--ep 1")
    if is_gguf(config.path):
        raise ConfigError(
            f"ep is {topology.ep}, and experts in a GGUF file cannot be read separately",
            remedy="--ep 1",
        )
    count = config.moe.num_experts
    if count % topology.ep:
        legal = ", ".join(str(width) for width in divisors(topology.tp) if not count % width)
        raise ConfigError(
            f"ep is {topology.ep}, and this model has {count} experts",
            wanted=f"one of {legal}",
            remedy="set --ep to one of them",
        )

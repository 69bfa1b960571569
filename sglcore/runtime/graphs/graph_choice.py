"""Choose and capture graphs: first the kind, from configuration and facts, then the sizes. Each
decision has a ledger row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, resolve
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.graphs.decode_graphs import one_shard
from sglcore.runtime.graphs.graph_backend import GraphBackend, PromptBackend
from sglcore.runtime.graphs.graph_limits import MOST_CAPTURED, MOST_RECORDED, Buckets, batch_sizes, limit_row, within
from sglcore.runtime.graphs.prefill_graphs import PromptForward, token_buckets
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.streams import Streams
from sglcore.step.sizing import size_text


class RanksInGraphs(Protocol):
    """The part of `Groups`, the communication groups of a rank, that the choice of graphs uses."""

    def reason_against_graphs(self, kind: str) -> str:
        """Return why the ranks cannot replay steps as this kind of graph; empty if they can."""
        ...


def make_backend(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    streams: Streams,
    attn_backend: AttentionBackend,
    ledger: DecisionLedger,
    groups: RanksInGraphs | None = None,
) -> GraphBackend | None:
    """Return the configured graph mechanism, or the device's own.

    None means eager, with a ledger row: graphs are off, or attention or the ranks cannot replay
    them. Raises ConfigError for a kind that the package does not offer.
    """
    kind, is_automatic = facts.graph_kind(config.graph), config.graph == "auto"
    offered = ", ".join(package.graphs) or "none"
    if kind == "off":
        why = "this device uses none by default" if is_automatic else "start-up waits for no capture"
        ledger.record(Row("graph", config.graph, "eager", why, f"--graph with one of: {offered}"))
        return None
    if kind not in package.graphs:
        raise ConfigError(
            f"graph kind {kind!r} is not offered by device {package.name!r}", wanted=f"off or one of {offered}"
        )
    reason = _reason_against(facts, attn_backend) or reason_of_ranks(groups, kind)
    if reason:
        row = Row("graph", config.graph, "eager", reason, "--graph off", downgrade=not is_automatic)
        ledger.record(row)
        return None
    return resolve(package.graphs[kind], package.name)(facts, streams)


def reason_of_ranks(groups: RanksInGraphs | None, kind: str) -> str:
    """Return why several ranks cannot replay steps as this kind of graph.

    Empty if they can, and for one rank.
    """
    return "" if groups is None else groups.reason_against_graphs(kind)


def _reason_against(facts: Facts, attn_backend: AttentionBackend) -> str:
    """Return why no graph of any kind can be captured; empty if one can."""
    if attn_backend.shape.is_encoder:
        return "an encoder does not decode, and graphs are for decoding"
    if facts.has_streams and "capture" not in attn_backend.facts.features:
        return f"the attention backend {type(attn_backend).__name__} cannot run inside a captured stream"
    return ""


def _prompt_forward(config: EngineConfig, backend: GraphBackend, runner: ModelRunner) -> PromptForward | None:
    """Return what prefill graphs capture; None if the mechanism does not capture prefill."""
    if not isinstance(backend, PromptBackend):
        return None
    most = runner.prefill_registry.max_num_tokens
    asked = tuple(sorted(size for size in set(config.graph_token_buckets) if 0 < size <= most))
    return PromptForward(runner.model, runner.prefill_registry, asked or token_buckets(most))


def _within_limit(
    config: EngineConfig,
    facts: Facts,
    runner: ModelRunner,
    prompts: PromptForward | None,
    ledger: DecisionLedger,
    widths: tuple[int, ...],
) -> tuple[tuple[int, ...], PromptForward | None]:
    """Return the decode sizes, and the prefill forward with its sizes, that the device can hold.

    A prefill has one piece more than it has layers with attention or states.
    """
    most = runner.decode_registry.max_bs // max(widths)
    sizes = config.graph_buckets or batch_sizes(min(most, MOST_CAPTURED if facts.has_streams else MOST_RECORDED))
    rows = (size * width for size in sizes for width in widths)
    decode = tuple(size for size in rows if 0 < size <= runner.decode_registry.max_bs)
    states = runner.state_pool
    pieces = len(runner.model.attention_layers) + (0 if states is None else len(states.layers)) + 1
    asked = Buckets(tuple(sorted(set(decode))), () if prompts is None else prompts.buckets, pieces)
    fit = within(asked, facts.most_graph_segments)
    row = limit_row(asked, fit, facts.most_graph_segments)
    if row is not None:
        ledger.record(row)
    return fit.decode, None if prompts is None else replace(prompts, buckets=fit.prompts)


def capture(
    config: EngineConfig,
    facts: Facts,
    backend: GraphBackend,
    runner: ModelRunner,
    ledger: DecisionLedger,
    progress: Callable[[int, int], None],
    widths: tuple[int, ...] = (1,),
    takes_prompts: bool = True,
) -> GraphRunner:
    """Capture every bucket and record in the ledger what is replayed. Waits for the device.

    Decode sizes are multiplied by each of `widths`, the rows per request. Prefill is captured if
    `takes_prompts`, the mechanism can, and there is one data-parallel shard: several have different
    numbers of prompt rows in each step. Raises ConfigError if no decode size fits the registry.
    """
    ranks = runner.extensions.ranks
    has_shards = ranks is not None and ranks.has_shards
    wanted = _prompt_forward(config, backend, runner) if takes_prompts and not has_shards else None
    buckets, prompts = _within_limit(config, facts, runner, wanted, ledger, widths)
    if ranks is not None:  # a capture may run its exchanges, so all ranks capture the same, in this order
        ranks.check_same("graph sizes", (buckets, () if prompts is None else prompts.buckets))
    against = "" if runner.halves is None else reason_against_halves(backend, widths, has_shards)
    captured = GraphRunner(
        backend,
        runner.decode_registry,
        runner.context(None),
        runner.model,
        buckets,
        progress,
        prompts=prompts,
        streams=runner.streams,
        shadow=config.shadow,
        needs_host_lengths=runner.options.needs_host_lengths,
        halves=None if against else runner.halves,
        plan_of=one_shard if ranks is None else ranks.plan_of_bucket,
    )
    if not captured.buckets:
        captured.close()
        raise ConfigError(
            f"graph_buckets {config.graph_buckets} has no size for at most {runner.decode_registry.max_bs} requests",
            remedy="give one, or set graph to off",
        )
    kind = facts.graph_kind(config.graph)
    ledger.record(Row("graph", config.graph, kind, _summary(captured), "--graph off"))
    if runner.halves is not None:
        ledger.record(_halves_row(config, captured, against))
    if config.shadow:
        what = f"one replay in {config.shadow} also runs eagerly and is compared"
        ledger.record(Row("shadow", str(config.shadow), what, "requested; each comparison waits", "shadow=0"))
    return captured


def check_captured(runner: ModelRunner) -> None:
    """Raise CollectiveError on every rank unless all ranks have graphs of the same sizes, or none:
    from these sizes and a step's plan each rank derives the graph that all replay. Waits for the
    other ranks, if there are any.
    """
    if runner.extensions.ranks is not None:
        sizes = () if runner.graphs is None else runner.graphs.buckets
        runner.extensions.ranks.check_same("captured sizes", sizes)


def reason_against_halves(backend: GraphBackend, widths: tuple[int, ...], has_shards: bool = False) -> str:
    """Return why decode graphs of this mechanism cannot hold two micro-batches.

    Empty if they can.
    """
    if has_shards:
        return "data-parallel shards split a step where each has rows, and a graph is split at one place"
    if backend.kind != "full":
        return (
            f"graphs of kind {backend.kind} are captured in parts, or as a list of calls, which two micro-batches "
            "would mix"
        )
    if widths != (1,):
        return "steps that verify draft tokens vary in rows per request, and a graph is split at one place"
    return ""


def _halves_row(config: EngineConfig, captured: GraphRunner, against: str) -> Row:
    """Return the ledger row for decode batches that run as two micro-batches in graphs. `against`:
    why none do; empty: those of `captured` that are split do.
    """
    topic, asked, sizes = "two-batch overlap of graphs", config.two_batch_overlap, captured.decode.in_halves
    if against:
        return Row(
            topic,
            asked,
            "off",
            f"{against}: batches in graphs replay whole",
            "--graph full or off",
            downgrade=asked == "on",
        )
    if not sizes:
        return Row(topic, asked, "off", "no captured batch size is split: decodes replay whole", "--graph off")
    return Row(
        topic, asked, "on", f"decodes at batch sizes {', '.join(map(str, sizes))} hold two micro-batches", "--graph off"
    )


def _summary(captured: GraphRunner) -> str:
    sizes = ", ".join(map(str, captured.buckets))
    took = "" if captured.memory is None else f"; {size_text(captured.memory)} of device memory"
    prompts = captured.prompts
    if prompts is None or not prompts.sizes:
        return f"decode at batch sizes {sizes}; larger batches and prompts run eagerly{took}"
    least, most = prompts.sizes[0], prompts.sizes[-1]
    small = f"prompts of fewer than {-(-least // 2)} tokens and larger batches run eagerly"
    found = (
        f"prompts at {len(prompts.sizes)} sizes from {least} to {most} tokens by {prompts.backend.prompt_kind} graphs"
    )
    return f"decode at batch sizes {sizes}; {found}; {small}{took}"

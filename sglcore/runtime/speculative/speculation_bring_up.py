"""The nested order of the bring-up for speculation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up_steps import Again, NestedOrder
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, resolve
from sglcore.runtime.graphs.graph_choice import capture, make_backend
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.loaded_model import LoadedModel, Progress
from sglcore.runtime.memory.geometry import layer_shapes
from sglcore.runtime.memory.make_pools import Pools, make_rows
from sglcore.runtime.memory.pools import PER_HEAD, PoolKind
from sglcore.runtime.memory.read_only import ReadOnlyPool
from sglcore.runtime.model_runner import Extensions, Model, ModelRunner
from sglcore.runtime.speculative.speculation_choice import (
    DRAFT_LOADER,
    TREE_MASK,
    Speculation,
    choose_speculation,
    promise,
)
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.runtime.streams import Streams
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.step.sizing import MemoryBudget, MemorySizes, size_text
from sglcore.worker.model_worker import Limits, Trial

if TYPE_CHECKING:
    from sglcore.runtime.memory.pools import TokenToKVPool
    from sglcore.runtime.parallel.rank_groups import Groups


def speculation(
    config: EngineConfig,
    facts: Facts,
    ledger: DecisionLedger,
    progress: Progress,
    model_path: Path,
    kernels: KernelTable,
    model: LoadedModel,
    groups: Groups | None = None,
    package: DevicePackage | None = None,
) -> Speculation | None:
    """Bring-up step: choose how draft tokens are made, load the draft model if there is one, and
    record the choice in the ledger.

    None: every decode step has one token per request. Raises as `choose_speculation` does.
    """
    why, remedy = "", ""
    if groups is not None and config.speculative == "auto":
        # Each rank would time a trial by itself.
        why = "this model runs on several ranks, which do not measure whether speculation is faster"
        remedy = "--speculative with a kind, which is used without measuring"
    elif config.speculative == "auto" and config.prompt_slices != "off":
        why, remedy = "prompts run in slices of layers, as requested", "--prompt-slices off"
    if why:
        ledger.record(Row("speculative", config.speculative or "not asked", "off", why, remedy))
        return None

    def load(folder: Path, kind: str) -> Any:
        given = {"facts": facts, "kernels": kernels, "ledger": ledger, "progress": progress, "groups": groups}
        return resolve(DRAFT_LOADER)(config, folder, kind, model, **given)

    no_trees = "" if package is None or config.draft_width == 1 else reason_against_trees(package, config)
    ranks = {"is_divided": groups is not None, "in_shards": groups is not None and groups.place.topology.dp > 1}
    return choose_speculation(config, model, model_path, ledger, load, no_trees=no_trees, **ranks)


def reason_against_trees(package: DevicePackage, config: EngineConfig) -> str:
    """Return why no (chosen) attention backend of the package can mask single KV slots.

    Empty if one can.
    """
    asked = config.attention_backend
    offered = (
        package.attention if asked is None else {asked: package.attention[asked]} if asked in package.attention else {}
    )
    for ref in offered.values():
        try:
            if TREE_MASK in resolve(ref, package.name).facts.features:
                return ""
        except SglcoreError:
            raise
        except Exception:
            continue  # Its library is missing or fails; the selection of attention says so.
    names = ", ".join(offered) or asked
    return f"{names}: no attention backend of {package.name} masks single KV slots of a row ({TREE_MASK})"


def draft(speculation: Speculation | None) -> LoadedModel | None:
    """Bring-up step: return the draft model; None without speculation, or if its kind has none."""
    return None if speculation is None else speculation.draft


def less_draft_probs(
    config: EngineConfig, model: LoadedModel, speculation: Speculation, budget: MemoryBudget, ledger: DecisionLedger
) -> MemoryBudget:
    """Return the budget less the buffer of draft distributions, which is recorded in the ledger and
    not allocated here; the budget itself if there is no such buffer.

    Raises ConfigError if the buffer does not fit.
    """
    shape = speculation.draft_probs_shape(config.max_requests, model.config.vocab_size)
    if not shape:
        return budget
    taken, remedy = torch.float32.itemsize * math.prod(shape), "lower max_requests or draft_tokens"
    if taken > budget.available:
        raise ConfigError(
            f"the distributions of draft tokens take {size_text(taken)}, {size_text(budget.available)} are available",
            remedy=f"{remedy}, or --speculative-verify coupled",
        )
    why = f"the distributions of draft tokens for {config.max_requests} requests, in addition to the pools"
    ledger.record(Row("draft probabilities", config.speculative_verify, size_text(taken), why, remedy))
    return replace(budget, available=budget.available - taken)


def draft_pools(
    config: EngineConfig,
    facts: Facts,
    draft: LoadedModel | None,
    pools: Pools,
    sizes: MemorySizes,
    pool_kind: PoolKind = PER_HEAD,
) -> Pools | None:
    """Bring-up step: return the pools of the draft model; None without one.

    Its own KV slots or rows are allocated, or are a read-only view of the target's. Page table and
    token table are the target's.
    """
    if draft is None:
        return None
    layers, device = draft.attention_layers, facts.tensor_device
    if all(layer.is_frozen for layer in layers):
        cells: Any = ReadOnlyPool(cast("TokenToKVPool", pools.token_to_kv))
    elif any(layer.rows for layer in layers):
        cells = make_rows(layers, sizes, device, config.poison, None)
    else:
        shapes = layer_shapes(layers)
        cells = pool_kind.make_pool(sizes.num_pages, sizes.page_size, shapes, draft.dtype, device, draft.kernels)
    return Pools(pools.req_to_token, cells, pools.token_table)


def draft_heads(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    progress: Progress,
    streams: Streams,
    speculation: Speculation | None,
    draft_runner: ModelRunner | None,
) -> tuple[ModelRunner, ...]:
    """Bring-up step: return a runner for each layer after the first of a draft with one token per
    layer, in order; empty for any other draft.

    They share pools, attention and buffers with the first, and have graphs of the same sizes if it
    has. Waits for the device if it captures.
    """
    if speculation is None or speculation.draft is None or draft_runner is None or speculation.heads == 1:
        return ()
    model: Any = speculation.draft
    made = list[ModelRunner]()
    for head in model.heads[1:]:
        each = of_head(draft_runner, head)
        if draft_runner.graphs is not None:
            # The ledger rows of the first layer hold for all.
            unsaid, told = DecisionLedger(), partial(progress, "capturing graphs")
            backend = make_backend(config, package, facts, streams, each.attn_backend, unsaid, each.extensions.ranks)
            assert backend is not None
            widths = speculation.shape_of(speculation.draft).widths
            each.graphs = capture(config, facts, backend, each, unsaid, told, widths)
        made.append(each)
    return tuple(made)


def of_head(runner: ModelRunner, model: Model) -> ModelRunner:
    """Return an eager runner of another model with the pools, attention and buffers of `runner`."""
    return ModelRunner(
        model,
        runner.attn_backend,
        runner.decode_registry,
        runner.prefill_registry,
        runner.token_table,
        runner.options,
        Extensions(window_table=runner.extensions.window_table, ranks=runner.extensions.ranks),
        runner.streams,
    )


def draft_ledger(ledger: DecisionLedger) -> DecisionLedger:
    """Return the ledger for decisions on the draft model."""
    return ledger.about("draft")


def trial(
    package: DevicePackage,
    model: LoadedModel,
    pools: Pools,
    limits: Limits,
    speculation: Speculation | None,
    worker: TpModelWorker,
) -> Trial | None:
    """Bring-up step: return the speculative worker with a plain one, to try which is faster. The
    trial does not run here.

    None unless speculation is kept only if it is faster (`Speculation.is_tried`).
    """
    if speculation is None or not speculation.is_tried or not isinstance(worker, SpeculativeWorker):
        return None
    plain = resolve(package.worker, package.name)(worker.runner, pools.token_table, limits)
    first = model.config.words.get("bos_token_id")
    prompt = np.array([first if isinstance(first, int) else 0], dtype=np.int32)
    return Trial(f"{speculation.summary}; {promise(speculation.rule)}", worker, plain, prompt, worker.drafter.close)


SPECULATION = NestedOrder(
    "speculation",
    {
        "model": (speculation, draft),
        "pools": (draft_pools,),
        "runner": (
            draft_ledger,
            Again(
                "draft_runner",
                ("attention", "runner"),
                {"model": "draft", "pools": "draft_pools", "ledger": "draft_ledger"},
            ),
            draft_heads,
        ),
        "worker": (trial,),
    },
    exports=("speculation", "draft_runner", "draft_heads", "trial"),
)
"""How draft tokens are made: the choice and the draft model with the weights, pools and runners of
the draft, and the trial that starting an engine runs."""

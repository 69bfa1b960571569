"""The steps of a bring-up that are there for a model that proposes tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.package import DevicePackage, resolve
from sglcore.device.worker import Limits, Trial
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.loaded_model import LoadedModel, Progress
from sglcore.runtime.memory.geometry import layer_shapes
from sglcore.runtime.memory.make import Pools, make_rows
from sglcore.runtime.memory.pools import PER_HEAD, PoolKind
from sglcore.runtime.memory.read_only import ReadOnlyPool
from sglcore.runtime.speculative.choice import DRAFT_LOADER, Speculation, choose_speculation, promise
from sglcore.runtime.speculative.worker import SpeculativeWorker
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.step.hisparse import HiSparseConfig
from sglcore.step.sizing import MemoryBudget, MemorySizes, size_text

if TYPE_CHECKING:
    from sglcore.runtime.memory.pools import TokenToKVPool
    from sglcore.runtime.parallel.group import Groups


def speculation(
    config: EngineConfig,
    facts: Facts,
    ledger: DecisionLedger,
    progress: Progress,
    model_path: Path,
    kernels: KernelTable,
    model: LoadedModel,
    hisparse_config: HiSparseConfig | None = None,
    groups: Groups | None = None,
) -> Speculation | None:
    """What proposes tokens, with the model that does if one does; None: every step brings one token of a request."""
    why, remedy = "", ""
    if hisparse_config is not None:
        why, remedy = (
            "rows lie in host memory, of which a step brings those of one token of a request",
            "--hisparse off",
        )
    elif groups is not None and groups.place.topology.dp > 1:
        why = "requests are in shards, and an idle one proposes nothing with the others"
        remedy = "--dp 1"
    elif groups is not None and config.speculative == "auto":
        # Each rank would time a trial for itself.
        why = "several ranks hold this model, which do not try whether proposals are faster"
        remedy = "--speculative with a kind, which is then taken as it is"
    elif config.speculative == "auto" and config.prompt_slices != "off":
        why, remedy = "prompts come by slices of layers, as was asked for", "--prompt-slices off"
    if why:
        ledger.record(Row("speculative", config.speculative or "not asked", "off", why, remedy))
        return None

    def load(folder: Path, kind: str) -> Any:
        given = {"facts": facts, "kernels": kernels, "ledger": ledger, "progress": progress, "groups": groups}
        return resolve(DRAFT_LOADER)(config, folder, kind, model, **given)

    return choose_speculation(config, model, model_path, ledger, load, is_divided=groups is not None)


def draft(speculation: Speculation | None) -> LoadedModel | None:
    """The model that proposes tokens, if one does."""
    return None if speculation is None else speculation.draft


def beside_laws(
    config: EngineConfig, model: LoadedModel, speculation: Speculation, budget: MemoryBudget, ledger: DecisionLedger
) -> MemoryBudget:
    """What is left beside what proposals are drawn from. Raises ConfigError where that does not fit."""
    shape = speculation.laws_shape(config.max_requests, model.config.vocab_size)
    if not shape:
        return budget
    taken, remedy = torch.float32.itemsize * math.prod(shape), "lower max_requests or draft_tokens"
    if taken > budget.available:
        raise ConfigError(
            f"what proposals are drawn from takes {size_text(taken)}, {size_text(budget.available)} are available",
            remedy=f"{remedy}, or --speculative-verify coupled",
        )
    why = f"what proposals of {config.max_requests} requests are drawn from, kept beside the pools"
    ledger.record(Row("draft laws", config.speculative_verify, size_text(taken), why, remedy))
    return replace(budget, available=budget.available - taken)


def draft_pools(
    config: EngineConfig,
    facts: Facts,
    draft: LoadedModel | None,
    pools: Pools,
    sizes: MemorySizes,
    pool_kind: PoolKind = PER_HEAD,
) -> Pools | None:
    """The cells or rows of the model that proposes, or those of the model that verifies, which it only reads: pages and slots are that
    one's."""
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


def draft_ledger(ledger: DecisionLedger) -> DecisionLedger:
    """Where what is chosen for the model that proposes is written."""
    return ledger.about("draft")


def trial(
    package: DevicePackage,
    model: LoadedModel,
    pools: Pools,
    limits: Limits,
    speculation: Speculation | None,
    worker: TpModelWorker,
) -> Trial | None:
    """The worker beside one that proposes nothing, where proposals are made only if that is faster."""
    if speculation is None or not speculation.is_tried or not isinstance(worker, SpeculativeWorker):
        return None
    plain = resolve(package.worker, package.name)(worker.runner, pools.token_table, limits, None)
    first = model.config.words.get("bos_token_id")
    prompt = np.array([first if isinstance(first, int) else 0], dtype=np.int32)
    return Trial(f"{speculation.summary}; {promise(speculation.rule)}", worker, plain, prompt, worker.drafter.close)

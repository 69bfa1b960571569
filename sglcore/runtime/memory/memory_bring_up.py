"""The bring-up steps that size memory and make the pools."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.runtime.attention.sparse.token_queries import score_bytes
from sglcore.runtime.hisparse.hisparse_auto import chosen_hisparse, measure_with, shapes_with
from sglcore.runtime.hisparse.hisparse_bring_up import beside_buffers, reason_against_auto
from sglcore.runtime.hisparse.hisparse_shape import swap_shape
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.memory.geometry import fitting_page_size, geometry, has_window, keeps_window, rows_row
from sglcore.runtime.memory.make_pools import Pools, WindowPools, make_cells, make_rows
from sglcore.runtime.memory.pools import (
    PER_HEAD,
    LayerShapes,
    PoolKind,
    ReqToTokenPool,
    TokenToKVPool,
    WindowTable,
)
from sglcore.runtime.memory.shared_layers import sharing_of
from sglcore.runtime.memory.states import StatePool, taken_bytes
from sglcore.runtime.speculative.speculation_bring_up import less_draft_probs
from sglcore.runtime.speculative.speculation_choice import Speculation, most_drafts, verified_rows
from sglcore.runtime.token_table import TokenTable
from sglcore.step.hisparse_config import HiSparseConfig
from sglcore.step.sizing import Geometry, MemoryBudget, MemorySizes, size_pools, size_text

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups


def sizes(
    config: EngineConfig,
    facts: Facts,
    model: LoadedModel,
    device_memory: MemoryBudget,
    ledger: DecisionLedger,
    pool_kind: PoolKind = PER_HEAD,
    speculation: Speculation | None = None,
    hisparse_config: HiSparseConfig | None = None,
    groups: Groups | None = None,
) -> MemorySizes:
    """Bring-up step: return the numbers of pages, requests and snapshots and the context length,
    from the free memory and the bytes that the layers keep; record them in the ledger.

    All ranks have the same sizes: those of the rank with the least memory, so with `groups` it
    waits for the other ranks. With `--hisparse auto` also chooses whether KV entries go to host
    memory, which measures and waits. Raises ConfigError for a KV dtype or page size that does not
    fit the model, or if memory does not suffice.
    """
    if groups is not None:
        device_memory = least_of_ranks(facts, device_memory, groups)
    given = config, facts, model, device_memory
    if hisparse_config is not None and hisparse_config.is_auto:
        hisparse_config = _chosen(*given, ledger, pool_kind, speculation, hisparse_config, groups)
    made = _sized(*given, ledger, pool_kind, speculation, hisparse_config)
    return made if hisparse_config is None else replace(made, hisparse=hisparse_config)


def _chosen(
    config: EngineConfig,
    facts: Facts,
    model: LoadedModel,
    device_memory: MemoryBudget,
    ledger: DecisionLedger,
    pool_kind: PoolKind,
    speculation: Speculation | None,
    asked: HiSparseConfig,
    groups: Groups | None,
) -> HiSparseConfig | None:
    """Return what `--hisparse auto` chooses."""
    layers, longest = model.attention_layers, config.max_model_len or model.config.context_length
    page_size = fitting_page_size(layers, config.page_size, facts.page_size)
    most = max(1, verified_rows(model, speculation))

    def sized(setting: HiSparseConfig | None) -> MemorySizes:
        return _sized(config, facts, model, device_memory, DecisionLedger(), pool_kind, speculation, setting)

    shape_of = shapes_with(layers, longest, page_size, facts.has_streams, most)
    measure, reason = measure_with(model, facts, groups), reason_against_auto(facts, model.kernels)
    return chosen_hisparse(asked, reason, config, model, shape_of, sized, measure, ledger)


def _sized(
    config: EngineConfig,
    facts: Facts,
    model: LoadedModel,
    device_memory: MemoryBudget,
    ledger: DecisionLedger,
    pool_kind: PoolKind,
    speculation: Speculation | None,
    hisparse_config: HiSparseConfig | None,
) -> MemorySizes:
    """Return the sizes with this setting of HiSparse; None: all KV entries are on the device."""
    has_rows = any(layer.rows for layer in model.attention_layers)
    _check_cells(config, model, pool_kind, has_rows)
    for remark in dict.fromkeys(layer.remark for layer in model.state_layers if layer.remark):
        ledger.record(
            Row("prompts", "auto", "whole prompts in one step", remark, "raise max_batch_tokens above their length")
        )
    context_len, layers = model.config.context_length, model.attention_layers
    longest = config.max_model_len or context_len
    if speculation is not None and speculation.draft is not None:
        layers = (*layers, *speculation.draft.attention_layers)
    # A window page cannot be restored once it is freed, and a rejected draft token goes back.
    most = 0 if speculation is not None else longest - config.max_batch_tokens
    page_size = fitting_page_size(layers, config.page_size, facts.page_size)
    if config.page_size is None and page_size != facts.page_size:
        why = f"a page has whole blocks of this model; the device's own size is {facts.page_size}"
        ledger.record(Row("page size", "auto", f"{page_size} tokens", why, "set page_size to a multiple of it"))
    kept = geometry(layers, model.state_layers, most, page_size, model.dtype, pool_kind.cell_bytes)
    if model.state_layers and speculation is not None:
        kept = beside_taken(model, speculation, kept, ledger)
    most = max(1, verified_rows(model, speculation))
    if hisparse_config is None:
        kept = replace(kept, page=kept.page + kept.host_page, host_page=0)
    swapped = swap_shape(hisparse_config, layers, longest, page_size, facts.has_streams, most)
    kept, device_memory = beside_buffers(hisparse_config, swapped, facts, kept, device_memory)
    if has_rows:
        ledger.record(rows_row(kept, layers, page_size, model.dtype, config.kv_cache_dtype))
    if not kept.window and any(has_window(layer) for layer in layers):
        why = "a window plus the tokens of a step is not below max_model_len, so no page would be freed in time"
        remedy = "lower max_batch_tokens"
        if speculation is not None:
            why, remedy = "draft tokens are verified, and a rejected one goes back in the window", "--speculative off"
        ledger.record(Row("window cache", "auto", "none", why, remedy))
    verified = min(config.max_requests, config.max_batch_tokens) * most_drafts(config)
    scores = score_bytes(layers, max(config.max_batch_tokens, verified), longest)
    if scores:
        why = "of an indexer in the longest step, reserved in addition to the pools"
        ledger.record(Row("index scores", "auto", size_text(scores), why, "lower max_batch_tokens or max_model_len"))
        device_memory = replace(device_memory, available=max(0, device_memory.available - scores))
    if speculation is not None:
        device_memory = less_draft_probs(config, model, speculation, device_memory, ledger)
    return size_pools(
        config,
        context_len=context_len,
        geometry=kept,
        page_size=page_size,
        budget=device_memory,
        ledger=ledger,
        sharing=sharing_of(layers, kept.window, pool_kind),
    )


def beside_taken(model: LoadedModel, speculation: Speculation, kept: Geometry, ledger: DecisionLedger) -> Geometry:
    """Return the geometry with the inputs of states, kept for every row of a verification, added to
    the bytes of a request; record them in the ledger.
    """
    each = verified_rows(model, speculation) * taken_bytes(model.state_layers)
    why = "inputs of states for draft tokens; the accepted ones are applied again"
    ledger.record(Row("verified rows", "auto", f"{size_text(each)} per request", why, "--speculative off"))
    return replace(kept, ring=kept.ring + each)


def least_of_ranks(facts: Facts, own: MemoryBudget, groups: Groups) -> MemoryBudget:
    """Return `own` with the available bytes of the rank that has the least. If the ranks of a host
    share its memory, total and available bytes are first divided by their number.

    Every rank calls this; waits for the others.
    """
    sharing = groups.place.neighbours if facts.shares_host_memory else 1
    available = groups.tp.least(own.available // sharing)
    told = f", shared by {sharing} ranks" if sharing > 1 else f", the least of {groups.tp.size} ranks"
    return replace(own, total=own.total // sharing, available=available, evidence=own.evidence + told)


def _check_cells(config: EngineConfig, model: LoadedModel, pool_kind: PoolKind, has_rows: bool) -> None:
    """Raise ConfigError for a KV dtype that the pools do not have, or that the model cannot use."""
    if config.kv_cache_dtype != pool_kind.kv_cache_dtype and not has_rows:
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, and this device keeps keys and values in the model's dtype",
            remedy="leave --kv-cache-dtype out",
        )
    if config.kv_cache_dtype != PER_HEAD.kv_cache_dtype and any(layer.is_exact for layer in model.attention_layers):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, and keys of this model contain positions, which it "
            "would round",
            remedy="leave --kv-cache-dtype out",
        )


def pools(
    config: EngineConfig,
    facts: Facts,
    model: LoadedModel,
    sizes: MemorySizes,
    pool_kind: PoolKind = PER_HEAD,
    speculation: Speculation | None = None,
) -> Pools:
    """Bring-up step: allocate page table, KV slots or KV rows, token table, windows and states on
    the device, of the sizes that `sizes` returned.

    An encoder gets one page of KV slots.
    """
    device, states, layers = facts.tensor_device, model.state_layers, model.attention_layers
    counts = sizes.max_requests, sizes.num_snapshots
    windowed = frozenset(each.layer_id for each in layers if keeps_window(each, sizes.window))
    table = None
    if windowed:
        table = WindowTable(sizes.max_requests, sizes.window, config.max_batch_tokens, sizes.page_size, device)
    if any(layer.rows for layer in layers):
        full = of_windows = make_rows(layers, sizes, device, config.poison, table, pins=facts.reaches_pinned_memory)
    else:

        def make(pages: int, shapes: LayerShapes) -> TokenToKVPool:
            return pool_kind.make_pool(pages, sizes.page_size, shapes, model.dtype, device, model.kernels)

        full, of_windows = make_cells(layers, sizes, make, windowed, model.config.is_encoder, pool_kind.windows)
    return Pools(
        ReqToTokenPool(sizes.max_requests, sizes.max_model_len, sizes.page_size, device),
        full,
        TokenTable(sizes.max_requests, sizes.max_model_len, device),
        StatePool(states, *counts, device, config.poison, verified_rows(model, speculation)) if states else None,
        None if table is None or of_windows is None else WindowPools(windowed, table, of_windows),
    )

"""The standard bring-up of a torch device. A step's name is what it provides, its parameters are what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglcore.device.bring_up import BringUp
from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.package import DevicePackage, Ref, resolve
from sglcore.device.worker import Limits
from sglcore.runtime.attention.contract import AttentionBackend, AttentionShape
from sglcore.runtime.attention.selection import AttentionNeeds, select_attention
from sglcore.runtime.fields import spec_of
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool, cell_bytes
from sglcore.runtime.memory.sizing import MemoryBudget, MemorySizes, size_pools
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import TpModelWorker

MODEL_LOADER: Ref = "sglcore.models.checkpoint:load_checkpoint"
"""How a checkpoint becomes a model; a reference, because models build on the runtime."""

REFERENCE = "sglcore.runtime.kernels.reference"
"""The module whose kernels define correct."""

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Pools:
    """The device tables and cells of one worker."""

    req_to_token: ReqToTokenPool
    token_to_kv: MHATokenToKVPool
    token_table: TokenTable


def world(config: EngineConfig) -> World:
    """One rank."""
    return World()


def groups(world: World) -> tuple[()]:
    """No collectives on one rank."""
    return ()


def load_weights(
    config: EngineConfig,
    facts: Facts,
    ledger: DecisionLedger,
    progress: Progress,
    model_path: Path,
    kernels: KernelTable,
    groups: tuple[()],
) -> Any:
    """The model with its weights on the device, its operations from the package's kernel table."""
    load = resolve(MODEL_LOADER)
    return load(config, model_path, facts=facts, kernels=kernels, ledger=ledger, progress=progress)


def kernels(package: DevicePackage, ledger: DecisionLedger) -> KernelTable:
    """The functions that models and attention run on this device."""
    table: KernelTable = resolve(package.kernels, package.name)()
    modules = {name: origin.rpartition(":")[0] for name, origin in table.origin.items()}
    own = {name: module for name, module in modules.items() if module != REFERENCE}
    what = ", ".join(sorted(set(own.values()))) or "reference"
    reason = (
        f"replaces {', '.join(own)}; the other entries are the reference" if own else "every entry is the reference"
    )
    ledger.record(Row("kernels", "auto", what, reason, "another device package; each has its own"))
    return table


def size_memory(
    config: EngineConfig, facts: Facts, load_weights: Any, device_memory: MemoryBudget, ledger: DecisionLedger
) -> MemorySizes:
    """Pages and context, from what the device has left beside the weights."""
    model = load_weights
    return size_pools(
        config,
        context_len=model.config.context_length,
        bytes_per_cell=0 if model.config.is_encoder else cell_bytes(_layers(model), model.weights.dtype),
        page_size=config.page_size or facts.page_size,
        budget=device_memory,
        ledger=ledger,
    )


def memory_pools(size_memory: MemorySizes, load_weights: Any, facts: Facts) -> Pools:
    """The page table, the KV cells and the token table."""
    sizes, device = size_memory, facts.tensor_device
    pages = 1 if load_weights.config.is_encoder else sizes.num_pages
    kv = MHATokenToKVPool(pages, sizes.page_size, _layers(load_weights), load_weights.weights.dtype, device)
    return Pools(
        ReqToTokenPool(sizes.max_requests, sizes.max_model_len, sizes.page_size, device),
        kv,
        TokenTable(sizes.max_requests, sizes.max_model_len, device),
    )


def hisparse(config: EngineConfig, memory_pools: Pools) -> None:
    """No tiered KV: no model of this release asks for it."""
    return None


def attention(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    load_weights: Any,
    memory_pools: Pools,
    kernels: KernelTable,
    hisparse: object | None,
    ledger: DecisionLedger,
) -> AttentionBackend:
    """The backend that serves this model, built over the pools."""
    model = load_weights
    windows = tuple(dict.fromkeys(layer.sliding_window for layer in model.attention_layers))
    heads = max(layer.num_heads for layer in model.attention_layers)
    shape = AttentionShape(heads, _layers(model), windows, model.config.is_encoder)
    backend = select_attention(
        package.attention,
        AttentionNeeds(
            tuple(sorted({head_dim for _, head_dim in shape.layers})),
            memory_pools.token_to_kv.page_size,
            str(model.weights.dtype).removeprefix("torch."),
            _features(shape, facts.graph_kind(config.graph)),
            facts.cache_loc_dtype,
            int(spec_of(ForwardBatch, "seq_lens").padding.value),
        ),
        config.attention_backend,
        package.name,
        ledger,
    )
    return backend(shape, memory_pools.req_to_token, memory_pools.token_to_kv, kernels, hisparse)


def graphs(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    load_weights: Any,
    memory_pools: Pools,
    size_memory: MemorySizes,
    attention: AttentionBackend,
    kernels: KernelTable,
    ledger: DecisionLedger,
    progress: Progress,
) -> ModelRunner:
    """The runner with its registries, and decode graphs if they were asked for."""
    pool = None if load_weights.config.is_encoder else memory_pools.req_to_token
    decode = build_decode_registry(facts, pool, max_bs=size_memory.max_requests, cells=kernels.cache_locations)
    prefill = build_prefill_registry(
        facts,
        pool,
        max_bs=min(size_memory.max_requests, 16),
        cells=kernels.cache_locations,
        max_num_tokens=min(config.max_batch_tokens, size_memory.max_model_len),
    )
    runner = ModelRunner(
        load_weights,
        attention,
        decode,
        prefill,
        memory_pools.token_table,
        poison=config.poison,
        eager_input_no_copy=config.eager_input_no_copy,
    )
    runner.graphs = _capture(config, package, facts, runner, ledger, progress)
    return runner


def _capture(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    runner: ModelRunner,
    ledger: DecisionLedger,
    progress: Progress,
) -> GraphRunner | None:
    kinds = ", ".join(package.graphs) or "none"
    if facts.graph_kind(config.graph) == "off":
        ledger.record(
            Row("graph", config.graph, "eager", "start-up waits for no capture", f"--graph with one of: {kinds}")
        )
        return None
    if config.graph not in package.graphs:
        raise ConfigError(
            f"graph kind {config.graph!r} is not offered by device {package.name!r}", wanted=f"off or one of {kinds}"
        )
    if runner.attn_backend.shape.is_encoder:
        reason = "an encoder does not decode, and graphs are for decoding"
        ledger.record(Row("graph", config.graph, "eager", reason, "--graph off", downgrade=True))
        return None
    backend = resolve(package.graphs[config.graph], package.name)()
    with torch.inference_mode():
        captured = GraphRunner(
            backend,
            runner.decode_registry,
            runner.attn_backend,
            ForwardContext(runner.attn_backend, None, runner.model.attention_layers),
            runner.model,
            config.graph_buckets,
            lambda done, total: progress("capturing graphs", done, total),
        )
    if not captured.buckets:
        raise ConfigError(
            f"graph_buckets {config.graph_buckets} has no size for at most {runner.decode_registry.max_bs} requests",
            remedy="give one, or set graph to off",
        )
    sizes = ", ".join(map(str, captured.buckets))
    ledger.record(
        Row(
            "graph",
            config.graph,
            config.graph,
            f"decode at batch sizes {sizes}; larger batches and prompts run eagerly",
            "--graph off",
        )
    )
    return captured


def worker(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    load_weights: Any,
    memory_pools: Pools,
    size_memory: MemorySizes,
    graphs: ModelRunner,
) -> TpModelWorker:
    """The worker that the scheduler submits to."""
    sizes = size_memory
    limits = Limits(
        max_model_len=sizes.max_model_len,
        max_requests=sizes.max_requests,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        max_batch_tokens=max(config.max_batch_tokens, 1),
        vocab_size=load_weights.config.vocab_size,
        allows_mixed_batches=facts.allows_mixed_batches,
        runs_ahead=facts.has_streams,
        generates=not load_weights.config.is_encoder,
    )
    return resolve(package.worker, package.name)(graphs, memory_pools.token_table, limits)


def _layers(model: Any) -> tuple[tuple[int, int], ...]:
    return tuple((layer.num_kv_heads, layer.head_dim) for layer in model.attention_layers)


def _features(shape: AttentionShape, graph: str) -> frozenset[str]:
    wanted = {"encoder"} if shape.is_encoder else set()
    if any(window is not None for window in shape.windows):
        wanted.add("sliding_window")
    if graph != "off":
        wanted.add("capture")
    return frozenset(wanted)


STANDARD = BringUp(
    (world, groups, kernels, load_weights, size_memory, memory_pools, hisparse, attention, graphs, worker)
)
"""Every torch device starts from this order; `device_memory` is what a package must insert before `size_memory`."""

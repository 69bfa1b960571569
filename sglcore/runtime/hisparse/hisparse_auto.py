"""`--hisparse auto`: uses HiSparse if it is predicted to pay, with smaller buffers if those pay
more, and else keeps all entries on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.hisparse.hisparse_shape import SwapShape, swap_shape
from sglcore.runtime.hisparse.hisparse_speeds import measured_speeds
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.memory.kv_rows import INDEX_KEYS
from sglcore.step.hisparse_choice import HIT_RATE, ModelBytes, Option, Speeds, Work, choose_option
from sglcore.step.hisparse_config import HiSparseConfig
from sglcore.step.sizing import MemorySizes

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.parallel.rank_groups import Groups

TOPIC = "hisparse choice"
Sized = Callable[[HiSparseConfig | None], MemorySizes]
"""Sizes the pools with a setting; None: with all entries on the device."""
Measure = Callable[[SwapShape], Speeds]


def chosen_hisparse(
    asked: HiSparseConfig,
    reason: str,
    config: EngineConfig,
    model: LoadedModel,
    shape_of: Callable[[HiSparseConfig], SwapShape | None],
    sized: Sized,
    measure: Measure,
    ledger: DecisionLedger,
) -> HiSparseConfig | None:
    """Return the setting to use, without `is_auto`, and record why; None: all entries stay on the
    device, where the layers keep them from now on.

    `reason`: why this device cannot serve HiSparse; empty if it can. Waits if it measures.
    """
    first = replace(asked, is_auto=False)
    shape = None if reason else shape_of(first)
    if shape is None:
        why = reason or f"no layer of {model.config.architecture} chooses the rows that it reads"
        return _off(config, model, why, ledger)
    tokens = asked.request_tokens or config.max_model_len or model.config.context_length
    rate = HIT_RATE if asked.hit_rate is None else asked.hit_rate
    work = Work(tokens, rate, asked.hit_rate is None, max(config.max_batch_tokens, 1))
    options = [_option(each, shape_of, sized, work) for each in _settings(first, shape, work)]
    on_device = Option(None, _requests(sized, None, work))
    speeds = measure(shape)
    found, choice = choose_option(on_device, options, model_bytes(model, shape, work), speeds, work)
    why = choice.why(speeds, work)
    if found is None:
        return _off(config, model, why, ledger)
    what = f"{choice.best.places} entries on the device, {found.held_tokens(tokens)} tokens of a prompt in chunks"
    size = "on, smaller" if choice.is_smaller else "on"
    ledger.record(Row(TOPIC, config.hisparse or "auto", f"{size}: {what}", why, "--hisparse on or off"))
    return found


def _off(config: EngineConfig, model: LoadedModel, why: str, ledger: DecisionLedger) -> None:
    for layer in model.attention_layers:
        if isinstance(layer, SparseLayer):
            layer.keep_on_device()
    ledger.record(Row(TOPIC, config.hisparse or "auto", "off", why, "--hisparse on"))


def _settings(first: HiSparseConfig, shape: SwapShape, work: Work) -> list[HiSparseConfig]:
    """Return the settings to compare, the preferred ones first: buffers as they are without auto,
    then smaller ones, unless they were given.
    """
    places = [first.device_buffer_size]
    if places == [None]:
        places = [shape.buffer_rows, *([shape.top_k] if shape.most == 1 else ())]
    held = [first.prompt_buffer_size]
    if held == [None]:
        held = [None, work.request_tokens // 4, 0]
    return [replace(first, device_buffer_size=each, prompt_buffer_size=other) for each in places for other in held]


def _option(
    setting: HiSparseConfig, shape_of: Callable[[HiSparseConfig], SwapShape | None], sized: Sized, work: Work
) -> Option:
    shape = shape_of(setting)
    assert shape is not None
    return Option(setting, _requests(sized, setting, work), shape.top_k, shape.buffer_rows, shape.kept.ratio)


def _requests(sized: Sized, setting: HiSparseConfig | None, work: Work) -> int:
    """Return how many requests of the predicted length run at a time; 0 if not even one fits."""
    try:
        sizes = sized(setting)
    except ConfigError:
        return 0
    if sizes.max_model_len < work.request_tokens:
        return 0
    return min(sizes.max_requests, sizes.num_pages * sizes.page_size // work.request_tokens)


def model_bytes(model: LoadedModel, shape: SwapShape, work: Work) -> ModelBytes:
    """Return what a model moves; `weights` are all of this rank's, experts that a step does not use
    included.
    """
    row, keys = shape.kept.row.nbytes, 0
    for layer in model.attention_layers:
        if (kept := layer.rows.get(INDEX_KEYS)) is not None:
            keys += work.request_tokens // kept.ratio * kept.row.nbytes
    chosen = len(shape.names) * min(shape.top_k, work.request_tokens // shape.kept.ratio) * row
    weights = sum(each.nbytes for each in model.weights.parameters)
    return ModelBytes(weights, keys + chosen, len(shape.names) * row // shape.kept.ratio, chosen)


def measure_with(model: LoadedModel, facts: Facts, groups: Groups | None) -> Measure:
    """Return what measures the speeds for the rows of a shape."""

    def measure(shape: SwapShape) -> Speeds:
        device = torch.device(facts.tensor_device)
        return measured_speeds(model.kernels, shape.kept.row.nbytes, shape.top_k, device, groups)

    return measure


def shapes_with(
    layers: Sequence[Attention], longest: int, page_size: int, has_streams: bool, most: int
) -> Callable[[HiSparseConfig], SwapShape | None]:
    """Return the function from a setting to its `SwapShape`."""
    return lambda setting: swap_shape(setting, layers, longest, page_size, has_streams, most)

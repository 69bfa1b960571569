"""The nested order of the bring-up for prefill slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.bring_up_steps import Again, NestedOrder
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.overlap.parts import make_parts
from sglcore.runtime.overlap.slices import Slices
from sglcore.runtime.speculative.speculation_choice import Speculation
from sglcore.runtime.streams import Part
from sglcore.step.slice_decisions import (
    INTERLEAVE,
    PARTITION,
    PRIORITY,
    lane_row,
    slice_budget,
    slice_row,
    whole_row,
)

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups


BEHIND = "a separate stream of lower priority than decode steps"
"""The ledger's description of the lane PRIORITY."""


@dataclass(frozen=True, slots=True)
class Lane:
    """How prefill slices share the device with decode steps, and why.

    `kind` is PARTITION, PRIORITY or INTERLEAVE of `step/slice_decisions.py`; `parts` are the
    streams of a partitioned device.
    """

    kind: str
    why: str
    parts: tuple[Part, ...] = ()

    @property
    def is_beside(self) -> bool:
        """True if slices run concurrently with decode steps."""
        return self.kind != INTERLEAVE


def lane(
    config: EngineConfig, package: DevicePackage, facts: Facts, device: torch.device, groups: Groups | None = None
) -> Lane:
    """Return the lane: its kind, why, and streams if partitioned. The kind is INTERLEAVE if prompt
    slices are off, if it is configured, or if the device has no streams or there are several ranks;
    else PRIORITY if configured; else PARTITION, or PRIORITY if the device cannot be partitioned,
    even if PARTITION is configured. `slice_ledger` records it.

    Raises ConfigError for an invalid slice setting.
    """
    between = _why_between(config, facts, groups)
    if between:
        return Lane(INTERLEAVE, between)
    if config.prompt_lane == PRIORITY:
        return Lane(PRIORITY, f"requested: {BEHIND}")
    try:
        parts, units = make_parts(package, device)
    except ConfigError as error:
        return Lane(PRIORITY, f"{error}: {BEHIND}")
    shares = ", ".join(str(part.units) for part in parts)
    return Lane(
        PARTITION,
        f"streams that use {shares} of {units} units, by the number of rows that decode at the same time",
        parts,
    )


def _why_between(config: EngineConfig, facts: Facts, groups: Groups | None) -> str:
    """Return why slices run between decode steps; empty if they can run concurrently."""
    if slice_budget(config.prompt_slices) is None:
        return "prompts run whole"
    if config.prompt_lane == INTERLEAVE:
        return "requested"
    if not facts.has_streams:
        return "this device has no streams"
    return "" if groups is None else "ranks call their collectives in one order"


def slice_ledger(
    config: EngineConfig,
    ledger: DecisionLedger,
    model: LoadedModel,
    lane: Lane,
    speculation: Speculation | None = None,
    groups: Groups | None = None,
) -> DecisionLedger | None:
    """Return the ledger for decisions on prefill slices; None if prompts run whole. Records in
    `ledger` what was asked for and how slices run, or why prompts run whole although slices were
    asked for.

    Raises ConfigError for an invalid setting.
    """
    asked = config.prompt_slices
    budget = slice_budget(asked)
    if budget is None:
        return None
    why, remedy = _why_whole(model, speculation, groups)
    if why:
        ledger.record(whole_row(asked, budget, why, remedy))
        return None
    ledger.record(slice_row(asked, budget, model.sliced_layers))
    ledger.record(lane_row(config.prompt_lane, lane.kind, lane.why))
    return ledger.about("slices")


def _why_whole(model: LoadedModel, speculation: Speculation | None, groups: Groups | None) -> tuple[str, str]:
    """Return why prompts cannot run in slices, and the remedy; empty if they can."""
    if model.config.is_encoder or not model.sliced_layers:
        return f"the forward of {model.config.architecture} is not divided into layers", "--prompt-slices off"
    if speculation is not None:
        return "speculative decoding needs whole prompts", "--speculative off"
    if groups is not None and groups.place.topology.dp > 1:
        return "data-parallel shards run the same kind of step together", "--dp 1"
    return "", ""


def slices(runner: ModelRunner, model: LoadedModel, slice_attention: AttentionBackend | None) -> Slices | None:
    """Return the runner of prefill slices; None if prompts run whole."""
    sliced: Any = model
    return None if slice_attention is None else Slices(runner, sliced, slice_attention, runner.streams)


PREFILL_SLICES = NestedOrder(
    "prefill slices",
    {
        "device": (lane,),
        "runner": (slice_ledger, Again("slice_attention", ("attention",), {"ledger": "slice_ledger"}), slices),
    },
    exports=("lane", "slices"),
)
"""How prompts run in slices of layers: the lane before the streams, and an attention backend and a
runner of their own."""

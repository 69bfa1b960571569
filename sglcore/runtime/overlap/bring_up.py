"""The steps of a bring-up that are there for prompts by slices of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.hisparse.coordinator import HiSparseCoordinator
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.overlap.slices import Slices
from sglcore.runtime.speculative.choice import Speculation

if TYPE_CHECKING:
    from sglcore.runtime.parallel.group import Groups


def slice_ledger(
    config: EngineConfig,
    ledger: DecisionLedger,
    model: LoadedModel,
    speculation: Speculation | None = None,
    hisparse: HiSparseCoordinator | None = None,
    groups: Groups | None = None,
) -> DecisionLedger | None:
    """Where what is chosen for prompts by slices is written; None: they come whole. Raises ConfigError for a setting that can not
    be read."""
    asked = config.prompt_slices
    budget = slice_budget(asked)
    if budget is None:
        return None
    why, remedy = _why_whole(model, speculation, hisparse, groups)
    if why:
        ledger.record(Row("prompt slices", asked, "off", why, remedy, downgrade=budget > 0))
        return None
    layers = model.sliced_layers
    what = f"{budget} tokens x layers" if budget else "by the clock"
    reason = f"{layers} layers, as many at a time as "
    reason += "hold that" if budget else "take at most 0.7 of a decode step, of chunks of at least 64 tokens"
    ledger.record(Row("prompt slices", asked, what, reason, "--prompt-slices off"))
    return ledger.about("slices")


def slice_budget(asked: str) -> int | None:
    """Token·layers of a slice, 0: by the clock, None: prompts come whole. Raises ConfigError for anything else."""
    if asked == "off":
        return None
    if asked == "auto":
        return 0
    if asked.isdecimal() and int(asked):
        return int(asked)
    raise ConfigError(
        f"prompt_slices is {asked!r}",
        wanted="auto, off, or a number of tokens times layers",
        remedy="--prompt-slices auto",
    )


def _why_whole(
    model: LoadedModel,
    speculation: Speculation | None,
    hisparse: HiSparseCoordinator | None,
    groups: Groups | None,
) -> tuple[str, str]:
    """Why prompts can not come by slices, and what helps; nothing if they can."""
    if model.config.is_encoder or not model.sliced_layers:
        return f"the forward of {model.config.architecture} is not divided into layers", "--prompt-slices off"
    if speculation is not None:
        return "a model that proposes tokens takes the features of whole prompts", "--speculative off"
    if hisparse is not None:
        return "a prompt's step gets the rows of its requests whole, which lie in host memory", "--hisparse off"
    if groups is not None and groups.place.topology.dp > 1:
        return "requests are in shards, which run the same kind of step together", "--dp 1"
    return "", ""


def slices(runner: ModelRunner, model: LoadedModel, slice_attention: AttentionBackend | None) -> Slices | None:
    """What runs prompts by slices; None where they come whole."""
    sliced: Any = model
    return None if slice_attention is None else Slices(runner, sliced, slice_attention)

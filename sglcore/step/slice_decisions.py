"""Prompt slices (layered prefill) at start-up, for workers of every tensor library: parses the
setting `prompt_slices`, and makes the ledger rows of the decisions.
"""

from __future__ import annotations

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row

TOPIC = "prompt slices"
PARTITION, PRIORITY, INTERLEAVE = "partition", "priority", "interleave"
"""How slices share the device with decode steps: the values of `prompt_lane` other than auto."""


def slice_budget(asked: str) -> int | None:
    """Return the tokens x layers of a slice that the setting `asked` means: None for "off" (prompts
    are not sliced), 0 for "auto" (chosen from measured times), or the given number, above 0. Raises
    ConfigError for anything else.
    """
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


def slice_row(asked: str, budget: int, layers: int) -> Row:
    """Return the ledger row for a worker that slices prompts. `layers` is the number of the model's
    layers; `budget` is what `slice_budget` returned (not None).
    """
    what = f"{budget} tokens x layers" if budget else "by the clock"
    reason = f"{layers} layers; the number per slice "
    reason += "keeps that limit" if budget else "takes at most 0.7 of a decode step, with chunks of at least 64 tokens"
    return Row(TOPIC, asked, what, reason, "--prompt-slices off")


def lane_row(asked: str, kind: str, why: str) -> Row:
    """Return the ledger row for the chosen prompt lane `kind`: PARTITION, PRIORITY or INTERLEAVE.
    `asked`: the configured lane or "auto"; `why`: the reason. It is a downgrade if another lane was
    configured.
    """
    others = {PARTITION: f"--prompt-lane {PRIORITY}", PRIORITY: f"--prompt-lane {INTERLEAVE}"}
    return Row("prompt lane", asked, kind, why, others.get(kind, ""), downgrade=asked not in ("auto", kind))


def whole_row(asked: str, budget: int, why: str, remedy: str) -> Row:
    """Return the ledger row for a worker that cannot slice prompts. It is a downgrade if a size was
    configured (`budget` above 0).
    """
    return Row(TOPIC, asked, "off", why, remedy, downgrade=budget > 0)

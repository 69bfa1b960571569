"""What a start decides of prompts by slices of layers, for workers of every tensor library."""

from __future__ import annotations

from sglcore.device.errors import ConfigError
from sglcore.device.ledger import Row

TOPIC = "prompt slices"
PARTITION, PRIORITY, INTERLEAVE = "partition", "priority", "interleave"
"""How slices may stand beside decode steps: the choices of `prompt_lane` besides auto."""


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


def slice_row(asked: str, budget: int, layers: int) -> Row:
    """What the ledger says where prompts come by slices."""
    what = f"{budget} tokens x layers" if budget else "by the clock"
    reason = f"{layers} layers, as many at a time as "
    reason += "hold that" if budget else "take at most 0.7 of a decode step, of chunks of at least 64 tokens"
    return Row(TOPIC, asked, what, reason, "--prompt-slices off")


def lane_row(asked: str, kind: str, why: str) -> Row:
    """What the ledger says of the lane of slices, one of the three."""
    others = {PARTITION: f"--prompt-lane {PRIORITY}", PRIORITY: f"--prompt-lane {INTERLEAVE}"}
    return Row("prompt lane", asked, kind, why, others.get(kind, ""), downgrade=asked not in ("auto", kind))


def whole_row(asked: str, budget: int, why: str, remedy: str) -> Row:
    """What it says where they can not."""
    return Row(TOPIC, asked, "off", why, remedy, downgrade=budget > 0)

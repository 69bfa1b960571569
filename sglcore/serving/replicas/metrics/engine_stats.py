"""Sums of the counters of several engines, also of engines that have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from sglcore.schedule.scheduler_stats import Levels
from sglcore.serving.replicas.ipc import EngineStats


def add_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """Return the sum of each counter, and of each number of the present load, over `parts`; `paths`
    and `drafts` are added by key. All 0 for no parts."""
    known = list(parts)
    total: dict[str, Any] = {
        name: sum(getattr(part, name) for part in known)
        for name in EngineStats.__struct_fields__
        if name not in ("paths", "drafts")
    }
    paths: Counter[str] = sum((Counter(part.paths) for part in known), Counter())
    drafts: Counter[tuple[int, int, int, int]] = sum((Counter(part.drafts) for part in known), Counter())
    return EngineStats(**total, paths=dict(paths), drafts=dict(drafts))


def past_only(stats: EngineStats) -> EngineStats:
    """Return a copy of the counters of an engine that has ended, with its present load (`Levels`
    and `compiling`) set to 0, so that only totals remain."""
    nothing = dict.fromkeys((*Levels.__struct_fields__, "compiling"), 0)
    return msgspec.structs.replace(stats, **nothing)

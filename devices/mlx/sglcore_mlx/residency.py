"""Keeps an Apple GPU's memory resident: macOS would otherwise page weights out during idle times
between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from sglcore.core.ledger import Row
from sglcore.step.sizing import size_text

CACHE_SHARE = 16
"""MLX may cache 1 / CACHE_SHARE of the GPU's recommended memory for later arrays; without a limit,
prompts of many lengths would fill all of it."""

SetLimit = Callable[[int], int]
"""Sets a limit of the whole process; returns the previous one."""


class Residency:
    """Memory limits of the whole process, set when the object is made and restored by `close`.
    `row`: for the ledger; None if nothing was changed. With several workers in one process, the end
    of the first one restores the limits; the others stay correct but become slower."""

    def __init__(
        self,
        info: Mapping[str, str | int],
        set_wired: SetLimit = mx.set_wired_limit,
        set_cache: SetLimit = mx.set_cache_limit,
    ) -> None:
        """`info`: MLX's description of its device; without a recommended working set (no Apple GPU)
        nothing is changed. `set_wired` and `set_cache` set the bytes that stay resident and those
        that MLX caches."""
        recommended = int(info.get("max_recommended_working_set_size", 0))
        self.row: Row | None = None
        self._undo: list[Callable[[], int]] = []
        if recommended:
            wired, cached = set_wired(recommended), set_cache(recommended // CACHE_SHARE)
            if wired != recommended:
                self._undo = [lambda: set_wired(wired), lambda: set_cache(cached)]
            what = f"up to {size_text(recommended)} wired, {size_text(recommended // CACHE_SHARE)} cached"
            self.row = Row("residency", "auto", what, "the system pages out memory that is not wired")

    def close(self) -> None:
        """Restore the previous limits. A second call does nothing, and so does the first of an
        object that found the limit set already."""
        undo, self._undo = self._undo, []
        for restore in undo:
            restore()

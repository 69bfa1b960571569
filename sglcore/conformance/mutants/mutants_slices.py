"""Devices on which layered prefill gives wrong results, or runs elsewhere than it reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglcore.conformance.mutant import TORCH, Mutant, become, in_runtime
from sglcore.core.errors import ConfigError


def hands_on_half(slices: Any) -> Any:
    """The hidden states arrive halved in the next slice."""

    def subclass(base: Any) -> type:
        class HandsOnHalf(base):
            __slots__ = ()

            def run(self, first: int, last: int) -> Any:
                if first and self._open is not None:
                    with self._running():
                        self._open.state = self._open.state._replace(hidden=self._open.state.hidden * 0.5)
                return super().run(first, last)

        return HandsOnHalf

    return slices if slices is None else become(slices, subclass)


def refuses_all(device: torch.device) -> Any:
    """Raise ConfigError always: a package's `partition` that gives no stream for any device."""
    raise ConfigError(f"{device} cannot be divided")


HANDS_ON_HALF = in_runtime("hands on half", hands_on_half.__doc__ or "", slices=hands_on_half)
NO_SUCH_PARTS = Mutant(
    name="no such parts",
    says="It declares that its compute units can be divided, but refuses each stream.",
    package=lambda declared: replace(declared, partition=f"{__name__}:refuses_all"),
    needs=TORCH,
    case="partition",
)

"""Calls of vendors' operators that violate one precondition at a time. The simulator's reference
must refuse each by name; a reference without the check lets the call through."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wrong:
    """One violation: the argument, the change to it, and the beginning of the only precondition
    that the changed argument violates."""

    argument: str
    change: Callable[[Any], Any]
    says: str


class Forgotten(Exception):
    """A call passed a precondition that the test had disabled."""


@dataclass(frozen=True, slots=True)
class Calls:
    """One operator with valid arguments, the violations to try, and the `modules` that define the
    `require` they use."""

    call: Callable[..., Any]
    given: Given
    wrongs: Sequence[Wrong]
    modules: Sequence[ModuleType]

    def check_refused(self, wrong: Wrong, patch: pytest.MonkeyPatch) -> None:
        """The operator refuses the changed argument by this precondition's name, and passes with
        only this precondition disabled."""
        spoiled = {**self.given, wrong.argument: wrong.change(self.given[wrong.argument])}
        with pytest.raises((RuntimeError, ValueError), match=f" wants {re.escape(wrong.says)}"):
            self.call(**spoiled)
        self._watch(patch, lambda rule: rule.startswith(wrong.says))
        with pytest.raises(Forgotten):
            self.call(**spoiled)

    def check_covered(self, patch: pytest.MonkeyPatch) -> None:
        """The valid call passes, and each precondition that it checks is violated by one of
        `wrongs`."""
        met = self._watch(patch, lambda rule: False)
        self.call(**self.given)
        for rule in met:
            assert sum(rule.startswith(wrong.says) for wrong in self.wrongs), f"no call violates: {rule}"

    def _watch(self, patch: pytest.MonkeyPatch, is_forgotten: Callable[[str], bool]) -> list[str]:
        met: list[str] = []
        real = self.modules[0].require

        def require(call: str, wanted: Mapping[str, object], error: type[Exception] = RuntimeError) -> None:
            met.extend(wanted)
            real(call, {rule: holds for rule, holds in wanted.items() if not is_forgotten(rule)}, error)
            if any(map(is_forgotten, wanted)):
                raise Forgotten

        for module in self.modules:
            patch.setattr(module, "require", require)
        return met


def strided(tensor: Tensor) -> Tensor:
    """The same values with stride 2 in the last dimension."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def widened(tensor: Tensor) -> Tensor:
    """The same values in rows with one unused element between them."""
    return torch.cat((tensor, tensor[..., :1]), -1)[..., : tensor.shape[-1]]


def int32(device: torch.device, *values: int) -> Tensor:
    """Make an int32 tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def flash_attention(call: Callable[..., Any], device: torch.device, modules: Sequence[ModuleType]) -> Calls:
    """Two rows over pages of 16 tokens, by the interface of FlashAttention 3."""
    pages = torch.zeros(4, 16, 2, 64, dtype=torch.float16, device=device)
    given = {
        "q": torch.zeros(3, 4, 64, dtype=torch.float16, device=device),
        "k_cache": pages,
        "v_cache": pages.clone(),
        "cache_seqlens": int32(device, 5, 20),
        "page_table": int32(device, 1, 0, 2, 3).view(2, 2),
        "cu_seqlens_q": int32(device, 0, 1, 3),
        "max_seqlen_q": 2,
        "causal": True,
    }
    return Calls(call, given, FLASH_ATTENTION, modules)


FLASH_ATTENTION = (
    Wrong("v_cache", Tensor.bfloat16, "one half precision"),
    Wrong("cache_seqlens", Tensor.cpu, "everything on one device"),
    Wrong("k_cache", strided, "tensors whose last dimension"),
    Wrong("q", lambda q: q[:, :, None], "queries [tokens, heads, dim]"),
    Wrong("v_cache", lambda v: v[:, :, :, :32], "values of the shape of keys"),
    Wrong("q", lambda q: q[:, :3], "as many query heads"),
    Wrong("page_table", Tensor.long, "page_table int32"),
    Wrong("cache_seqlens", strided, "cache_seqlens int32"),
    Wrong("cu_seqlens_q", Tensor.long, "cu_seqlens_q int32"),
)

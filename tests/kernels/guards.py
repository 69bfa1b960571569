"""Guard values around every tensor that a kernel is given or allocates; a kernel may not overwrite
them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

GUARD = 4096
"""Elements before and after each tensor; more than any defect overruns."""
POISON = 1234.5
"""A float that no test computes."""


class Guards:
    """Tensors inside larger ones. New tensors are filled with values that no kernel computes until
    they are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._whole: list[tuple[Tensor, Tensor]] = []
        self._empty, self._plain = torch.empty, Tensor.new_empty
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "zeros", lambda *shape, **how: self.empty(*shape, **how).zero_())
        monkeypatch.setattr(torch, "empty_like", lambda like: self.empty(like.shape, dtype=like.dtype))
        monkeypatch.setattr(Tensor, "new_empty", lambda like, *shape, **how: self._new_empty(like, *shape, **how))

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: object = "cpu") -> Tensor:
        """Replace `torch.empty`, with guards."""
        sizes = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
        count = torch.Size(sizes).numel()
        whole = self._empty(count + 2 * GUARD, dtype=dtype)
        # A defect that reads a guard as an index must stay inside this process's memory.
        whole.fill_(POISON) if dtype.is_floating_point else whole.fill_(1)
        self._whole.append((whole, whole.clone()))
        return whole[GUARD : GUARD + count].view(sizes)

    def place(self, tensor: Tensor) -> Tensor:
        """Return a copy with the same strides and with guards around it."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        held = self.empty(max(span, 0) if tensor.numel() else 0, dtype=tensor.dtype)
        return held.as_strided(tensor.shape, tensor.stride(), held.storage_offset()).copy_(tensor)

    def check(self) -> None:
        """Check that no guard has changed."""
        for whole, before in self._whole:
            for part in (slice(0, GUARD), slice(len(whole) - GUARD, None)):
                assert torch.equal(whole[part].view(torch.uint8), before[part].view(torch.uint8)), (
                    "a guard was overwritten"
                )

    def _new_empty(self, like: Tensor, *shape: Any, **how: Any) -> Tensor:
        # The interpreter allocates its own empty tensors, and passes a device.
        return (
            self._plain(like, *shape, **how) if "device" in how else self.empty(*shape, **{"dtype": like.dtype} | how)
        )


def mutated(module: ModuleType, folder: Path, old: str, new: str, also: Sequence[tuple[str, str]] = ()) -> ModuleType:
    """Return the module with a defect: every `old` in its source is replaced by `new`. `also` has
    further replacements that are not defects."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert old in source, f"{old!r} is not in {module.__name__}: the mutant is stale"
    path = folder / f"mutant_{module.__name__.rpartition('.')[2]}.py"
    for before, after in ((old, new), *also):
        source = source.replace(before, after)
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found

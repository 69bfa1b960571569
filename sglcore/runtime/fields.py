"""What torch makes of the declarations of a batch: element types, and the tensors that a batch holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from sglcore.step.fields import FieldSpec, Split, specs


def torch_dtype(spec: FieldSpec) -> torch.dtype:
    """The element type that a declaration names."""
    if spec.dtype is None:
        raise TypeError(f"{spec.name} declares no dtype, which a static buffer needs")
    return getattr(torch, spec.dtype)


def retained(batch: Any) -> list[torch.Tensor]:
    """Every tensor a batch holds, for as long as the device may read it."""
    read, read_nested = _readers(type(batch))
    kept = [value for value in read(batch) if isinstance(value, torch.Tensor)]
    for value in read_nested(batch):
        if value is not None:
            kept += retained(value)
    return kept


@cache
def _readers(batch_type: type) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any], tuple[Any, ...]]]:
    """Readers of all plain fields and of all nested ones, each giving a tuple."""
    nested = [spec.name for spec in specs(batch_type) if spec.split is Split.NESTED]
    plain = [spec.name for spec in specs(batch_type) if spec.split is not Split.NESTED]
    return _reader(plain), _reader(nested)


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda batch: tuple(getattr(batch, name) for name in names)

"""Torch dtypes of the declared fields of a batch, and the tensors that a batch holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from sglcore.step.batch_field import FieldSpec, Split, specs


def torch_dtype(spec: FieldSpec) -> torch.dtype:
    """Return the torch dtype that a declaration names.

    Raises TypeError if it names none.
    """
    if spec.dtype is None:
        raise TypeError(f"{spec.name} declares no dtype, which a static buffer needs")
    return getattr(torch, spec.dtype)


def retained(batch: Any) -> list[torch.Tensor]:
    """Return every tensor of a batch, to keep them alive as long as the device may read them."""
    read, read_nested = _readers(type(batch))
    kept = [value for value in read(batch) if isinstance(value, torch.Tensor)]
    for value in read_nested(batch):
        if value is not None:
            kept += retained(value)
    return kept


@cache
def _readers(batch_type: type) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any], tuple[Any, ...]]]:
    """Return a reader of all plain fields and a reader of all nested fields.

    Each returns a tuple.
    """
    nested = [spec.name for spec in specs(batch_type) if spec.split is Split.NESTED]
    plain = [spec.name for spec in specs(batch_type) if spec.split is not Split.NESTED]
    return _reader(plain), _reader(nested)


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda batch: tuple(getattr(batch, name) for name in names)

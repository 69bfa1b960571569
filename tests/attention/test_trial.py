"""A backend that calls a library is tried in each kind of layer that a model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.backend_selection import shape_of
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.attention.trial import failure_of
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool

PLAIN: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
KINDS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 3},
    {"softcap": 30.0},
    {"num_heads": 8},
    {"num_kv_heads": 4},
    {"head_dim": 16},
)


def failure(bad: int, layers: list[Attention]) -> str:
    """Return what the trial says of a library that fails in the layer number `bad`; -1: in none."""

    class Library(ReferenceAttention):
        def attend(self, q: Tensor, layer: Attention, batch: Any, plan: Any) -> Tensor:
            if layer.layer_id == bad:
                raise RuntimeError("no kernel image")
            return super().attend(q, layer, batch, plan)

    def made() -> Library:
        sizes = tuple((layer.num_kv_heads, layer.head_dim) for layer in layers)
        cells = MHATokenToKVPool(2, 4, sizes, torch.float32, "cpu")
        return Library(shape_of(layers, False), ReqToTokenPool(1, 8, 4, "cpu"), cells, KernelTable())

    return failure_of(made, layers, torch.float32, torch.int64, False)


@pytest.mark.parametrize("other", KINDS, ids=lambda kind: next(iter(kind)))
@pytest.mark.parametrize("bad", [-1, 0, 1])
def test_layers_that_differ_in_one_thing_are_both_tried(bad: int, other: dict[str, Any]) -> None:
    layers = [Attention(0, **PLAIN), Attention(1, **(PLAIN | other))]
    assert failure(bad, layers) == ("" if bad < 0 else "its first call failed: RuntimeError: no kernel image")

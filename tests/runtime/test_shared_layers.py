"""Sliding-window layers in the storage of other layers: where each is kept, and what its tensors
are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.memory.pools import PER_HEAD, MHATokenToKVPool, PageMajorTokenToKVPool
from sglcore.runtime.memory.shared_layers import shared_places, sharing_of

PAGE, HEADS, HEAD_DIM, WINDOW = 4, 2, 3, 6


def make_layers(kinds: str, **changes: int) -> list[Attention]:
    """Layers with a window ("w") or without ("f"); `changes` are of the last one."""
    sizes = [{"num_kv_heads": HEADS, "head_dim": HEAD_DIM} for _ in kinds]
    sizes[-1] |= changes
    return [
        Attention(index, 4, each["num_kv_heads"], each["head_dim"], sliding_window=WINDOW if kind == "w" else None)
        for index, (kind, each) in enumerate(zip(kinds, sizes, strict=True))
    ]


@pytest.mark.parametrize(
    ("kinds", "unit", "places"),
    [
        ("wf", 1, {0: (1, 0)}),
        ("wfwf", 1, {0: (1, 0), 2: (3, 0)}),
        ("wwfww", 4, {0: (2, 0), 1: (2, 1), 3: (2, 2), 4: (2, 3)}),
        ("wwwff", 2, {0: (3, 0), 1: (4, 0), 2: (3, 1)}),
        ("wfff", 1, {0: (1, 0)}),
    ],
)
def test_window_layers_are_dealt_to_the_others(kinds: str, unit: int, places: dict[int, tuple[int, int]]) -> None:
    layers = make_layers(kinds)
    found = sharing_of(layers, WINDOW, PER_HEAD)
    assert (found.unit, found.windows, found.full) == (unit, kinds.count("w"), kinds.count("f"))
    assert shared_places(layers, {index for index, kind in enumerate(kinds) if kind == "w"}) == places
    assert len(set(places.values())) == len(places) and all(index < unit for _, index in places.values())


@pytest.mark.parametrize(
    ("kinds", "window", "changes", "why"),
    [
        ("ff", 0, {}, "no layer has a sliding window"),
        ("wf", 0, {}, "no window page would be freed"),
        ("ww", WINDOW, {}, "every layer keeps a sliding window only"),
        ("wf", WINDOW, {"num_kv_heads": 4}, r"not yet: layers have KV heads of several shapes \(2 of 3, 4 of 3\)"),
        ("wf", WINDOW, {"head_dim": 5}, "not yet: layers have KV heads of several shapes"),
    ],
)
def test_what_cannot_be_shared_says_why(kinds: str, window: int, changes: dict[str, int], why: str) -> None:
    found = sharing_of(make_layers(kinds, **changes), window, PER_HEAD)
    assert found.unit == 0
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.reason)


def test_a_pool_that_cannot_show_windows_is_a_reason() -> None:
    found = sharing_of(make_layers("wf"), WINDOW, replace(PER_HEAD, windows=None))
    assert found.unit == 0 and found.reason.startswith("not yet: this device's KV pool")


@pytest.mark.parametrize("kind", [MHATokenToKVPool, PageMajorTokenToKVPool])
def test_a_layer_has_its_own_page_of_each_block(kind: type[MHATokenToKVPool]) -> None:
    """Every slot of every window layer is another slot of the storage, and that of no other
    layer."""
    unit, blocks = 3, 4
    shapes = ((0, HEAD_DIM), (HEADS, HEAD_DIM), (0, HEAD_DIM), (0, HEAD_DIM))
    full = kind(unit * (blocks + 1) - 1, PAGE, shapes, torch.float32, "cpu")
    windows = full.windows({0: (1, 0), 2: (1, 2), 3: (1, 1)}, unit)
    assert (windows.page_size, windows.num_layers, windows.layout) == (PAGE, 4, full.layout)
    assert windows.num_cells == full.num_cells - 2 * PAGE
    assert all(part.numel() == 0 and part.shape[0] == windows.kv(0)[0].shape[0] for part in windows.kv(1))
    for layer, index in ((0, 0), (2, 2), (3, 1)):
        for block in range(blocks + 1):
            cells = block * unit * PAGE + torch.arange(PAGE)
            wanted = torch.randn(2, PAGE, HEADS, HEAD_DIM)
            windows.store(layer, wanted[0], wanted[1], cells)
            for found in (windows.read_cells(layer, cells), full.read_cells(1, cells + index * PAGE)):
                assert torch.equal(torch.stack(found), wanted)
            full.write_cells(1, cells + index * PAGE, *(wanted * 0))
            assert not any(part.any() for part in full.kv(1)), "no other slot was written"

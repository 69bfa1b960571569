"""The kernel table: what is replaced, and what the ledger can say about it."""

from __future__ import annotations

import functools

import pytest
import torch

from sglcore.device.errors import ConfigError
from sglcore.runtime.kernels import reference
from sglcore.runtime.kernels.reference import reference_kernels
from sglcore.runtime.kernels.table import entry_names

OPTIONAL = {
    "rotary_and_store": ("rotary", "store_kv"),
    "norm_rotary_and_store": ("rms_norm", "rotary", "store_kv", "rotary_and_store"),
    "gated_linear": ("linear", "silu_and_mul"),
    "pack_quantized": ("linear",),
    "quantize_linear": ("linear",),
    "pack_parts": ("linear", "pack_linear"),
    "pack_head": ("linear", "embedding"),
    "head": ("linear",),
    "greedy": ("draw",),
}
"""Entries that the reference table lacks, and those that they rest on."""


def fast_gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Another implementation."""
    return torch.nn.functional.gelu(x, approximate=approximate)


class Silu:
    """An implementation that is an object."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Not the real thing."""
        return x


def test_the_origin_names_the_implementation_of_every_entry() -> None:
    origin = reference_kernels().origin
    assert tuple(origin) == tuple(name for name in entry_names() if name not in OPTIONAL)
    assert origin["rms_norm"] == "sglcore.runtime.kernels.reference:rms_norm"


def test_a_replaced_entry_runs_and_says_where_it_is_from() -> None:
    first = reference_kernels()
    table = first.replace(gelu=functools.partial(fast_gelu, approximate="tanh"), silu_and_mul=Silu())
    assert table.origin["gelu"] == f"{__name__}:fast_gelu"
    assert table.origin["silu_and_mul"] == f"{__name__}:Silu"
    assert table.origin["linear"] == first.origin["linear"]
    assert first.origin["gelu"] == "sglcore.runtime.kernels.reference:gelu"
    assert not torch.equal(table.gelu(torch.ones(1, 1)), first.gelu(torch.ones(1, 1)))


def test_an_optional_entry_goes_when_what_it_does_the_work_of_is_replaced() -> None:
    plain, entries = reference_kernels(), {name: getattr(reference, name) for name in OPTIONAL}
    assert all(getattr(plain, name) is None for name in OPTIONAL)
    table = plain.replace(**entries)
    for optional, parts in OPTIONAL.items():
        entry = entries[optional]
        assert table.origin[optional] == f"sglcore.runtime.kernels.reference:{optional}"
        assert getattr(table.replace(gelu=fast_gelu), optional) is entry
        for name in parts:
            part = getattr(table, name)
            assert getattr(table.replace(**{name: part}), optional) is None
            assert getattr(table.replace(**{name: part, optional: entry}), optional) is entry


def test_an_entry_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no entry quick_gelu; wanted one of linear, pack_linear, embedding"):
        reference_kernels().replace(quick_gelu=fast_gelu)

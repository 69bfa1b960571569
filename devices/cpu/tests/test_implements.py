"""Methods that implement entries of the kernel table."""

from __future__ import annotations

import pytest

from sglcore.runtime.kernels.table import Limited
from sglcore_cpu.choice import load_library
from sglcore_cpu.kernels.implements import entries, implements
from sglcore_cpu.kernels.table import native_table


def refuse(*call: object) -> str:
    return "no"


class Two:
    """One entry that takes every call, one with limits, and a method that is no entry."""

    @implements()
    def gelu(self, x: int) -> int:
        """Return x + 1."""
        return x + 1

    @implements(refuse)
    def silu_and_mul(self, x: int) -> tuple[Two, int]:
        """Return the object and x."""
        return self, x

    def other(self) -> None:
        """Do nothing."""


class Again:
    """One of the entries of `Two`."""

    @implements()
    def gelu(self, x: int) -> int:
        """Return x."""
        return x


def test_a_marked_method_is_the_entry_of_its_name_and_is_called_as_any_other() -> None:
    two = Two()
    found = entries(two)
    assert found.keys() == {"gelu", "silu_and_mul"}
    plain, limited = found["gelu"], found["silu_and_mul"]
    assert not isinstance(plain, Limited) and plain(1) == 2
    assert isinstance(limited, Limited) and limited.takes is refuse and limited.function(3) == (two, 3)
    assert two.silu_and_mul(3) == (two, 3)


def test_two_objects_for_one_entry_are_an_error() -> None:
    with pytest.raises(ValueError, match="two objects implement the kernel table entries gelu"):
        entries(Two(), Again())


def test_the_native_table_replaces_entries_by_the_methods_of_their_names() -> None:
    table = native_table(load_library().engine(load_library().usable()[-1], 1, ()))
    for name in ("linear", "rms_norm", "silu_and_mul", "tree_walk", "sparse_mqa", "grouped_linear", "greedy"):
        assert name in table.replaced, name

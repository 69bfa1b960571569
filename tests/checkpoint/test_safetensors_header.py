"""The header of a safetensors file agrees with what reads its tensors."""

from __future__ import annotations

from sglcore.checkpoint.safetensors_header import ELEMENT_BYTES, PLAIN_BYTES
from sglcore.models.safetensors_file import DTYPES, READABLE


def test_every_type_that_is_read_has_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in READABLE.items()} == {
        name: ELEMENT_BYTES[name] for name in READABLE
    }
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == PLAIN_BYTES

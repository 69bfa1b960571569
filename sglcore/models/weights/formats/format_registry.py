"""Maps the kinds of quantisation schemes to the formats that read them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglcore.models.weights.formats import awq, compressed_tensors, float8, gptq
from sglcore.models.weights.formats.format_tensors import Format

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "gptq": gptq.FORMAT,
        "awq": awq.FORMAT,
        "packed": compressed_tensors.PACKED,
        "integers": compressed_tensors.INTEGERS,
        "float8": float8.FORMAT,
    }
)
"""The formats by `Scheme.kind`."""

"""Maps the kinds of quantisation schemes to the formats that read them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglcore.models.quantized_formats import awq, compressed, float8, gptq
from sglcore.models.quantized_formats.tensors import Format

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "gptq": gptq.FORMAT,
        "awq": awq.FORMAT,
        "packed": compressed.PACKED,
        "integers": compressed.INTEGERS,
        "float8": float8.FORMAT,
    }
)
"""The formats by `Scheme.kind`."""

"""The fields by which every dialect asks how tokens are drawn. Those that their own protocols lack are this server's."""

from __future__ import annotations

from pydantic import Field

from sglcore.serving.protocol.common import Body, Count, Seed, TopK

DRAWING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
)
"""The fields of `Drawing`, each a parameter of the same name."""


class Drawing(Body):
    """How tokens are drawn."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Seed | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None

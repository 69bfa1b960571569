"""Prompts to fill in text between two texts, for models that are trained to do so."""

from __future__ import annotations

from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.server_errors import InvalidRequest

FILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Sets of special tokens that mark the text before the gap, the text after it, and the gap, with
which models are trained to fill in (Bavarian et al. 2022)."""


def fill_marks(frontend: Frontend) -> tuple[str, str, str] | None:
    """Return the three special tokens for filling in, as text: those before the beginning, the end
    and the gap. It is the first set in FILL that this model's tokenizer has completely; None if it
    has none."""
    tokenizer = frontend.codec.tokenizer
    return next((each for each in FILL if all(tokenizer.token_to_id(mark) is not None for mark in each)), None)


def filled(frontend: Frontend, before: str, after: str, *, param: str, instead: str) -> str:
    """Return the prompt, with special tokens as text, that makes a model write the text between
    `before` and `after`. Raises InvalidRequest if the tokenizer lacks these special tokens, and
    TextError if the server runs without a tokenizer. `param`: the field that both errors name;
    `instead`: what the client can do instead, for the error's remedy."""
    frontend.codec.need_text("filling in between two texts", param)
    marks = fill_marks(frontend)
    if marks is None:
        raise InvalidRequest(
            "this model's tokenizer has no tokens to fill in between two texts",
            wanted=f"such as {', '.join(FILL[0])}",
            remedy=f"{instead}, or serve a model that was trained for it",
            param=param,
        )
    begin, end, middle = marks
    return f"{begin}{before}{end}{after}{middle}"

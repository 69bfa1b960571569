"""Lower bounds for the number of tokens of a text, from its beginning, so that a text that exceeds
the context is not read to its end."""

from __future__ import annotations

from tokenizers import Tokenizer

from sglcore.schedule.request_errors import ContextError

USUAL = 4
"""Usual number of characters of a token."""
LEAST_PIECE = 4096
"""Least number of characters that are encoded at a time."""
MOST_SPLIT = 256
"""Tokens that are subtracted for the two cut ends of an encoded piece. A cut may go through a word
that is one token as a whole, such as a word of 100 letters that a WordPiece model does not know."""


def beginning_over(tokenizer: Tokenizer, text: str, most: int) -> int:
    """Return a number of leading characters that surely have more than `most` tokens, however the
    text continues; the length of the text if that is not sure. A long text is encoded up to that
    point; a text of at most about twice the usual characters of `most` tokens is not encoded."""
    size = USUAL * most + LEAST_PIECE
    if len(text) <= 2 * size:
        return len(text)
    found = 0
    for begin in range(0, len(text) - size, size):
        piece = tokenizer.encode_batch_fast([text[begin : begin + size]], add_special_tokens=False)[0]
        found += max(len(piece.ids) - MOST_SPLIT, 0)
        if found > most:
            return begin + size
    return len(text)


def refuse_longer(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Raise ContextError for a long text that surely has more than `most` tokens; a text that
    passes may still have more. Waits while the beginning of a long text is encoded."""
    read = beginning_over(tokenizer, text, most)
    if read < len(text):
        raise ContextError(
            f"the prompt of this request has {len(text)} characters, and the first {read} of them have more than {most}"
            " tokens",
            wanted=f"at most {most} tokens",
            remedy="shorten the prompt",
        )

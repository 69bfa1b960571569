"""How long a text is in tokens, known from its beginning: what no context holds is not read to its
end."""

from __future__ import annotations

from tokenizers import Tokenizer

from sglcore.schedule.request import ContextError

USUAL = 4
"""Characters of a token in most texts."""
LEAST_PIECE = 4096
"""Characters of a piece in any case."""
MOST_SPLIT = 256
"""Tokens by which a piece may have more than its part of the whole text. A cut may go through a
word that is one token as a whole, such as one of 100 letters that a WordPiece model does not know,
at either end of the piece."""


def beginning_over(tokenizer: Tokenizer, text: str, most: int) -> int:
    """How many characters from the beginning of a text surely have more than `most` tokens, however
    it goes on; all where that is not sure. Reads so much of a long text, and nothing of one that
    may have `most` tokens of the usual length twice."""
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
    """Raise ContextError for a long text that surely has more than `most` tokens; one that passes
    may have more. Waits as long as the beginning takes that tells."""
    read = beginning_over(tokenizer, text, most)
    if read < len(text):
        raise ContextError(
            f"the prompt of this request has {len(text)} characters, and the first {read} of them have more than {most}"
            " tokens",
            wanted=f"at most {most} tokens",
            remedy="shorten the prompt",
        )

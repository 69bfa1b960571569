"""Single tokens as text and bytes, for log-probabilities: a token may be only a part of a
character."""

from __future__ import annotations

import json
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from sglcore.engine.tokenizers.text_codec import TextCodec


class TokenTexts:
    """The text and bytes of each token of a tokenizer, cached. The text of an added token, such as
    a special one, is its name; that of an id that the tokenizer lacks is empty."""

    def __init__(self, codec: TextCodec) -> None:
        tokenizer = codec.tokenizer
        self._decode = codec.token
        self._piece = tokenizer.id_to_token
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        kinds = _decoder_kinds(tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_space_marks = "Metaspace" in kinds or ("ByteFallback" in kinds and "Replace" in kinds)
        self._cached = lru_cache(maxsize=65536)(self._find)

    def data(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text in UTF-8, perhaps a part of a character;
        empty for an id that the tokenizer lacks."""
        return self._cached(token_id)[0]

    def text(self, token_id: int) -> str:
        """Return the text of a token; bytes that are not complete UTF-8 are written
        `bytes:\\xe2\\x80`, so that each token has a distinct text."""
        return self._cached(token_id)[1]

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is special, so that decoding leaves it out by default; false for
        an id that the tokenizer lacks."""
        return token_id in self._special

    def is_unknown(self, token_id: int) -> bool:
        """Return whether the tokenizer has no such token."""
        return self._piece(token_id) is None

    def _find(self, token_id: int) -> tuple[bytes, str]:
        data = self._bytes(token_id)
        try:
            return data, data.decode("utf-8")
        except UnicodeDecodeError:
            return data, "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._piece(token_id)
        if piece is None:
            return b""
        if self._is_byte_level and all(letter in BYTE_OF_LETTER for letter in piece):
            return bytes(BYTE_OF_LETTER[letter] for letter in piece)
        if self._has_space_marks:
            return _marked(piece)
        return self._decode(token_id).encode()


def _byte_letters() -> dict[str, int]:
    """Return a map of 256 entries from each letter in the vocabulary of a byte-level tokenizer to
    its byte, 0 to 255: printable bytes are their own letters, the others have letters from U+0100
    on (Radford et al. 2019, GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {
        **{chr(byte): byte for byte in plain},
        **{chr(0x100 + place): byte for place, byte in enumerate(others)},
    }


def _marked(piece: str) -> bytes:
    """Return the bytes of the vocabulary entry `piece`: the one byte that an entry such as `<0xE2>`
    names, else its text in UTF-8 with a space for each U+2581."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("\u2581", " ").encode()


def _decoder_kinds(decoder: Any) -> frozenset[str]:
    """Return the type names of `decoder`, a decoder of the library tokenizers, and of the decoders
    that it chains, such as "ByteLevel"; empty for None."""
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(part["type"] for part in (state, *state.get("decoders", ())))


BYTE_OF_LETTER = MappingProxyType(_byte_letters())
"""Letter -> byte, for byte-level vocabularies."""

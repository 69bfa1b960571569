"""Text and tokens: the checkpoint's tokenizer, its chat template, and text that grows token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sglcore.device.errors import ConfigError
from sglcore.engine.chat_template import ChatTemplate, TextError

__all__ = ["GrowingText", "TextCodec", "TextError", "eos_token_ids"]

CONTEXT = 8
"""Tokens of the prompt that are decoded with the first new ones."""

UNKNOWN = "\ufffd"
"""What an incomplete character decodes to."""


class TextCodec:
    """A checkpoint's tokenizer with its special tokens and chat template."""

    def __init__(self, folder: Path, *, chat_template: str | None = None) -> None:
        """`chat_template` is a template's text, instead of the checkpoint's. Raises ConfigError."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"there is no tokenizer.json in {folder}",
                remedy="save the fast tokenizer beside the weights",
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"{file} can not be read: {error}", remedy="download it again") from None
        # A saved tokenizer may cut and fill texts to one length; the scheduler wants them as they are.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.settings = _json(folder / "tokenizer_config.json")
        own = ChatTemplate.load(folder, self.settings)
        self.template = own if chat_template is None else own.replaced(chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the checkpoint puts around a prompt (such as BOS)."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=special).ids
        except TypeError:
            raise TextError(f"{text!r:.60} holds lone surrogates", wanted="text that UTF-8 can encode") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """One token as its own text, special tokens included."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a conversation by the checkpoint's template; raises TextError if it has none or refuses."""
        return self.template.render(messages, variables=variables)


class GrowingText:
    """The text of tokens that arrive one after another, cut at stop strings.

    `push` returns what may be shown: never half a character, never the beginning of something that may become a stop
    string. `stopped_by` is the stop string that ended the text. `prompt` ends with the tokens before the first one, which
    decide whether that begins with a space.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str],
        *,
        skip_special: bool,
        include_stop: bool,
        prompt: Sequence[int] = (),
    ) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._ids = list(prompt[-CONTEXT:])
        self._first, self._read = 0, len(self._ids)
        self._shown = 0
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Take new tokens; returns the text that became final."""
        for token_id in ids:
            if self.stopped_by is not None:
                break
            self._ids.append(token_id)
            piece = self._pending()
            if piece and not piece.endswith(UNKNOWN):
                self._append(piece)
                self._first, self._read = self._read, len(self._ids)
        return self._show(len(self.text) - self._held_back())

    def finish(self) -> str:
        """No more tokens come; returns the rest, with what an incomplete last character decodes to."""
        if self.stopped_by is None:
            self._append(self._pending())
        return self._show(len(self.text))

    def _pending(self) -> str:
        """What the unread tokens add to the text of those before them, which decoders need for spaces and bytes."""
        known, ids = self._read - self._first, self._ids[self._first :]
        before = self._codec.decode(ids[:known], skip_special_tokens=self._skip_special)
        return self._codec.decode(ids, skip_special_tokens=self._skip_special)[len(before) :]

    def _append(self, piece: str) -> None:
        first = max(len(self.text) - max(map(len, self._stop), default=0), 0)
        self.text += piece
        found = [(place, word) for word in self._stop if (place := self.text.find(word, first)) >= 0]
        if found:
            place, word = min(found, key=lambda item: (item[0], -len(item[1])))
            self.text = self.text[: place + (len(word) if self._include_stop else 0)]
            self.stopped_by = word

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.stopped_by is not None:
            return 0
        longest = max(map(len, self._stop), default=0)
        for size in range(min(longest - 1, len(self.text)), 0, -1):
            if any(word.startswith(self.text[-size:]) for word in self._stop):
                return size
        return 0

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(end, self._shown)
        return self.text[start : self._shown]


def eos_token_ids(folder: Path) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} can not be read: {error}", wanted="JSON", remedy="download it again") from None

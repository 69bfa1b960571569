"""Text and tokens: the checkpoint's tokenizer, its chat template, and text that grows token by
token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.gguf_config import end_tokens
from sglcore.checkpoint.gguf_header import is_gguf, read_header
from sglcore.checkpoint.pooling_config import read_prompts
from sglcore.device.errors import ConfigError
from sglcore.engine.tokenizers.chat_template import ChatTemplate, Message, TextError
from sglcore.engine.tokenizers.converted_tokenizer import convert_tokenizer
from sglcore.engine.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from sglcore.engine.tokenizers.text_length import beginning_over, refuse_longer
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.stop_pattern import PatternScan, stop_pattern

__all__ = ["IncrementalDetokenizer", "TextCodec", "TextError", "eos_token_ids"]

LONG_TEXT = 4096
"""Texts with more characters than this are encoded by a call that lets other threads run; that call
is slower for short texts."""

MARGIN = 256
"""Tokens read beyond the tokens that are kept of a text, so that the kept ones are the same as if
the whole text were read."""

CONTEXT = 8
"""Tokens of the prompt that are decoded with the first new ones."""

UNKNOWN = "\ufffd"
"""The character to which an incomplete character decodes."""

INCOMPLETE = 4
"""Tokens at the end that may be an incomplete character: that has at most 3 bytes, and a token has
at least one."""


EncodedPair = tuple[list[int], list[int] | None]
"""Token ids, and the segment of each."""


class TextCodec:
    """A checkpoint's tokenizer with its special tokens and chat template."""

    reads_text = True
    """Whether there is text at all; if not, methods that need it raise TextError."""

    def __init__(self, folder: Path, *, chat_template: str | None = None) -> None:
        """Open a checkpoint folder or a GGUF file. `chat_template` is a template's text that
        replaces the checkpoint's.

        Raises ConfigError, and CheckpointError for a GGUF file that is damaged or has an
        unsupported tokenizer.
        """
        self.tokenizer, self.settings = _read(folder)
        # A saved tokenizer may truncate and pad texts to one length; the scheduler needs the tokens
        # as they are.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.prompts = read_prompts(folder)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        own = ChatTemplate.load(folder, self.settings)
        self.template = own if chat_template is None else own.replaced(chat_template)

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Return the token ids of a text; `special` adds the tokens that the checkpoint puts around
        a prompt (such as BOS). Raises ContextError for a long text that surely has more than `most`
        tokens, without reading it to its end."""
        try:
            if most is not None:
                refuse_longer(self.tokenizer, text, most)
            return self._encoded(text, special=special).ids
        except TypeError:
            raise TextError(f"{text!r:.60} holds lone surrogates", wanted="text that UTF-8 can encode") from None

    def encode_texts(
        self, first: str, second: str | None = None, *, most: int | None = None, limit: int | None = None
    ) -> EncodedPair:
        """Return the token ids of one text or two, joined as the checkpoint joins them, and the
        segment of each token; None if all are of the first.

        At most `most` tokens are kept: the longer text loses its end first, then both lose theirs,
        as in transformers. Without `most`, a long text that surely has more than `limit` tokens
        raises ContextError, as in `encode`.
        """
        texts = [first] if second is None else [first, second]
        try:
            if most is not None:
                texts = [text[: beginning_over(self.tokenizer, text, most + MARGIN)] for text in texts]
            elif limit is not None:
                for text in texts:
                    refuse_longer(self.tokenizer, text, limit)
            found = self._encoded(*texts)
            if most is not None and len(found.ids) > most:
                found = self._cut(texts, most)
        except TypeError:
            raise TextError("this is not text", wanted="text that UTF-8 can encode") from None
        return found.ids, found.type_ids if any(found.type_ids) else None

    def first_tokens(self, text: str, count: int) -> str:
        """Return a text up to the end of its first `count` tokens."""
        beginning = text[: beginning_over(self.tokenizer, text, count + MARGIN)]
        offsets = self.tokenizer.encode_batch([beginning], add_special_tokens=False)[0].offsets
        return text if len(offsets) <= count else text[: offsets[count - 1][1]]

    def _encoded(self, first: str, second: str | None = None, *, special: bool = True) -> Encoding:
        """Encode texts; long ones without offsets, because the call that computes offsets blocks
        every other thread."""
        if len(first) + len(second or "") <= LONG_TEXT:
            return self.tokenizer.encode(first, second, add_special_tokens=special)
        given = first if second is None else (first, second)
        return self.tokenizer.encode_batch_fast([given], add_special_tokens=special)[0]

    def _cut(self, texts: Sequence[str], most: int) -> Encoding:
        room = most - self.tokenizer.num_special_tokens_to_add(len(texts) > 1)
        if room < len(texts):
            raise TextError(f"a text cannot be cut to {most} tokens", wanted=f"at least {most - room + len(texts)}")
        parts = [self._encoded(text, special=False) for text in texts]
        lengths = [len(part.ids) for part in parts]
        shorter = min(lengths) if 2 * min(lengths) <= room else room // 2
        longer = 0 if lengths[0] > lengths[-1] else 1  # of equally long ones the second keeps the odd token
        for place, part in enumerate(parts):
            part.truncate(room if len(parts) == 1 else room - shorter if place == longer else shorter)
        return self.tokenizer.post_process(parts[0], parts[1] if len(parts) > 1 else None)

    def need_text(self, what: str, field: str | None = None) -> None:
        """Raise TextError, with the `field` of a request as the cause, if there is no text: `what`
        needs it."""

    def check(self, params: SamplingParams) -> None:
        """Raise TextError for parameters that are about text, if there is no text."""

    def detokenizer(self, stop: Sequence[str], **how: Any) -> IncrementalDetokenizer:
        """Return a detokenizer for tokens that arrive one by one; `how`: options of
        IncrementalDetokenizer.
        """
        return IncrementalDetokenizer(self, stop, **how)

    def prompted(self, text: str, name: str | None = None) -> str:
        """Return the text to embed, after the checkpoint's prompt `name` (None: the default prompt,
        if there is one).

        Raises TextError if the checkpoint has no prompt of that name.
        """
        name = self.prompts.default if name is None else name
        if name is not None and name not in self.prompts.texts:
            known = ", ".join(self.prompts.texts) or "none: the checkpoint has no prompts"
            raise TextError(f"there is no prompt named {name!r}", wanted=known, remedy="leave the name out")
        return text if name is None else self.prompts.texts[name] + text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if len(ids) > LONG_TEXT:
            return self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return one token as its own text, special tokens included."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the prompt of a conversation by the checkpoint's template. Raises TextError if it
        has none or if the template refuses."""
        return self.template.render(messages, variables=variables)


class Ending(NamedTuple):
    """The start and end of what ends a text: a stop string, or the match of a pattern."""

    start: int
    end: int
    cause: str


class IncrementalDetokenizer:
    """The text of tokens that arrive one after another, cut at stop strings and at matches of
    `patterns`.

    `push` returns text that is final: no half characters, and no beginning of a possible stop
    string or match. `stopped_by` is the stop string or pattern that ended the text; `taken` is the
    number of tokens of the last `push` up to the one that completed it. `prompt` ends with the
    tokens before the first one, which decide whether the text begins with a space. A stop string or
    match that is complete within the first `min_tokens` tokens does not count.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str],
        *,
        skip_special: bool,
        include_stop: bool,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
        patterns: Sequence[str] = (),
    ) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._skipped = codec.special_ids if skip_special else frozenset()
        self._stop = tuple(stop)
        self._scans = [PatternScan(stop_pattern(each)) for each in patterns]
        self._include_stop = include_stop
        self._ids = list(prompt[-CONTEXT:])
        self._first, self._read = 0, len(self._ids)
        self._shown = 0
        self._count, self._min_tokens = 0, min_tokens
        self._free = 0
        """Number of leading characters of the text in which no stop string ends."""
        self.text = ""
        self.stopped_by: str | None = None
        self.taken = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take new tokens, up to the one that ends the text; returns the text that became final."""
        self.taken = 0
        for token_id in ids:
            if self.stopped_by is not None:
                break
            self.taken += 1
            self._count += 1
            if token_id in self._skipped:
                continue
            self._ids.append(token_id)
            new = self._pending()
            if new and not new.endswith(UNKNOWN):
                self._append(new)
                self._first, self._read = self._read, len(self._ids)
            elif len(self._ids) - self._read > 2 * INCOMPLETE:
                self._take_garbage()
        return self._show(len(self.text) - self._held_back())

    def finish(self) -> str:
        """Finish after the last token; returns the rest of the text, including the decoding of an
        incomplete last character."""
        if self.stopped_by is None:
            self._append(self._pending())
        return self._show(len(self.text))

    def _pending(self) -> str:
        """Return the text that the unread tokens add to the tokens before them, which decoders need
        for spaces and bytes.
        """
        return self._decoded(len(self._ids))[len(self._decoded(self._read)) :]

    def _take_garbage(self) -> None:
        """Take bytes that form no character as text, except bytes that may still become a
        character; otherwise they would be decoded again with every token. Takes nothing if that
        would cut a character."""
        end = len(self._ids) - INCOMPLETE
        before, done, whole = (self._decoded(place) for place in (self._read, end, len(self._ids)))
        if len(done) > len(before) and whole.startswith(done):
            self._append(done[len(before) :])
            self._first, self._read = self._read, end

    def _decoded(self, end: int) -> str:
        return self._codec.decode(self._ids[self._first : end], skip_special_tokens=self._skip_special)

    def _append(self, new: str) -> None:
        may_end, before = self._count > self._min_tokens, len(self.text)
        self.text += new
        found = [
            Ending(match.start, match.end, scan.pattern.text)
            for scan in self._scans
            if (match := scan.feed(new, may_end=may_end)) is not None
        ]
        if not may_end:
            self._free = len(self.text)
            return
        found += self._words(before)
        if found:
            ending = min(found, key=lambda each: (each.start, -each.end))
            self.text = self.text[: ending.end if self._include_stop else ending.start]
            self.stopped_by = ending.cause

    def _words(self, before: int) -> Iterator[Ending]:
        """Return the stop strings in the text.

        The first `before` characters were already searched.
        """
        first = max(before - max(map(len, self._stop), default=0), 0)
        for word in self._stop:
            place = self.text.find(word, max(first, self._free - len(word) + 1))
            if place >= 0:
                yield Ending(place, place + len(word), word)

    def _held_back(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string or
        a match."""
        if self.stopped_by is not None:
            return 0
        begun = max((_begun(self.text, word) for word in self._stop), default=0)
        return max(begun, *(scan.held_back for scan in self._scans)) if self._scans else begun

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(end, self._shown)
        return self.text[start : self._shown]


def _begun(text: str, word: str) -> int:
    """Return the length of the longest end of a text that is a proper prefix of a word."""
    place = text.find(word[0], max(len(text) - len(word) + 1, 0))
    while place >= 0 and not word.startswith(text[place:]):
        place = text.find(word[0], place + 1)
    return len(text) - place if place >= 0 else 0


def _read(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and the content of tokenizer_config.json."""
    if is_gguf(folder):
        return read_gguf_tokenizer(folder)
    file = folder / "tokenizer.json"
    settings = _json(folder / "tokenizer_config.json")
    if not file.is_file():
        tokenizer, special = convert_tokenizer(folder, eos_token_ids(folder))
        return tokenizer, {**special, **settings}
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {error}", remedy="download it again") from None
    return tokenizer, settings


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the token ids that end a text: from generation_config.json, else from config.json; or
    from a GGUF file.
    """
    if is_gguf(folder):
        return frozenset(end_tokens(read_header(folder)))
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}

"""Text and tokens: the checkpoint's tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.gguf_config import end_tokens
from sglcore.checkpoint.gguf_header import is_gguf, read_header
from sglcore.checkpoint.pooling_config import read_prompts
from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.chat_template import ChatTemplate, Message, TextError
from sglcore.engine.tokenizers.converted_tokenizer import convert_tokenizer
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from sglcore.engine.tokenizers.text_length import beginning_over, refuse_longer
from sglcore.sampling.params import SamplingParams

__all__ = ["TextCodec", "TextError", "eos_token_ids"]

LONG_TEXT = 4096
"""Texts with more characters, and lists with more tokens, than this are processed by a call that
lets other threads run; that call is slower for short ones."""

MARGIN = 256
"""Tokens that are read in addition to those that are kept of a text, so that the kept ones are the
same as if the whole text were read."""

EncodedPair = tuple[list[int], list[int] | None]
"""Token ids, and the segment id of each (None: all 0)."""


class TextCodec:
    """A checkpoint's tokenizer with its special tokens and chat template."""

    reads_text = True
    """Whether there is a tokenizer; without one (`SkippedCodec`), methods that need text raise
    TextError."""

    def __init__(self, folder: Path, *, chat_template: str | None = None) -> None:
        """Open a checkpoint folder or a GGUF file. `chat_template`: the text of a template that
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
        tokens (None: no limit), without reading it to its end, and TextError for text that UTF-8
        cannot encode."""
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
        segment id of each token; None if all are 0.

        At most `most` tokens are kept: the longer text loses its end first, then both lose theirs,
        as in transformers. Without `most`, a long text that surely has more than `limit` tokens
        raises ContextError, without being read to its end. Raises TextError if `most` has no room
        for a token of each text, and for text that UTF-8 cannot encode.
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
        """Return the beginning of a text, up to the end of its first `count` tokens (1 or more);
        the whole text if it has no more."""
        beginning = text[: beginning_over(self.tokenizer, text, count + MARGIN)]
        offsets = self.tokenizer.encode_batch([beginning], add_special_tokens=False)[0].offsets
        return text if len(offsets) <= count else text[: offsets[count - 1][1]]

    def _encoded(self, first: str, second: str | None = None, *, special: bool = True) -> Encoding:
        """Return the encoding of one text or two. Long ones have no offsets, because the call that
        computes offsets blocks every other thread."""
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
        """Raise TextError if there is no tokenizer; here there is one, so nothing happens. `what`
        needs text; `field`: the field of the request that is the cause."""

    def check(self, params: SamplingParams) -> None:
        """Raise TextError for parameters that need text if there is no tokenizer; here there is
        one, so nothing happens."""

    def detokenizer(self, stop: Sequence[str], **how: Any) -> IncrementalDetokenizer:
        """Return a detokenizer for tokens that arrive one by one; `how`: keyword arguments of
        `IncrementalDetokenizer`."""
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
        """Return the text of token ids, without special tokens unless `skip_special_tokens` is
        False."""
        if len(ids) > LONG_TEXT:
            return self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return the text of one token; special tokens have text too."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the text of a conversation by the chat template, ending with the beginning of the
        answer; `variables`: further variables of the template. Raises TextError without a template,
        for a variable name in RESERVED, and if the template refuses the messages."""
        return self.template.render(messages, variables=variables)


def _read(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and settings as in a tokenizer_config.json: those of that file, added
    to what a conversion without tokenizer.json found; or those of a GGUF file. Raises ConfigError
    and CheckpointError."""
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
    from a GGUF file. Empty if none is named."""
    if is_gguf(folder):
        return frozenset(end_tokens(read_header(folder)))
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}

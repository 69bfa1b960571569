"""The replacement for a tokenizer that is not read: token ids in, token ids out.

It has no tokens and makes no text. A call that needs text raises a TextError that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer
from tokenizers.models import BPE

from sglcore.device.errors import ConfigError
from sglcore.engine.tokenizers.chat_template import ChatTemplate, Message, TextError
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import EncodedPair, TextCodec
from sglcore.sampling.params import SamplingParams

SKIPPED = "no tokenizer is read (--skip-tokenizer)"
"""The reason why there is no text."""


def open_codec(folder: Path, *, skips: bool, chat_template: str | None = None) -> TextCodec:
    """Open the text side of a checkpoint folder or GGUF file; with `skips`, one without text.
    Raises ConfigError and CheckpointError as `TextCodec`, and ConfigError for a template without a
    tokenizer."""
    if not skips:
        return TextCodec(folder, chat_template=chat_template)
    if chat_template is not None:
        raise ConfigError(f"a chat template is given, and {SKIPPED}", remedy="leave one of them out")
    return SkippedCodec()


class SkippedCodec(TextCodec):
    """A codec that has no text. Methods that make or take text raise TextError."""

    reads_text = False

    def __init__(self) -> None:
        """Read no file."""
        self.tokenizer, self.settings = Tokenizer(BPE()), {}
        self.special_ids = frozenset()
        self.template = ChatTemplate({}, {})

    def need_text(self, what: str, field: str | None = None) -> NoReturn:
        """Raise TextError: `what` needs text."""
        raise text_needed(what, field)

    def check(self, params: SamplingParams) -> None:
        """Raise TextError, which names the field, for parameters that are about text."""
        rules, repetition = params.token_rules, params.repetition
        about_text = {
            "stop": params.stop,
            "stop_regex": params.stop_regex,
            "bad_words": rules is not None and rules.bad_words,
            "dry_sequence_breakers": repetition is not None and repetition.breakers,
        }
        for field, is_given in about_text.items():
            if is_given:
                raise text_needed(field, field)
        if params.grammar is not None or params.thinking is not None:
            raise text_needed("structured output")

    def detokenizer(self, stop: Sequence[str], **how: Any) -> IncrementalDetokenizer:
        """Return a detokenizer that never makes text."""
        return NoText(self, stop, **how)

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Raise TextError."""
        self.need_text("a prompt of text")

    def encode_texts(
        self, first: str, second: str | None = None, *, most: int | None = None, limit: int | None = None
    ) -> EncodedPair:
        """Raise TextError."""
        self.need_text("a prompt of text")

    def first_tokens(self, text: str, count: int) -> str:
        """Raise TextError."""
        self.need_text("cutting a text")

    def prompted(self, text: str, name: str | None = None) -> str:
        """Raise TextError."""
        self.need_text("a prompt of text")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raise TextError."""
        self.need_text("the text of token ids")

    def token(self, token_id: int) -> str:
        """Raise TextError."""
        self.need_text("the text of a token")

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Raise TextError."""
        self.need_text("a chat")


class NoText(IncrementalDetokenizer):
    """The detokenizer without text: it takes every token and shows nothing."""

    def push(self, ids: Sequence[int]) -> str:
        """Take all tokens; returns no text."""
        self.taken = len(ids)
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


def text_needed(what: str, field: str | None = None) -> TextError:
    """Return the error for `what`, which needs text."""
    return TextError(
        f"{what} needs text, and {SKIPPED}",
        wanted="token ids, and parameters of tokens",
        remedy="give token ids, or start without --skip-tokenizer",
        field=field,
    )

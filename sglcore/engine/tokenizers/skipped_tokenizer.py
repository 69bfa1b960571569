"""The `TextCodec` for `--skip-tokenizer`: no tokenizer is read; prompts and answers are token ids.

A method that needs text raises a TextError that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer
from tokenizers.models import BPE

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.chat_template import ChatTemplate, Message, TextError
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import EncodedPair, TextCodec
from sglcore.sampling.params import SamplingParams

SKIPPED = "no tokenizer is read (--skip-tokenizer)"
"""The reason in errors."""


def open_codec(folder: Path, *, skips: bool, chat_template: str | None = None) -> TextCodec:
    """Return the codec of a checkpoint folder or GGUF file; with `skips`, a `SkippedCodec`.
    `chat_template`: text of a template that replaces the checkpoint's. Raises ConfigError or
    CheckpointError if the tokenizer cannot be read, and ConfigError for a template together with
    `skips`."""
    if not skips:
        return TextCodec(folder, chat_template=chat_template)
    if chat_template is not None:
        raise ConfigError(f"a chat template is given, and {SKIPPED}", remedy="leave one of them out")
    return SkippedCodec()


class SkippedCodec(TextCodec):
    """A `TextCodec` without a tokenizer. Methods that read or make text raise TextError, except
    `detokenizer`, which makes no text."""

    reads_text = False

    def __init__(self) -> None:
        """Read no file."""
        self.tokenizer, self.settings = Tokenizer(BPE()), {}
        self.special_ids = frozenset()
        self.template = ChatTemplate({}, {})

    def need_text(self, what: str, field: str | None = None) -> NoReturn:
        """Raise TextError: `what`, such as "a chat", needs text, and no tokenizer is read. `field`:
        the field of the request that is the cause (None: none)."""
        raise text_needed(what, field)

    def check(self, params: SamplingParams) -> None:
        """Raise TextError, which names the field, if `params` has a stop string or another
        parameter that needs text."""
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
        """Return a detokenizer that counts tokens and makes no text."""
        return NoText(self, stop, **how)

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> list[int]:
        """Raise TextError: there is no tokenizer."""
        self.need_text("a prompt of text")

    def encode_texts(
        self, first: str, second: str | None = None, *, most: int | None = None, limit: int | None = None
    ) -> EncodedPair:
        """Raise TextError: there is no tokenizer."""
        self.need_text("a prompt of text")

    def first_tokens(self, text: str, count: int) -> str:
        """Raise TextError: there is no tokenizer."""
        self.need_text("cutting a text")

    def prompted(self, text: str, name: str | None = None) -> str:
        """Raise TextError: there is no tokenizer."""
        self.need_text("a prompt of text")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raise TextError: there is no tokenizer."""
        self.need_text("the text of token ids")

    def token(self, token_id: int) -> str:
        """Raise TextError: there is no tokenizer."""
        self.need_text("the text of a token")

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """Raise TextError: there is no tokenizer."""
        self.need_text("a chat")


class NoText(IncrementalDetokenizer):
    """The detokenizer of `SkippedCodec`: it accepts every token and returns no text."""

    def push(self, ids: Sequence[int]) -> str:
        """Set `taken` to the number of tokens; returns ""."""
        self.taken = len(ids)
        return ""

    def finish(self) -> str:
        """Return ""."""
        return ""


def text_needed(what: str, field: str | None = None) -> TextError:
    """Return the error for `what`, such as "a chat", which needs text while no tokenizer is read.
    `field`: the field of the request that is the cause."""
    return TextError(
        f"{what} needs text, and {SKIPPED}",
        wanted="token ids, and parameters of tokens",
        remedy="give token ids, or start without --skip-tokenizer",
        field=field,
    )

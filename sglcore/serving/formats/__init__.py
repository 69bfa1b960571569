"""Chat formats: what a checkpoint's template writes for tool calls and reasoning, and how to read it back.

The format is chosen by evidence in the template and the tokenizer, and has to pass a test of itself (`self_test.py`).
"""

from sglcore.serving.formats.chat_format import ChatFormat, Rendered
from sglcore.serving.formats.delta import Delta
from sglcore.serving.formats.parser import DeltaParser

__all__ = ["ChatFormat", "Delta", "DeltaParser", "Rendered"]

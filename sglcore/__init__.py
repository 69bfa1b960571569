"""sglcore, one LLM inference engine; every accelerator is a package.

Importing this module loads neither numpy nor a tensor library; the public classes are imported on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglcore.engine.llm import LLM as LLM
    from sglcore.engine.llm import PromptEmbeds as PromptEmbeds
    from sglcore.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ("LLM", "PromptEmbeds", "SamplingParams", "__version__")

_HOMES = (
    ("LLM", "sglcore.engine.llm"),
    ("PromptEmbeds", "sglcore.engine.llm"),
    ("SamplingParams", "sglcore.sampling.params"),
)


def __getattr__(name: str) -> object:
    """Return the public class `name`, imported when it is first used. Raises AttributeError for
    other names."""
    for public, home in _HOMES:
        if public == name:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'sglcore' has no attribute {name!r}; it offers {', '.join(__all__)}")

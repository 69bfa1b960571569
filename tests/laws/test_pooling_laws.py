"""Models that embed or score: vectors of a batch equal transformers' for each text alone, with the
pooling written out here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.runtime.pooling import EmbeddingSteps, Pooler
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from tests.checkpoints import bert, gemma3, make_oracle, mistral, modernbert, qwen3, roberta, save
from tests.laws.engine import TOLERANCE, TokenEngine, random_prompts

pytestmark = pytest.mark.needs("device")

LENGTHS = (1, 17, 6, 30, 2)


def write_modules(folder: Path, mode: str | Mapping[str, bool], *, normalize: bool = False) -> None:
    """Write the files of sentence-transformers: the pooling mode by name, or the boolean options of
    older files."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    values = {"pooling_mode": mode} if isinstance(mode, str) else dict(mode)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values), encoding="utf-8")


def base_model(oracle: Any) -> Any:
    """Return the decoder or encoder inside, which returns hidden states."""
    return oracle.base_model


def weighted(hidden: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, len(hidden) + 1)[:, None]
    return (hidden * places).sum(0) / places.sum()


@dataclass(frozen=True)
class Case:
    """A model, the part of it that is saved, its files, and its pooling: hidden states [T, H] to
    one vector."""

    oracle: Callable[[], Any]
    pool: Callable[[torch.Tensor], torch.Tensor]
    mode: str | Mapping[str, bool] | None = None
    normalize: bool = False
    saved: Callable[[Any], Any] = lambda oracle: oracle
    settings: Mapping[str, Any] = field(default_factory=dict)


def unit(pool: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda hidden: torch.nn.functional.normalize(pool(hidden), dim=0)


def last(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[-1]


def mean(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean(0)


BOTH = MappingProxyType({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True})
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "bert": Case(bert, unit(mean)),
        "bert-cls": Case(bert, lambda hidden: hidden[0], "cls"),
        "bert-max-mean": Case(bert, lambda hidden: torch.cat((hidden.max(0).values, hidden.mean(0))), BOTH),
        "bert-root-mean": Case(bert, lambda hidden: hidden.sum(0) / len(hidden) ** 0.5, "mean_sqrt_len_tokens"),
        "qwen3-last": Case(qwen3, unit(last), "lasttoken", True, base_model),
        "qwen3-weighted": Case(qwen3, weighted, "weightedmean"),
        "mistral-window": Case(lambda: mistral(sliding_window=5), unit(last), settings={"task": "embed"}),
        "xlm-roberta": Case(roberta, unit(mean)),
        "roberta-head-unread": Case(lambda: roberta("RobertaForMaskedLM", pad_token_id=2), unit(mean)),
        "modernbert": Case(modernbert, unit(mean), "mean", True),
        "modernbert-biases": Case(
            lambda: modernbert("ModernBertForMaskedLM", norm_bias=True, attention_bias=True, mlp_bias=True), unit(mean)
        ),
        "transformers": Case(gemma3, mean, "mean", settings={"model_impl": "transformers"}),
    }
)


def open_engine(case: Case, oracle: Any, folder: Path) -> TokenEngine:
    save(case.saved(oracle), folder)
    if case.mode is not None:
        write_modules(folder, case.mode, normalize=case.normalize)
    return TokenEngine(folder, attention_backend="reference", **case.settings)


def embed(made: TokenEngine, prompts: Sequence[list[int]], types: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Return embeddings, float32 [prompts, size], of requests that run together. `types` are the
    token types (segments) of each prompt."""
    requests = [
        Request(f"embed-{number}", np.array(prompt), SamplingParams(), task="embed", token_types=of_prompt)
        for number, (prompt, of_prompt) in enumerate(zip_longest(prompts, types))
    ]
    made.submit(requests)
    made.finish()
    return np.stack([request.embedding for request in requests if request.embedding is not None])


def expected(case: Case, oracle: Any, texts: Sequence[list[int]]) -> np.ndarray:
    with torch.no_grad():
        hidden = [oracle.base_model(torch.tensor([text])).last_hidden_state[0].float() for text in texts]
    return np.stack([case.pool(each).numpy() for each in hidden])


@pytest.mark.parametrize("name", CASES)
def test_vectors_of_a_batch_and_of_one_alone_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case, texts = CASES[name], random_prompts(5, LENGTHS)
    oracle = case.oracle()
    made = open_engine(case, oracle, tmp_path)
    assert not made.worker.limits.generates
    wanted = expected(case, oracle, texts)
    np.testing.assert_allclose(embed(made, texts), wanted, atol=TOLERANCE)
    np.testing.assert_allclose(embed(made, texts[1:2]), wanted[1:2], atol=TOLERANCE)
    made.worker.close()


SCORED: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "bert": lambda: bert("BertForSequenceClassification", num_labels=1),
        "bert-three": lambda: bert("BertForSequenceClassification", num_labels=3),
        "xlm-roberta": lambda: roberta("XLMRobertaForSequenceClassification", num_labels=1),
        "modernbert": lambda: modernbert(
            "ModernBertForSequenceClassification", num_labels=1, classifier_pooling="mean"
        ),
        "qwen3": lambda: make_oracle(qwen3(num_labels=2).config, "Qwen3ForSequenceClassification"),
    }
)


def scores_of(oracle: Any, texts: Sequence[list[int]], types: Sequence[np.ndarray]) -> np.ndarray:
    rows: list[np.ndarray] = []
    for text, of_text in zip(texts, types, strict=True):
        own = {"token_type_ids": torch.tensor(of_text[None]).long()} if "Bert" in type(oracle).__name__[:4] else {}
        with torch.no_grad():
            logits = oracle(torch.tensor([text]), **own).logits[0]
        rows.append((logits.sigmoid() if len(logits) == 1 else logits).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("name", SCORED)
def test_scores_of_a_batch_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    oracle, texts = SCORED[name](), random_prompts(6, (9, 21, 4))
    types = [np.arange(len(text), dtype=np.int32) >= len(text) // 2 for text in texts]
    types = [each.astype(np.int32) for each in types]
    made = TokenEngine(save(oracle, tmp_path), attention_backend="reference")
    wanted = scores_of(oracle, texts, types)
    assert made.worker.limits.num_labels == wanted.shape[1]
    np.testing.assert_allclose(embed(made, texts, types), wanted, atol=TOLERANCE)
    np.testing.assert_allclose(embed(made, texts[1:2], types[1:2]), wanted[1:2], atol=TOLERANCE)
    made.worker.close()


def test_segments_that_are_lost_would_be_noticed(tmp_path: Path) -> None:
    oracle, texts = SCORED["bert-three"](), random_prompts(6, (9, 21))
    types = [np.ones(len(text), np.int32) for text in texts]
    made = TokenEngine(save(oracle, tmp_path), attention_backend="reference")
    assert np.abs(embed(made, texts) - scores_of(oracle, texts, types)).max() > 50 * TOLERANCE
    made.worker.close()


# -- planted defects
# --------------------------------------------------------------------------------------------------


class Moved(Pooler):
    """Base of mutants that give the pooler wrong token rows."""

    def __call__(self, hidden: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().__call__(hidden, {**rows, **self.wrong(rows)})

    def wrong(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class OneEarly(Moved):
    def wrong(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"last": (rows["last"] - 1).clamp(min=0)}


class Padded(Moved):
    def wrong(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"lengths": rows["lengths"].max().expand(len(rows["lengths"]))}


class Counted(Moved):
    """Mutant: weights continue from one request to the next."""

    def wrong(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weights": torch.arange(1, len(rows["weights"]) + 1, device=rows["weights"].device)}


def pools_as(kind: type[Pooler]) -> Callable[[TokenEngine], None]:
    def plant(made: TokenEngine) -> None:
        (steps,) = made.worker.kinds
        assert isinstance(steps, EmbeddingSteps)
        pooler = steps.pooler
        pooler.__class__ = kind

    return plant


def pools_with(**changes: Any) -> Callable[[TokenEngine], None]:
    def plant(made: TokenEngine) -> None:
        (steps,) = made.worker.kinds
        assert isinstance(steps, EmbeddingSteps)
        pooler = steps.pooler
        pooler._pooling = replace(pooler._pooling, **changes)

    return plant


def sees_otherwise(made: TokenEngine) -> None:
    for layer in made.worker.runner.model.attention_layers:
        layer.causal = not layer.causal


def sees_all(made: TokenEngine) -> None:
    for layer in made.worker.runner.model.attention_layers:
        layer.sliding_window = None


def counts_from_zero(made: TokenEngine) -> None:
    made.worker.runner.model.embeddings.first_position = 0  # pyright: ignore[reportAttributeAccessIssue]


DEFECTS = {
    "last-one-early": ("qwen3-last", pools_as(OneEarly)),
    "mean-over-padding": ("transformers", pools_as(Padded)),
    "weights-not-restarted": ("qwen3-weighted", pools_as(Counted)),
    "not-of-length-1": ("qwen3-last", pools_with(is_normalized=False)),
    "modes-in-another-order": ("bert-max-mean", pools_with(modes=("mean", "max"))),
    "encoder-causal": ("bert-cls", sees_otherwise),
    "decoder-not-causal": ("qwen3-weighted", sees_otherwise),
    "window-lost": ("mistral-window", sees_all),
    "window-one-way": ("modernbert", sees_otherwise),
    "window-lost-both-ways": ("modernbert", sees_all),
    "positions-from-zero": ("xlm-roberta", counts_from_zero),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(tmp_path: Path, name: str) -> None:
    case, plant = CASES[DEFECTS[name][0]], DEFECTS[name][1]
    oracle, texts = case.oracle(), random_prompts(5, LENGTHS)
    made = open_engine(case, oracle, tmp_path)
    plant(made)
    assert np.abs(embed(made, texts) - expected(case, oracle, texts)).max() > 50 * TOLERANCE
    made.worker.close()

"""Models that embed or score: vectors of a batch are transformers' own of each text alone, with the pooling written out here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.runtime.pooling import Pooler
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from tests.checkpoints import bert, gemma3, mistral, qwen3, save
from tests.laws.engine import TOLERANCE, TokenEngine, random_prompts

pytestmark = pytest.mark.needs("device")

LENGTHS = (1, 17, 6, 30, 2)


def write_modules(folder: Path, mode: str | Mapping[str, bool], *, normalize: bool = False) -> None:
    """The files of sentence-transformers: a mode in its own words, or the switches of older files."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    values = {"pooling_mode": mode} if isinstance(mode, str) else dict(mode)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values), encoding="utf-8")


def base_model(oracle: Any) -> Any:
    """The decoder or encoder within, which gives hidden states."""
    return oracle.base_model


def weighted(hidden: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, len(hidden) + 1)[:, None]
    return (hidden * places).sum(0) / places.sum()


@dataclass(frozen=True)
class Case:
    """A model, what is saved of it, its files, and what they mean: hidden states [T, H] to a vector."""

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
        "transformers": Case(gemma3, mean, "mean", settings={"model_impl": "transformers"}),
    }
)


def open_engine(case: Case, oracle: Any, folder: Path) -> TokenEngine:
    save(case.saved(oracle), folder)
    if case.mode is not None:
        write_modules(folder, case.mode, normalize=case.normalize)
    return TokenEngine(folder, attention_backend="reference", **case.settings)


def embed(made: TokenEngine, prompts: Sequence[list[int]], **inputs: Any) -> np.ndarray:
    """float32 [prompts, size], of as few steps as there can be."""
    requests = [
        Request(f"embed-{number}", np.array(prompt), SamplingParams(), task="embed", **inputs)
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        made.scheduler.add(request)
    while made.loop.has_work:
        made.loop.step()
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


# -- planted defects -----------------------------------------------------------------------------------------------------


class Moved(Pooler):
    """What names the tokens of a request names others."""

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
    """Weights go on from one request to the next."""

    def wrong(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weights": torch.arange(1, len(rows["weights"]) + 1, device=rows["weights"].device)}


def pools_as(kind: type[Pooler]) -> Callable[[TokenEngine], None]:
    def plant(made: TokenEngine) -> None:
        pooler = made.worker._pooler
        assert pooler is not None
        pooler.__class__ = kind

    return plant


def pools_with(**changes: Any) -> Callable[[TokenEngine], None]:
    def plant(made: TokenEngine) -> None:
        pooler = made.worker._pooler
        assert pooler is not None
        pooler._pooling = replace(pooler._pooling, **changes)

    return plant


def sees_otherwise(made: TokenEngine) -> None:
    for layer in made.worker.runner.model.attention_layers:
        layer.causal = not layer.causal


def sees_all(made: TokenEngine) -> None:
    for layer in made.worker.runner.model.attention_layers:
        layer.sliding_window = None


DEFECTS = {
    "last-one-early": ("qwen3-last", pools_as(OneEarly)),
    "mean-over-padding": ("transformers", pools_as(Padded)),
    "weights-not-restarted": ("qwen3-weighted", pools_as(Counted)),
    "not-of-length-1": ("qwen3-last", pools_with(is_normalized=False)),
    "modes-in-another-order": ("bert-max-mean", pools_with(modes=("mean", "max"))),
    "encoder-causal": ("bert-cls", sees_otherwise),
    "decoder-not-causal": ("qwen3-weighted", sees_otherwise),
    "window-lost": ("mistral-window", sees_all),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught(tmp_path: Path, name: str) -> None:
    case, plant = CASES[DEFECTS[name][0]], DEFECTS[name][1]
    oracle, texts = case.oracle(), random_prompts(5, LENGTHS)
    made = open_engine(case, oracle, tmp_path)
    plant(made)
    assert np.abs(embed(made, texts) - expected(case, oracle, texts)).max() > 50 * TOLERANCE
    made.worker.close()

"""Models that keep a state of each request verify proposals in copies of it: with any drafter, drawn or greedy, tokens and
log-probabilities are those of plain decode, and the state is that of the tokens that were right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.device.errors import ConfigError
from sglcore.runtime.memory.states import Runs, StatePool
from sglcore.runtime.speculative.worker import SpeculativeWorker
from sglcore.schedule.running_requests import RunningRequests
from tests.checkpoints import granite_hybrid, lfm2, nemotron_h, qwen3_next, save
from tests.drafts import next_token
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.test_draft_laws import run as run_drafts
from tests.laws.test_speculative_laws import PROMPTS, Ran, check_same, run

CONTEXT, VOCABULARY = 128, 97
FAMILIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"gated delta rule": qwen3_next, "short convolutions": lfm2, "mamba 2": granite_hybrid, "no MLP": nemotron_h}
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ran]]:
    """A checkpoint of each recurrence, and its texts without proposals."""
    oracle = FAMILIES[request.param](max_position_embeddings=CONTEXT)
    folder = save(oracle, tmp_path_factory.mktemp("states"))
    engine = TokenEngine(folder, graph="off")
    yield folder, run(engine)
    engine.worker.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """One of them for what is not the recurrence's."""
    folder = save(qwen3_next(max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("hybrid"))
    engine = TokenEngine(folder, graph="off")
    found = run(engine)
    engine.worker.close()
    return folder, found


def proposing(folder: Path, drafter: str, plain: Ran, tokens: int = 4, **settings: Any) -> TokenEngine:
    """An engine with such a drafter."""
    sizes = {"graph_buckets": (1, 2, 5), "graph_token_buckets": (64,), "poison": True}
    engine = TokenEngine(folder, **{"speculative": "ngram", "draft_tokens": tokens, **sizes, **settings})
    assert isinstance(engine.worker, SpeculativeWorker)
    if drafter != "ngram":
        whole = [prompt + output for prompt, output in zip(PROMPTS, plain.tokens, strict=True)]
        engine.worker.drafter = DRAFTERS[drafter](tokens, Texts(whole), VOCABULARY)
    return engine


def check(folder: Path, drafter: str, plain: Ran, tokens: int = 4, **settings: Any) -> TokenEngine:
    """The same texts; the engine, closed."""
    engine = proposing(folder, drafter, plain, tokens, **settings)
    try:
        check_same(run(engine), plain)
    finally:
        engine.worker.close()
    return engine


@pytest.mark.parametrize("overlap", [False, True])
def test_proposals_change_no_text_of_a_model_with_states(family: tuple[Path, Ran], graph: str, overlap: bool) -> None:
    engine = check(family[0], "guessing", family[1], graph=graph, overlap=overlap)
    assert graph == "off" or engine.paths != {"eager"}

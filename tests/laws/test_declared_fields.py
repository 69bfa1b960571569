"""Two new fields, each declared by one line in both batch classes, reach the model through a whole
engine: scheduler, overlap, worker, and the graphs of the device. The model is correct only if every
token comes with its own values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcore.models.architectures.mistral import MistralForCausalLM
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from tests.checkpoints import mistral, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.runtime.batches.test_declared_fields import apart, forgotten
from tests.runtime.wider import WiderBatch, WiderSchedule, one_for_real_tokens, widened

pytestmark = pytest.mark.needs("graphs.full")

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = mistral(max_position_embeddings=96, sliding_window=20)
    yield save(oracle, tmp_path_factory.mktemp("declared")), oracle


@pytest.fixture
def wider(monkeypatch: Patch) -> Patch:
    """Use the extended batch class from the start, in a model that reads the new fields."""
    for build in (build_decode_registry, build_prefill_registry):
        monkeypatch.setitem(build.__kwdefaults__ or {}, "batch_type", WiderBatch)
    real = MistralForCausalLM.embed

    def embed(self: Any, batch: Any) -> Any:
        state = real(self, batch)
        return state._replace(hidden=state.hidden * one_for_real_tokens(batch)[:, None])

    monkeypatch.setattr(MistralForCausalLM, "embed", embed)
    return monkeypatch


class Live:
    """Overwrites the same host arrays in each step, as the scheduler does."""

    def __init__(self, scheduler: Any) -> None:
        self._next = scheduler.next_batch
        self._marks, self._weights = np.zeros(64, np.int32), np.zeros(512, np.float32)

    def __call__(self) -> WiderSchedule | None:
        """Return the next step with its values in the shared arrays."""
        batch = self._next()
        if batch is None:
            return None
        made = widened(batch)
        for name, live in (("marks", self._marks), ("weights", self._weights)):
            values = getattr(made, name)
            live[: len(values)] = values
            setattr(made, name, live[: len(values)])
        return made


def serve(folder: Path, oracle: Any, **settings: Any) -> set[str]:
    """Run chunks, ragged arrivals and decode, and check every log-probability; returns the paths of
    the steps."""
    made = TokenEngine(folder, **{"overlap": True, "poison": True, "max_batch_tokens": 8, **settings})
    made.scheduler.next_batch = Live(made.scheduler)
    check_logprobs(made.run(random_prompts(21, (5, 30, 17, 9)), 12, stagger=2), oracle)
    return made.paths


@pytest.mark.parametrize("graph", ["full", "off"])
def test_declared_fields_reach_the_model(checkpoint: tuple[Path, Any], wider: Patch, graph: str) -> None:
    folder, oracle = checkpoint
    paths = serve(folder, oracle, graph=graph)
    assert any(path.startswith("full:") for path in paths) is (graph == "full")


@pytest.mark.parametrize("mutant", [forgotten, apart])
def test_a_field_that_is_lost_on_the_way_is_caught(checkpoint: tuple[Path, Any], wider: Patch, mutant: Any) -> None:
    folder, oracle = checkpoint
    mutant(wider)
    with pytest.raises(AssertionError, match="Mismatched elements|finite"):
        serve(folder, oracle, graph="full")

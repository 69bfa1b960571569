"""Two new fields, each declared by one line in both batch classes, reach the model through a whole
engine: scheduler, overlap, worker, and the graphs of the device. The model is correct only if every
token comes with its own values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcore.models.architectures.mistral import MistralForCausalLM
from sglcore.runtime.buffer_registry import BufferRegistry
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.schedule.draft_counts import sums_of
from sglcore.worker.schedule_batch import ScheduleBatch
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


def read_by(patch: Patch, factor: Callable[[Any], Any]) -> None:
    """Use the extended batch class from the start, in a model that multiplies its embeddings by
    `factor` of the batch, which is 1 where the new fields are right."""
    for build in (build_decode_registry, build_prefill_registry):
        patch.setitem(build.__kwdefaults__ or {}, "batch_type", WiderBatch)
    real = MistralForCausalLM.embed

    def embed(self: Any, batch: Any) -> Any:
        state = real(self, batch)
        return state._replace(hidden=state.hidden * factor(batch)[:, None])

    patch.setattr(MistralForCausalLM, "embed", embed)


@pytest.fixture
def wider(monkeypatch: Patch) -> Patch:
    """A model that reads the new fields of each token."""
    read_by(monkeypatch, one_for_real_tokens)
    return monkeypatch


class Live:
    """Overwrites the same host arrays in each step, as the scheduler does."""

    def __init__(self, scheduler: Any, values: Callable[[ScheduleBatch], dict[str, Any]] = lambda batch: {}) -> None:
        self._next, self._values = scheduler.next_batch, values
        self._marks, self._weights = np.zeros(64, np.int32), np.zeros(512, np.float32)

    def __call__(self) -> WiderSchedule | None:
        """Return the next step with its values in the shared arrays."""
        batch = self._next()
        if batch is None:
            return None
        made = widened(batch, **self._values(batch))
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


def by_slot(batch: ScheduleBatch) -> dict[str, Any]:
    """Values that depend on the request alone, so that the host knows them for tokens to verify."""
    counts = np.diff(batch.token_offsets)
    return {"marks": 100 * batch.slots, "weights": np.repeat(batch.slots, counts).astype(np.float32) + np.float32(0.25)}


def one_by_slot(batch: Any) -> Any:
    """float32 [T]: 1 for each token with the values of its request's slot."""
    marks, slots = batch.marks, batch.req_pool_indices
    if batch.extend_seq_lens is not None:
        marks, slots = (each.repeat_interleave(batch.extend_seq_lens) for each in (marks, slots))
    # A token that is not verified has slot 0, and the values of its request.
    is_right = (slots == 0) | ((marks == 100 * slots) & (batch.weights == slots + 0.25))
    return is_right.float()


def verify(folder: Path, oracle: Any, **settings: Any) -> None:
    """Run requests whose tokens are proposed and verified, and check every log-probability."""
    made = TokenEngine(folder, poison=True, max_batch_tokens=24, draft_tokens=3, **settings)
    made.scheduler.next_batch = Live(made.scheduler, by_slot)
    prompts = [prompt * 3 for prompt in random_prompts(22, (7, 5, 9))]
    check_logprobs(made.run(prompts, 12, stagger=2), oracle)
    assert sums_of(made.scheduler.drafts).proposed


@pytest.mark.parametrize("graph", ["full", "off"])
@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_declared_fields_reach_tokens_that_are_verified(
    checkpoint: tuple[Path, Any], monkeypatch: Patch, graph: str, proposer: str
) -> None:
    read_by(monkeypatch, one_by_slot)
    verify(*checkpoint, graph=graph, speculative=proposer)


def test_a_field_that_verified_rows_lack_is_caught(checkpoint: tuple[Path, Any], monkeypatch: Patch) -> None:
    read_by(monkeypatch, one_by_slot)
    monkeypatch.setattr(BufferRegistry, "stage_wide", without_values)
    with pytest.raises(AssertionError, match="divergent|finite"):
        verify(*checkpoint, graph="off", speculative="ngram")


def without_values(self: BufferRegistry, batch: ScheduleBatch, width: int) -> tuple[Any, bool]:
    """Mutant: rows to verify get only what the worker places."""
    size = batch.batch_size * width
    rows = self.view(size, size, extend=False)
    rows.forward_mode = batch.forward_mode
    return rows, False


@pytest.mark.parametrize("mutant", [forgotten, apart])
def test_a_field_that_is_lost_on_the_way_is_caught(checkpoint: tuple[Path, Any], wider: Patch, mutant: Any) -> None:
    folder, oracle = checkpoint
    mutant(wider)
    with pytest.raises(AssertionError, match="divergent|finite"):
        serve(folder, oracle, graph="full")

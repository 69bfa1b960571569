"""Defects in keeping recurrent states, each caught by the laws of a hybrid model: log-probabilities
equal transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
from torch import Tensor

from sglcore.models.transformers_backend.stateful_layers import Mixer
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.states import StatePool
from tests.checkpoints import qwen3_next, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.runtime.test_states import EarlySnapshots, LateSnapshots, NoZeroing, WrongSlot

pytestmark = pytest.mark.needs("device")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = qwen3_next(max_position_embeddings=96)
    yield save(oracle, tmp_path_factory.mktemp("states")), oracle


def engine(folder: Path) -> TokenEngine:
    """Make an engine with few request slots, short chunks and overlap."""
    return TokenEngine(folder, graph="off", max_requests=2, max_batch_tokens=8, model_impl="transformers")


def run_laws(made: TokenEngine, oracle: Any) -> None:
    """Run chunks, reused request slots, and shared prefixes where a later request restores a
    snapshot; check all log-probabilities."""
    base = random_prompts(8, (19,))[0]
    check_logprobs(made.run([base, *random_prompts(9, (5, 11, 3))], 4, stagger=1), oracle)
    for seed in (10, 11):
        check_logprobs(made.run([base[:13] + tail for tail in random_prompts(seed, (3, 5))], 4, stagger=1), oracle)
    check_logprobs(made.run([base], 4), oracle)


class TailLost(Mixer):
    """Mutant: a chunk starts without the convolution's earlier tokens."""

    def _advance(self, hidden: Tensor, slots: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        if hidden.shape[1] > 1:
            states["conv0"][slots] = 0
        return super()._advance(hidden, slots, states)


class WrittenLate(Mixer):
    """Mutant: writes states during the next step, into the request slot even if it has been
    reused."""

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Write the delayed states first."""
        for name, slots, values in vars(self).pop("late", ()):
            states[name][slots] = values
        before = {name: state.clone() for name, state in states.items()}
        mixed = super().mix(hidden, batch, states)
        slots = batch.req_pool_indices.clone()
        self.late = [(name, slots, state[slots]) for name, state in states.items()]
        for name, state in states.items():
            state.copy_(before[name])
        return mixed


class SnapshotsOfLateWrites(StatePool):
    """Sees the delayed writes, so that only reused request slots are wrong."""

    def copy_out(self, arrived: Mapping[str, Tensor]) -> None:
        """Write the delayed states, then copy."""
        if "state_kept" in arrived:
            for layer in self.layers:
                for name, slots, values in vars(layer).get("late", ()):
                    self.states(layer.layer_id)[name][slots] = values
        super().copy_out(arrived)


def pool(kind: type[StatePool]) -> Callable[[TokenEngine], None]:
    """Return a function that changes the class of the engine's state pool."""

    def plant(made: TokenEngine) -> None:
        assert made.worker.runner.state_pool is not None
        made.worker.runner.state_pool.__class__ = kind

    return plant


def mixers(kind: type[Mixer], states: type[StatePool] = StatePool) -> Callable[[TokenEngine], None]:
    """Return a function that changes the class of every layer with a state."""

    def plant(made: TokenEngine) -> None:
        pool(states)(made)
        assert made.worker.runner.state_pool is not None
        for layer in cast("tuple[Mixer, ...]", made.worker.runner.state_pool.layers):
            layer.__class__ = kind

    return plant


class LateSnapshotsOfOne(LateSnapshots):
    """Mutant: copies snapshots one step late, from the first step on."""

    late: Mapping[str, Tensor] = MappingProxyType({})


MUTANTS: MappingProxyType[str, Callable[[TokenEngine], None]] = MappingProxyType(
    {
        "a slot keeps the state of the request before": pool(NoZeroing),
        "a snapshot is a step late": pool(LateSnapshotsOfOne),
        "a snapshot is taken before the forward": pool(EarlySnapshots),
        "a snapshot is restored into another slot": pool(WrongSlot),
        "the tail of a convolution is lost between chunks": mixers(TailLost),
        "a stale request's state is written after its slot was given away": mixers(WrittenLate, SnapshotsOfLateWrites),
    }
)


def test_the_laws_hold_for_the_real_engine(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    made = engine(folder)
    run_laws(made, oracle)
    assert made.scheduler.stats().snapshot_hits > 2


@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_laws_catch(name: str, checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    made = engine(folder)
    MUTANTS[name](made)
    with pytest.raises(AssertionError):
        run_laws(made, oracle)

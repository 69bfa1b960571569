"""Keys and values stored by the rotary kernel: the same numbers as when attention stores them, and
defects are caught."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sglcore.device.bring_up import BringUp, Step
from sglcore.engine import start
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.buffer_registry import FillContext, InputBuffer
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import qwen3, save
from tests.laws.conftest import KINDS
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.test_mutants import replace_attention

Entry = Callable[..., Tensor]
STORED: Entry = reference_kernels.rotary_and_store
TRACED = [pytest.param(kind, marks=pytest.mark.needs(f"graphs.{kind}")) for kind in KINDS if kind != "native"]
"""Graph kinds that capture any kernel; a native graph records native kernels only."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = qwen3(max_position_embeddings=96)
    yield save(oracle, tmp_path_factory.mktemp("stored")), oracle


class Counted:
    """A kernel or table entry that counts its calls."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.real(*args)


def with_entries(patch: pytest.MonkeyPatch, **entries: Any) -> None:
    """Make every kernel table of a later bring-up have these entries."""
    real = start.resolve

    def other(ref: str, package: str = "") -> Any:
        found = real(ref, package)
        if not isinstance(found, BringUp):
            return found
        kernels = next(step for step in found.steps if isinstance(step, Step) and step.provides == "kernels").function

        @functools.wraps(kernels)
        def replaced(*args: Any, **needs: Any) -> KernelTable:
            table = kernels(*args, **needs)
            assert isinstance(table, KernelTable)
            return table.replace(**entries)

        return found.replace("kernels", replaced)

    patch.setattr(start, "resolve", other)


def triton_entry() -> Entry:
    """Return the Triton kernel, on the lane's device or in the interpreter."""
    pytest.importorskip("triton", reason="needs the library triton")
    from sglcore.runtime.kernels.triton.rotated_store import rotary_and_store

    return rotary_and_store


def run(folder: Path, oracle: Any, graph: str) -> tuple[TokenEngine, list[float]]:
    """Run chunks, late arrivals and padded buckets of both kinds, and compare every log-probability
    with the oracle."""
    engine = TokenEngine(folder, graph=graph, max_batch_tokens=40)
    results = engine.run(random_prompts(21, (40, 25, 5, 30)), 12, stagger=2, score_prompts=True)
    check_logprobs(results, oracle)
    return engine, [value for result in results for value in (*result.prompt_logprobs, *result.logprobs)]


def test_log_probabilities_are_those_of_an_engine_in_which_attention_stores(
    checkpoint: tuple[Path, Any], graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_entry(reference_kernels.rotary_and_store, checkpoint, graph, monkeypatch)


@pytest.mark.parametrize("kind", [pytest.param("off", marks=pytest.mark.needs("device")), *TRACED])
def test_a_kernel_that_stores_gives_the_same(
    checkpoint: tuple[Path, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_entry(triton_entry(), checkpoint, kind, monkeypatch)


def check_entry(entry: Entry, checkpoint: tuple[Path, Any], graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with this entry for rotary and store gives the same numbers as one with attention
    that stores."""
    _, wanted = run(*checkpoint, graph)
    fused = Counted(entry)
    store = Counted(reference_kernels.store_kv)
    with_entries(monkeypatch, store_kv=store, rotary_and_store=fused)
    engine, found = run(*checkpoint, graph)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
    assert fused.calls > 0
    if graph == "piecewise":
        assert store.calls > 0, "what a compiler traced stores in attention"
    else:
        assert store.calls == 0
    assert (graph == "off") or any(path.startswith(graph) for path in engine.paths)


def plain_keys(*args: Any) -> Tensor:
    """Mutant: stores keys without rotation."""
    q = reference_kernels.rotary_and_store(*args)
    k, k_cache, cells = args[1], args[6], args[8]
    k_cache.index_copy_(0, cells.long(), k.reshape(-1, *k_cache.shape[1:]))
    return q


def nothing_stored(*args: Any) -> Tensor:
    """Mutant: rotates and stores nothing."""
    return reference_kernels.rotary(*args[:2], *args[3:6])[0]


def the_cell_before(*args: Any) -> Tensor:
    """Mutant: stores into the KV slot before."""
    *given, cells = args
    return STORED(*given, (cells - 1).clamp(min=0))


@pytest.mark.parametrize("defect", [plain_keys, nothing_stored, the_cell_before])
def test_a_wrong_store_is_caught(
    defect: Entry, checkpoint: tuple[Path, Any], graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_entries(monkeypatch, rotary_and_store=defect)
    with pytest.raises(AssertionError, match="first divergent token"):
        run(*checkpoint, graph)


class KeepsItsTail(InputBuffer):
    """Mutant: KV slots of padding rows keep values of an earlier step."""

    __slots__ = ()

    def pad(self, ctx: FillContext) -> None:
        pass


@pytest.mark.needs("graphs.breakable")
@pytest.mark.parametrize("honest", [True, False])
def test_padding_that_names_cells_of_another_step_is_caught(
    honest: bool, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured segment stores all rows of its bucket, padding too."""
    folder, oracle = checkpoint
    with_entries(monkeypatch, rotary_and_store=reference_kernels.rotary_and_store)
    engine = TokenEngine(folder, graph="breakable", max_batch_tokens=40)
    if not honest:
        engine.worker.runner.prefill_registry.input_buffer("out_cache_loc").__class__ = KeepsItsTail
    prompts = random_prompts(4, (40, 25))
    if honest:
        check_logprobs(engine.run(prompts, 12, stagger=2), oracle)
        assert "breakable:40" in engine.paths
        return
    with pytest.raises(AssertionError, match="first divergent token"):
        check_logprobs(engine.run(prompts, 12, stagger=2), oracle)


class WantsThem(ReferenceAttention):
    """A backend that does not declare `takes_stored`, so it is refused a batch without keys."""

    facts = replace(ReferenceAttention.facts, takes_stored=False)


@pytest.mark.parametrize(("kind", "stores"), [(ReferenceAttention, False), (WantsThem, True)])
def test_a_backend_that_wants_keys_and_values_is_given_them(
    kind: type[ReferenceAttention], stores: bool, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = checkpoint
    fused, store = Counted(reference_kernels.rotary_and_store), Counted(reference_kernels.store_kv)
    with_entries(monkeypatch, store_kv=store, rotary_and_store=fused)
    engine = TokenEngine(folder, max_batch_tokens=8, graph="off")
    replace_attention(kind)(engine)
    fused.calls = store.calls = 0
    check_logprobs(engine.run(random_prompts(3, (5, 17)), 6, stagger=2), oracle)
    assert (fused.calls == 0, store.calls > 0) == (stores, stores)

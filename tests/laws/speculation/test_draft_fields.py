"""Two new fields, each declared by one line in both batch classes, reach every forward of every
draft model: each row has the values of the request that it continues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from sglcore.step import repeated_fields
from sglcore.step.batch_field import Axis, batch_field, batch_record
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.laws.proposers import PROPOSERS, Proposers, Steered, proposers_fixture
from tests.laws.speculation.test_speculative_laws import run
from tests.laws.speculation.texts import SAMPLING, Ran, check_same
from tests.laws.test_declared_fields import Live, by_slot, one_by_slot
from tests.runtime.wider import WiderBatch

Patch = pytest.MonkeyPatch
WITH_MODELS = [name for name, each in PROPOSERS.items() if each.kind not in ("ngram", "suffix")]
TREES = (*SAMPLING[:3], {"temperature": 1.0, "seed": 7}, SAMPLING[4])
"""No request has penalties, so that trees stay trees."""

pytestmark = pytest.mark.needs("device")
proposers = proposers_fixture()


@pytest.fixture(scope="module")
def plain(proposers: Proposers) -> Ran:
    """The results without draft tokens."""
    return run(proposers.plain(), samplings=TREES)


@pytest.fixture
def wider(monkeypatch: Patch) -> Iterator[Patch]:
    """Starts use the extended batch class."""
    for build in (build_decode_registry, build_prefill_registry):
        monkeypatch.setitem(build.__kwdefaults__ or {}, "batch_type", WiderBatch)
    yield monkeypatch


RIGHT = DraftRows.sources


class Checked:
    """Checks the new fields of every forward of a draft's runner, in its buffers too."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._forward = runner, runner.forward
        self.decodes = self.rows = 0

    def __call__(self, batch: ForwardBatch) -> Any:
        """Run the forward, then check the fields in the batch and in the buffers that graphs
        read."""
        found = self._forward(batch)
        if batch.num_tokens:
            assert isinstance(batch, WiderBatch)
            assert batch.marks is not None and batch.weights is not None, "a draft's rows lack the fields"
            assert bool((one_by_slot(batch) == 1).all()), "a draft's row has the values of another request"
            registry = self._runner.registry_for(batch)
            for name in ("marks", "weights"):
                value = getattr(batch, name)
                assert torch.equal(registry.input_buffer(name).tensor[: len(value)], value), name
            self.decodes += batch.forward_mode.is_decode
            self.rows += batch.num_tokens
        return found


def serve(proposers: Proposers, name: str, plain: Ran, graph: str = "off") -> None:
    """Run all prompts with a drafter, check every forward of its model, and the texts."""
    sizes = {"graph_buckets": (1, 2, 5), "graph_token_buckets": (64,)}
    engine = proposers.engine(name, poison=True, graph=graph, max_batch_tokens=24, prefix_cache=False, **sizes)
    worker: Any = engine.worker
    engine.scheduler.next_batch = Live(engine.scheduler, by_slot)
    own = vars(worker.drafter)
    runners = [*own.get("runners", ()), *([own["runner"]] if "runner" in own else [])]
    watched = [Checked(each) for each in runners]
    for runner, check in zip(runners, watched, strict=True):
        runner.forward = check
    worker.drafter = steered = Steered(worker.drafter)

    def begin(requests: list[Request]) -> None:
        texts = zip(requests, plain.tokens, strict=True)
        steered.begin([request.prompt_ids.tolist() + text for request, text in texts], requests)

    check_same(run(engine, samplings=TREES, prepare=begin), plain)
    assert sums_of(engine.scheduler.drafts).accepted
    assert watched and all(each.rows for each in watched) and any(each.decodes for each in watched)


@pytest.mark.parametrize("name", WITH_MODELS)
@pytest.mark.parametrize("kind", ["off", pytest.param("full", marks=pytest.mark.needs("graphs.full"))])
def test_declared_fields_reach_every_forward_of_a_draft(
    proposers: Proposers, plain: Ran, wider: Patch, name: str, kind: str
) -> None:
    serve(proposers, name, plain, kind)


def nothing(batch_type: type) -> tuple[()]:
    """Mutant: rows that the device makes get only what their maker writes."""
    return ()


def others(self: DraftRows, axis: Axis) -> Any:
    """Mutant: each request's rows continue those of another request."""
    return RIGHT(self, axis).flip(0)


def first_of_prefill(self: DraftRows, axis: Axis) -> Any:
    """Mutant: requests are counted as tokens."""
    return (
        self.select if self.batch.extend_seq_lens is None else torch.arange(len(self.select), device=self.select.device)
    )


@pytest.mark.parametrize("name", WITH_MODELS)
def test_a_draft_that_forgets_fields_is_caught(proposers: Proposers, plain: Ran, wider: Patch, name: str) -> None:
    wider.setattr(repeated_fields, "repeated", nothing)
    with pytest.raises(AssertionError, match="lack the fields"):
        serve(proposers, name, plain)


@pytest.mark.parametrize("name", ["eagle3", "standalone, trees", "dflash", "frozen-mtp"])
@pytest.mark.parametrize("mutant", [others, first_of_prefill])
def test_a_row_that_continues_another_request_is_caught(
    proposers: Proposers, plain: Ran, wider: Patch, name: str, mutant: Any
) -> None:
    wider.setattr(DraftRows, "sources", mutant)
    with pytest.raises(Exception, match="of another request|out of range|out of bounds"):
        serve(proposers, name, plain)


@batch_record(ScheduleBatch)
class HostOnly(ForwardBatch):
    """A field of each request that stays on the host."""

    given: Any = batch_field(axis=Axis.REQUESTS, read="slots")


def test_a_field_that_rows_made_on_the_device_cannot_repeat_is_refused() -> None:
    with pytest.raises(TypeError, match=r"HostOnly\.given stays on the host.*Wide\.PLACED"):
        repeated_fields.repeated(HostOnly)

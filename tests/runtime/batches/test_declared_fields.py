"""A field that is declared in one line in each of the two batches is carried everywhere; a field
that cannot be filled is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.batch_split import filter_batch
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.torch_fields import retained
from sglcore.schedule.steps_in_flight import overlap_forward_isolation
from sglcore.step.batch_field import Axis, Once, Split, When, batch_field, batch_record, zero
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.runtime.recording import make_graph_site
from tests.runtime.tiny import SHARED, STAGED, Desk, Site, TinyModel, ints, make_site, random_tokens
from tests.runtime.wider import WiderBatch, WiderSchedule, one_for_real_tokens, widened

facts_of_both = pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])


class WeighingModel(TinyModel):
    """Right only if every real token arrives with its own mark and weight."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Multiply each token's embedding by a factor of its mark and weight that is 1 if both are
        right."""
        plain, self.embedding = self.embedding, (self.embedding[batch.input_ids].T * one_for_real_tokens(batch)).T
        hidden = super().__call__(replace(batch, input_ids=torch.arange(batch.num_tokens, dtype=torch.int32)))
        self.embedding = plain
        return hidden


def wider_site(facts: Any = SHARED, **options: Any) -> tuple[Site, Desk]:
    """A site that uses the wider batches, and its host."""
    return make_site(WeighingModel(), facts=facts, batch_type=WiderBatch, **options), Desk()


def staged(site: Site, batch: ScheduleBatch) -> WiderBatch:
    """The batch on the device."""
    made = site.runner.init_batch(batch)
    assert isinstance(made, WiderBatch)
    return made


def padded(site: Site, batch: WiderBatch, bs: int, tokens: int) -> Any:
    """The registry's padded view."""
    registry = site.runner.registry_for(batch)
    registry.fill_from(batch, FillContext(batch.batch_size, bs, batch.num_tokens, tokens))
    return registry.extract_buffer(batch, bs, tokens)


@facts_of_both
@pytest.mark.parametrize("poison", [False, True], ids=["clean", "poisoned"])
def test_it_is_staged_with_every_kind_of_step(facts: Any, poison: bool) -> None:
    site, desk = wider_site(facts, poison=poison)
    first = staged(site, widened(desk.extend({1: [3, 4, 5]})))
    assert (first.marks.tolist(), first.weights.tolist()) == ([103], [0.5, 1.5, 2.5])
    mixed = staged(site, widened(desk.batch({1: [-1], 2: [6, 7]}, ForwardMode.MIXED)))
    assert (mixed.marks.tolist(), mixed.weights.tolist()) == ([104, 202], [3.5, 0.5, 1.5])
    decode = staged(site, widened(desk.decode(2, 1)))
    assert (decode.marks.tolist(), decode.weights.tolist()) == ([203, 105], [2.5, 4.5])
    assert (decode.marks.dtype, decode.weights.dtype) == (torch.int32, torch.float32)


@batch_record(ScheduleBatch)
class PairedBatch(ForwardBatch):
    """Two numbers for each token of every step."""

    pairs: Tensor = batch_field(
        axis=Axis.TOKENS,
        dtype="int32",
        padding=zero(),
        lead=(2,),
        read=lambda batch, _: np.tile(batch.input_ids, (2, 1)),
    )


@facts_of_both
def test_one_of_two_dimensions_is_staged_with_every_step(facts: Any) -> None:
    made = make_site(facts=facts, batch_type=PairedBatch).runner.init_batch(Desk().extend({1: [3, 4, 5]}))
    assert isinstance(made, PairedBatch) and made.pairs.tolist() == [[3, 4, 5]] * 2


@facts_of_both
def test_it_is_padded_as_it_says(facts: Any) -> None:
    site, desk = wider_site(facts)
    desk.extend({1: [3], 2: [4, 5]})
    view = padded(site, staged(site, widened(desk.decode(1, 2))), 4, 4)
    assert (view.marks.tolist(), view.weights.tolist()) == ([102, 203, -7, -7], [1.5, 2.5, 0.5, 0.5])


def test_it_is_split_along_its_axis() -> None:
    site, desk = wider_site()
    child = filter_batch(staged(site, widened(desk.extend({1: [3, 4, 5], 2: [6, 7]}))), 2, 4)
    assert isinstance(child, WiderBatch)
    assert (child.marks.tolist(), child.weights.tolist()) == ([103, 202], [2.5, 0.5])


def test_it_is_retained() -> None:
    site, desk = wider_site()
    batch = staged(site, widened(desk.extend({1: [3, 4]})))
    assert {id(batch.marks), id(batch.weights)} <= {id(tensor) for tensor in retained(batch)}


@facts_of_both
def test_it_is_poisoned(facts: Any) -> None:
    site, desk = wider_site(facts)
    batch = staged(site, widened(desk.decode()))
    registry = site.runner.registry_for(batch)
    registry.poison()
    registry.commit()
    assert (registry.input_buffer("marks").tensor == torch.iinfo(torch.int32).max).all()
    assert registry.input_buffer("weights").tensor.isnan().all()


def test_the_copy_for_a_forward_does_not_share_it() -> None:
    batch = widened(Desk().extend({1: [3, 4]}))
    with overlap_forward_isolation(batch) as view:
        assert isinstance(view, WiderSchedule) and batch.marks is not None and batch.weights is not None
        batch.marks[:], batch.weights[:] = 0, 0
        assert view.marks is not None and view.weights is not None
        assert (view.marks.tolist(), view.weights.tolist()) == ([102], [0.5, 1.5])


def replays(made: Any) -> list[tuple[Tensor, Tensor, str]]:
    """(hidden states, hidden states of the dense oracle, path) of decode steps of different
    sizes."""
    desk, runner, model = Desk(2), made.site.runner, made.site.model
    tokens = {slot: random_tokens(slot, slot + 1) for slot in (1, 2, 3)}
    with torch.inference_mode():
        for slot, prompt in tokens.items():
            runner.run_eager(runner.init_batch(widened(desk.extend({slot: prompt}))))
    found = []
    for step, slots in enumerate([(1, 2, 3), (2,), (3, 1), (1, 2, 3)]):
        for slot in slots:
            tokens[slot].append(5 + step)
            made.site.tokens.last[slot] = 5 + step
        hidden, path = made.run(widened(desk.decode(*slots)))
        found.append((hidden, torch.stack([model.dense(tokens[slot])[-1] for slot in slots]), path))
    return found


def is_right(found: list[tuple[Tensor, Tensor, str]]) -> bool:
    """Whether every replay equals the oracle."""
    return all(path.startswith("full:") and torch.allclose(one, two, atol=2e-5) for one, two, path in found)


def make_wider_graphs(facts: Any = SHARED) -> Any:
    """Decode steps captured with the added fields."""
    return make_graph_site(model=WeighingModel(), batch_type=WiderBatch, facts=facts, poison=True)


@facts_of_both
def test_a_graph_reads_what_each_step_brings(facts: Any) -> None:
    assert is_right(replays(make_wider_graphs(facts)))


def forgotten(patch: pytest.MonkeyPatch) -> None:
    """Mutant: staging skips the field `weights`."""
    real = BufferRegistry._compile_staging

    def compile_staging(self: BufferRegistry, is_decode: bool) -> Any:
        found = real(self, is_decode)
        fewer = tuple(pair for pair in found.flat if pair[0] != "weights")
        self._staging[is_decode] = replace(found, flat=fewer)
        return self._staging[is_decode]

    patch.setattr(BufferRegistry, "_compile_staging", compile_staging)


def apart(patch: pytest.MonkeyPatch) -> None:
    """Mutant: a graph is captured over a clone of a staged buffer."""
    real = BufferRegistry.extract_buffer

    def extract_buffer(self: BufferRegistry, template: Any, *sizes: int) -> Any:
        made: Any = real(self, template, *sizes)
        return replace(made, marks=made.marks.clone())

    patch.setattr(BufferRegistry, "extract_buffer", extract_buffer)


@pytest.mark.parametrize("mutant", [forgotten, apart])
def test_a_field_that_is_lost_on_the_way_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert not is_right(replays(make_wider_graphs()))


# -- when, and what is refused
# -----------------------------------------------------------------------------------------


@batch_record(WiderSchedule)
class Sometimes(ForwardBatch):
    """Fields that only some steps have."""

    marks: Tensor | None = batch_field(
        axis=Axis.REQUESTS, dtype="int32", padding=zero(), read="marks", when=When.EXTEND
    )
    weights: Tensor | None = batch_field(
        axis=Axis.TOKENS, dtype="float32", padding=zero(), read="weights", when=When.IF_GIVEN
    )
    weights_cpu: Any = batch_field(axis=Axis.TOKENS, mirror="weights", when=When.IF_GIVEN)


def test_a_field_is_there_when_it_says() -> None:
    site, desk = make_site(batch_type=Sometimes), Desk()
    first: Any = site.runner.init_batch(widened(desk.extend({1: [3, 4]})))
    assert (first.marks.tolist(), first.weights.tolist(), first.weights_cpu.tolist()) == ([102], [0.5, 1.5], [0.5, 1.5])
    second: Any = site.runner.init_batch(widened(desk.extend({1: [3]}), weights=None))
    assert (second.marks.tolist(), second.weights, second.weights_cpu) == ([103], None, None)
    third: Any = site.runner.init_batch(widened(desk.decode(1)))
    assert (third.marks, third.weights.tolist()) == (None, [3.5])


def test_a_step_with_an_input_that_was_not_captured_is_not_replayed() -> None:
    site, desk = make_site(batch_type=Sometimes, buckets=(1,)), Desk()
    desk.extend({1: [3]})
    paths = [site.runner.forward(site.runner.init_batch(widened(desk.decode(1), weights=w)))[1] for w in (None, ONE)]
    assert paths == ["recorded:1", "eager:weights:weights_cpu"]


ONE = np.ones(1, np.float32)


def test_a_field_that_nobody_carries_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match=r"must declare read=.*without any of them no code fills it"):
        batch_field(axis=Axis.REQUESTS, dtype="int32", padding=zero())


@pytest.mark.parametrize("read", ["mark", Once("mark")], ids=["plain", "one-shot"])
def test_a_field_that_the_host_batch_does_not_have_is_an_error_at_import(read: Any) -> None:
    with pytest.raises(TypeError, match=r"Misspelt.marks reads 'mark', which WiderSchedule does not have"):

        @batch_record(WiderSchedule)
        class Misspelt(ForwardBatch):
            marks: Tensor = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=zero(), read=read)


def test_a_mirror_of_nothing_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match=r"Lonely.marks_cpu mirrors 'marks', which is not declared"):

        @batch_record(WiderSchedule)
        class Lonely(ForwardBatch):
            marks_cpu: Any = batch_field(axis=Axis.REQUESTS, mirror="marks")


def test_a_field_that_bypasses_the_declaration_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match=r"Careless.marks is not declared with batch_field\(...\)"):

        @batch_record(WiderSchedule)
        class Careless(ForwardBatch):
            marks: Tensor | None = None


def test_the_host_stages_no_other_types_than_those_of_a_word() -> None:
    with pytest.raises(TypeError, match="the host stages int32 and float32, not int64"):
        batch_field(axis=Axis.REQUESTS, dtype="int64", padding=zero(), read="marks")


def test_a_value_of_the_host_alone_is_carried_as_it_is() -> None:
    @batch_record(WiderSchedule)
    class Told(ForwardBatch):
        marks: Any = batch_field(axis=Axis.NONE, split=Split.COPY, read="marks")

    site, marks = make_site(batch_type=Told), ints([9])
    batch: Any = site.runner.init_batch(widened(Desk().extend({1: [3]}), marks=marks))
    assert batch.marks is marks


@dataclass(slots=True)
class CountedSchedule(WiderSchedule):
    """The host's batch with a number of the whole step."""

    counts: NDArray[np.int32] | None = None


def _half(batch: ScheduleBatch, values: Mapping[str, Any]) -> NDArray[np.int32]:
    return values["seq_lens"] // 2


@batch_record(CountedSchedule)
class CountedBatch(WiderBatch):
    """The device's batch, with a field that has no axis and one that is made of another."""

    counts: Tensor = batch_field(axis=Axis.NONE, split=Split.COPY, dtype="int32", padding=zero(), read="counts")
    halves: Tensor = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=zero(), read=_half)


@facts_of_both
def test_rows_to_verify_have_the_values_of_their_request(facts: Any) -> None:
    site, desk = make_site(TinyModel(), facts=facts, batch_type=CountedBatch), Desk()
    counts = np.array([5], np.int32)

    def counted(batch: ScheduleBatch) -> CountedSchedule:
        made = widened(batch)
        return CountedSchedule(**{item.name: getattr(made, item.name) for item in fields(made)}, counts=counts)

    site.runner.init_batch(counted(desk.extend({1: [3, 4, 5], 2: [6]})))
    batch: Any = counted(desk.decode(2, 1))
    batch.cell_limits = np.array([9, 9], np.int32)
    wide: Any = site.runner.init_batch(batch, None, 3)
    assert (wide.batch_size, wide.num_tokens, wide.width) == (6, 6, 3)
    assert wide.marks.tolist() == np.repeat(batch.marks, 3).tolist()
    assert wide.weights.tolist() == np.repeat(batch.weights, 3).tolist()
    assert wide.halves.tolist() == np.repeat(batch.seq_lens // 2, 3).tolist()
    assert wide.counts.tolist() == [5] and wide.forward_mode is ForwardMode.DECODE
    assert wide.seq_lens_cpu.tolist() == [*range(2, 5), *range(4, 7)]

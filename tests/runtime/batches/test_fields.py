"""The declaration of batch fields: refused declarations, and retention and poison that follow from
it completely."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.pools import WindowTable
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.runtime.torch_fields import retained
from sglcore.step.batch_field import (
    Axis,
    Fill,
    Moved,
    Split,
    batch_field,
    fill_once,
    keep,
    sentinel,
    spec_of,
    specs,
    zero,
)
from sglcore.step.forward_inputs import NgramEmbeddingInfo
from tests.runtime.tiny import PAGE, SHARED, SLOTS, STAGED, TinyModel, make_attention


@dataclass(slots=True)
class Inner:
    """A nested record."""

    rows: Tensor | None = batch_field(axis=Axis.REQUESTS, owner="test")


@dataclass(slots=True)
class Outer:
    """A field of every kind, each with a tensor in it."""

    tokens: Tensor | None = batch_field(axis=Axis.TOKENS, dtype="int32", padding=zero(), owner="test")
    requests: Tensor | None = batch_field(axis=Axis.REQUESTS, moved=Moved(), owner="test")
    dropped: Tensor | None = batch_field(axis=Axis.NONE, split=Split.DROP, owner="test")
    counted: Tensor | None = batch_field(axis=Axis.NONE, split=Split.COUNT, dtype="int32", padding=keep(), owner="test")
    copied: Tensor | None = batch_field(axis=Axis.NONE, split=Split.COPY, owner="test")
    fresh: Tensor | None = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="test")
    refused: Tensor | None = batch_field(axis=Axis.NONE, split=Split.REFUSE, owner="test")
    inner: Inner | None = batch_field(axis=Axis.NONE, split=Split.NESTED, owner="test")
    host: Any = batch_field(axis=Axis.REQUESTS, owner="test")


def test_a_field_without_an_axis_must_say_how_it_is_split() -> None:
    with pytest.raises(TypeError, match="without an axis must declare split="):
        batch_field(axis=Axis.NONE, owner="test")


def test_a_field_with_an_axis_is_sliced_along_it_by_default() -> None:
    assert spec_of(Outer, "tokens").split is Split.SLICE


def test_a_buffer_must_say_what_its_padding_rows_hold() -> None:
    with pytest.raises(TypeError, match="with a dtype must declare padding="):
        batch_field(axis=Axis.TOKENS, dtype="int32", owner="test")


def test_a_field_that_bypasses_the_declaration_is_refused() -> None:
    @dataclass
    class Careless:
        declared: Tensor | None = batch_field(axis=Axis.TOKENS, owner="test")
        undeclared: Tensor | None = None

    with pytest.raises(TypeError, match=r"Careless.undeclared is not declared with batch_field\(...\)"):
        specs(Careless)


def test_an_unknown_field_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"declares no field 'seq_len'; it declares .*'seq_lens'"):
        spec_of(ForwardBatch, "seq_len")


def test_every_field_of_a_batch_and_of_its_records_is_declared() -> None:
    for kind in (ForwardBatch, NgramEmbeddingInfo):
        assert [spec.name for spec in specs(kind)] == [item.name for item in dataclasses.fields(kind)]


def test_a_batch_takes_no_undeclared_attribute() -> None:
    with pytest.raises(AttributeError):
        ForwardBatch().hisparse_coordinator = None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_batch_carries_no_pool_backend_or_coordinator() -> None:
    words = ("pool", "backend", "coordinator", "runner")
    allowed = {"req_pool_indices"}
    names = {spec.name for spec in specs(ForwardBatch)} - allowed
    assert not [name for name in names if any(word in name for word in words)]


def reachable(value: Any) -> set[int]:
    """The ids of all tensors in a record and its nested records, found without the declarations."""
    if isinstance(value, Tensor):
        return {id(value)}
    if dataclasses.is_dataclass(value):
        return set().union(*(reachable(getattr(value, item.name)) for item in dataclasses.fields(value)))
    return set()


def full_outer() -> Outer:
    """A record with every field set."""
    tensors = {item.name: torch.zeros(2) for item in dataclasses.fields(Outer) if item.name not in ("inner", "host")}
    return Outer(**tensors, inner=Inner(torch.zeros(1)), host=np.zeros(2))  # pyright: ignore[reportArgumentType]


def test_retention_reaches_every_tensor_whatever_its_kind_of_field() -> None:
    outer = full_outer()
    assert {id(tensor) for tensor in retained(outer)} == reachable(outer)
    assert retained(Outer()) == []


def test_retention_reaches_every_tensor_of_a_full_batch() -> None:
    batch = ForwardBatch()
    records = ("spec_info", "ngram_embedding_info", "sampling", "plan_record")
    for spec in specs(ForwardBatch):
        if spec.name not in records and spec.split not in (Split.COPY, Split.CLIP, Split.SIZE):
            setattr(batch, spec.name, torch.zeros(1))
    batch.spec_info, batch.ngram_embedding_info = Inner(torch.zeros(1)), NgramEmbeddingInfo(torch.zeros(1))
    batch.seq_lens, batch.extend_seq_lens = torch.zeros(1), torch.zeros(1)
    found = {id(tensor) for tensor in retained(batch)}
    assert found == reachable(batch)
    assert len(found) > 10


def test_a_hand_written_retention_list_is_caught() -> None:
    names = ("tokens", "requests", "dropped", "counted", "copied")  # mutant: written before the others were added
    outer = full_outer()
    assert {id(getattr(outer, name)) for name in names} != reachable(outer)


def registries(facts: Any) -> tuple[Any, ...]:
    """A decode and a prefill registry with every possible buffer."""
    table, *_ = make_attention(TinyModel())
    windows = WindowTable(SLOTS, 3, 9, PAGE, "cpu")
    decode = build_decode_registry(facts, table, max_bs=4, window_table=windows)
    prefill = build_prefill_registry(
        facts,
        table,
        max_bs=2,
        max_num_tokens=8,
        window_table=windows,
        register_input_embeds=True,
        hidden_size=3,
    )
    return decode, prefill


def unpoisoned(registry: Any) -> list[str]:
    """Buffers with an entry that a kernel could take for data."""
    names = []
    for name in registry.names:
        buffer = registry.input_buffer(name)
        wild = (
            buffer.tensor.isnan()
            if buffer.tensor.is_floating_point()
            else buffer.tensor == torch.iinfo(buffer.tensor.dtype).max
        )
        if buffer.spec.padding.fill is not Fill.ONCE and not wild.all():
            names.append(name)
    return names


@pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
def test_poison_covers_every_entry_of_every_buffer_that_is_written_each_step(facts: Any) -> None:
    for registry in registries(facts):
        assert unpoisoned(registry)
        registry.poison()
        assert unpoisoned(registry) == []


@pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
def test_poison_survives_the_next_commit_where_nothing_was_staged(facts: Any) -> None:
    for registry in registries(facts):
        registry.poison()
        registry.commit()
        assert unpoisoned(registry) == []


def test_a_poison_that_forgets_computed_buffers_is_caught() -> None:
    for registry in registries(SHARED):
        for name in registry.names:
            buffer = registry.input_buffer(name)
            if buffer.spec.is_staged:  # mutant
                buffer.tensor.fill_(torch.iinfo(buffer.tensor.dtype).max)
        assert "out_cache_loc" in unpoisoned(registry)


def test_the_buffers_of_a_registry_are_the_declared_ones() -> None:
    decode, prefill = registries(SHARED)
    declared = {spec.name for spec in specs(ForwardBatch) if spec.is_buffered} | {"input_embeds"}
    # Only steps that verify trees, or draft tokens of a model with states, have these
    # (`visible_buffer`, `run_buffers`).
    declared -= {"visible", "run_slots", "run_targets", "run_lens", "run_rows"}
    # Only models with embeddings of n-grams have theirs (`previous_buffer`).
    assert set(prefill.names) == declared
    extend = {"extend_prefix_lens", "extend_seq_lens", "extend_start_loc", "input_embeds"}
    assert set(decode.names) == declared - extend


def test_the_paddings_say_what_they_fill_and_when() -> None:
    assert [(p.fill, p.value) for p in (zero(), sentinel(9), fill_once(3))] == [
        (Fill.VALUE, 0),
        (Fill.VALUE, 9),
        (Fill.ONCE, 3),
    ]
    assert keep().fill is Fill.KEEP

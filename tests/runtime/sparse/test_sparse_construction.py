"""Construction of the sparse attention backends: their parts and order, the forward context that
each forward sees, and the number of slots that pools are made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.device.bring_up import BringUp, BringUpError
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.attention.sparse.compressed import DeepseekV4AttnBackend
from sglcore.runtime.attention.sparse.latent import DeepseekSparseAttnBackend
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.forward_context import get_attn_backend, get_token_to_kv_pool, has_forward_context
from sglcore.runtime.memory.kv_rows import Place, RowCounts
from tests.runtime.sparse_tiny import HEAVY, LAYERS, WINDOW, SparseDesk, desk_of, make_sparse
from tests.runtime.tiny import PAGES, SLOTS, assert_close, random_tokens

GIVEN = ("config", "package", "facts", "ledger", "progress", "model_path", "device_memory")


@pytest.mark.parametrize("backend", [DeepseekV4AttnBackend, DeepseekSparseAttnBackend])
def test_a_backend_has_the_coordinator_and_the_pools_that_it_was_built_with(backend: type[AttentionBackend]) -> None:
    site, coordinator = make_sparse(), object()
    table, pool, kernels = site.attention.req_to_token_pool, site.attention.token_to_kv_pool, site.attention.kernels
    made: Any = backend(site.attention.shape, table, pool, kernels, coordinator)
    assert (made.hisparse, made.token_to_kv_pool, made.req_to_token_pool) == (coordinator, pool, table)
    with pytest.raises(TypeError, match="kernels"):
        backend(site.attention.shape, table, pool)  # pyright: ignore[reportCallIssue]


def test_pools_come_before_the_coordinator_that_before_the_backend_and_that_before_graphs() -> None:
    STANDARD.check(GIVEN)
    for late, need in (("pools", "hisparse"), ("hisparse", "attention"), ("attention", "runner")):
        steps = list(STANDARD.steps)
        one, other = (next(i for i, step in enumerate(steps) if step.provides == name) for name in (late, need))
        assert one < other
        steps[one], steps[other] = steps[other], steps[one]
        with pytest.raises(BringUpError, match="which a later step provides"):
            BringUp(steps).check(GIVEN)
    with pytest.raises(BringUpError, match="'attention' needs 'hisparse', which nothing provides"):
        STANDARD.remove("hisparse").check(GIVEN)


def within(site: Any, ran: Any) -> None:
    """Call `ran` in the middle of each forward of the site's model."""
    layer = site.model.layers[1]
    mix = layer.mix

    def mixed(hidden: Tensor, batch: Any, backend: Any) -> Tensor:
        ran()
        return mix(hidden, batch, backend)

    layer.mix = mixed


def test_a_runner_within_another_leaves_that_its_own_backend_and_pools() -> None:
    """Whether the inner forward ends or fails; both give correct results."""
    outer, inner, text = make_sparse(), make_sparse((HEAVY,)), random_tokens(1, 9)
    desk, seen = desk_of(inner), []

    def run() -> None:
        hidden, _ = inner.runner.forward(inner.runner.init_batch(desk.extend({5: random_tokens(5, 9)})))
        assert_close(hidden, inner.model.dense(random_tokens(5, 9)))
        seen.append((get_attn_backend(), get_token_to_kv_pool()))

    within(outer, run)
    hidden, _ = outer.runner.forward(outer.runner.init_batch(desk_of(outer).extend({3: text})))
    assert_close(hidden, outer.model.dense(text))
    assert seen == [(outer.attention, outer.attention.token_to_kv_pool)]

    def fails() -> None:
        raise ZeroDivisionError

    model: Any = inner.model
    model.layers[0].mix = lambda *given: fails()
    with pytest.raises(ZeroDivisionError):
        outer.runner.forward(outer.runner.init_batch(desk_of(outer).extend({3: text})))
    assert not has_forward_context()


def in_last_slot(slots: int) -> None:
    """Prefill a text in chunks that cut blocks, in the slot with the highest number."""
    site, tokens = make_sparse(LAYERS), random_tokens(2, 22)
    pool: Any = site.attention.token_to_kv_pool
    pool._counts = RowCounts(PAGES, pool._counts.window_pages, slots)
    pool.replace_storage()
    desk, found = SparseDesk(site, WINDOW), []
    for first in range(0, len(tokens), 5):
        batch = site.runner.init_batch(desk.extend({SLOTS: tokens[first : first + 5]}))
        found.append(site.runner.forward(batch)[0])
    assert_close(torch.cat(found), site.model.dense(tokens))


def test_pools_have_rows_for_every_slot_and_not_only_for_those_that_run() -> None:
    """Slot 0 is not used by requests, so the pools need one slot more than there are concurrent
    requests."""
    pool: Any = make_sparse().attention.token_to_kv_pool
    for layer_id, layer in enumerate(pool.layers):
        for name, kept in layer.items():
            if kept.place is Place.SLOTS:
                assert len(pool.rows(layer_id, name)) == (SLOTS + 1) * kept.ring
    in_last_slot(SLOTS)
    with pytest.raises((AssertionError, IndexError)):
        in_last_slot(SLOTS - 1)

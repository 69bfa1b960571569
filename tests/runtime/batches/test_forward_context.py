"""The forward context: nested, restored on every exit, one per thread, and never inherited by
another runner."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import (
    ForwardContext,
    NoForwardContextError,
    forward_context,
    get_attn_backend,
    get_forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
    has_forward_context,
)
from sglcore.runtime.model_runner import ModelRunner
from tests.runtime.tiny import Desk, Site, TinyModel, assert_close, make_attention, make_site, random_tokens

PROMPT, OTHER = random_tokens(1, 6), random_tokens(2, 6)


def make_context(seed: int = 0) -> ForwardContext:
    """A context over pools of its own."""
    return ForwardContext(make_attention(TinyModel(seed))[2])


def test_the_inner_context_is_active_inside_and_the_outer_one_afterwards() -> None:
    outer, inner = make_context(), make_context()
    with forward_context(outer) as given:
        assert given is get_forward_context() is outer
        with forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    assert not has_forward_context()


def test_an_exception_restores_the_outer_context() -> None:
    outer = make_context()
    with forward_context(outer):
        with pytest.raises(ZeroDivisionError), forward_context(make_context()):
            raise ZeroDivisionError
        assert get_forward_context() is outer
    with pytest.raises(KeyboardInterrupt), forward_context(outer):
        raise KeyboardInterrupt
    assert not has_forward_context()


def test_a_generator_that_is_exhausted_or_closed_restores_the_outer_context() -> None:
    outer, inner = make_context(), make_context()

    def stages() -> Iterator[int]:
        with forward_context(inner):
            yield from range(3)

    with forward_context(outer):
        assert list(stages()) == [0, 1, 2]
        assert get_forward_context() is outer
        halfway = stages()
        next(halfway)
        assert get_forward_context() is inner
        halfway.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert get_forward_context() is outer


def test_another_thread_sees_no_context_and_its_own_changes_nothing_here() -> None:
    found: list[object] = []
    theirs = make_context()

    def other() -> None:
        found.append(has_forward_context())
        with forward_context(theirs):
            found.append(get_forward_context())

    with forward_context(make_context()) as mine:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert get_forward_context() is mine
    assert found == [False, theirs]


@pytest.mark.parametrize("getter", [get_forward_context, get_attn_backend, get_token_to_kv_pool, get_req_to_token_pool])
def test_outside_a_forward_every_getter_says_what_to_enter(getter: Callable[[], object]) -> None:
    with pytest.raises(NoForwardContextError, match=r"no forward is running here; enter `with forward_context\("):
        getter()


def test_the_pools_are_those_of_the_active_backend() -> None:
    for context in (make_context(1), make_context(2)):
        with forward_context(context):
            assert get_attn_backend() is context.attn_backend
            assert get_token_to_kv_pool() is context.attn_backend.token_to_kv_pool
            assert get_req_to_token_pool() is context.attn_backend.req_to_token_pool


def test_a_context_is_frozen_and_takes_no_other_attribute() -> None:
    context = make_context()
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.attn_backend = make_context().attn_backend  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises((AttributeError, TypeError)):
        context.hisparse_coordinator = None  # pyright: ignore[reportAttributeAccessIssue]


class Draft(TinyModel):
    """A draft model that runs another forward in the middle of its own."""

    inside: Callable[[], Tensor] | None = None
    result: Tensor | None = None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return its hidden states; the result of the inner forward is in `result`."""
        if self.inside is not None:
            self.result = self.inside()
        return super().__call__(batch)


class InheritingRunner(ModelRunner):
    """Mutant: reuses a context that is already active."""

    def run_eager(self, batch: ForwardBatch) -> Tensor:
        """Publish a context only in the outermost runner."""
        if not has_forward_context():
            return super().run_eager(batch)
        view = self.prepared(batch)
        view.mark_forward_metadata_ready(self.attn_backend.plan(view))
        return self.model(view)


def nested_forward(runner: type[ModelRunner]) -> tuple[Site, Site, Tensor, Tensor]:
    """Run a target forward inside a draft's forward; return both sites and both hidden states."""
    target, draft = make_site(TinyModel(1), runner=runner), make_site(Draft(2), runner=runner)
    model = draft.model
    assert isinstance(model, Draft)
    batch = target.runner.init_batch(Desk(1).extend({2: PROMPT}))
    model.inside = lambda: target.runner.run_eager(batch)
    hidden = draft.runner.run_eager(draft.runner.init_batch(Desk(2).extend({3: OTHER})))
    assert model.result is not None
    return target, draft, model.result, hidden


def test_a_target_forward_inside_a_drafts_scope_uses_its_own_backend_and_pool() -> None:
    target, draft, target_hidden, draft_hidden = nested_forward(ModelRunner)
    assert_close(target_hidden, target.model.dense(PROMPT))
    assert_close(draft_hidden, draft.model.dense(OTHER))
    assert written_cells(target) == len(PROMPT)
    assert written_cells(draft) == len(OTHER)


def test_a_runner_that_inherits_the_live_context_is_caught() -> None:
    # The results of this step are right; only later steps would read the target's unwritten KV
    # cells.
    target, *_ = nested_forward(InheritingRunner)
    assert written_cells(target) == 0


def written_cells(site: Site) -> int:
    """The number of written KV cells of the site's pool, without page 0."""
    keys, _ = site.cells.kv(0)
    return int((keys[site.cells.page_size :] != 0).any(-1).any(-1).sum())


def test_two_runners_in_one_process_take_turns_without_touching_each_other() -> None:
    sites = [make_site(TinyModel(seed)) for seed in (1, 2)]
    desks = [Desk(seed) for seed in (1, 2)]
    chunks = [PROMPT[:3], PROMPT[3:]]
    for number, chunk in enumerate(chunks):
        for site, desk in zip(sites, desks, strict=True):
            hidden = site.runner.run_eager(site.runner.init_batch(desk.extend({2: chunk})))
            assert_close(hidden, site.model.dense(PROMPT)[3 * number : 3 * number + 3])
    assert not has_forward_context()


def test_a_forward_that_fails_leaves_no_context_behind() -> None:
    site = make_site()
    batch = site.runner.init_batch(Desk().extend({1: PROMPT}))
    site.model.attention_layers = (object(),) * 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        site.runner.run_eager(batch)
    assert not has_forward_context()

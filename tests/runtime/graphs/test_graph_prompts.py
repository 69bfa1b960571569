"""Prefill graphs: captured pieces with eager attention in between equal the dense oracle, and
padding is bounded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import ForwardContext, forward_context, get_forward_context
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.graphs.capture import CaptureError
from sglcore.runtime.graphs.graph_segments import Captured, EagerCall, Pieces, record_pieces
from sglcore.runtime.graphs.piecewise import inductor, trace
from sglcore.runtime.graphs.prefill_graphs import MOST_PADDING, SMALLEST, PromptForward, token_buckets
from sglcore.worker.schedule_batch import ForwardMode
from tests.runtime.graphs.test_graph_runner import count_padding, pad_nothing
from tests.runtime.recording import GraphSite, make_graph_site
from tests.runtime.tiny import SHARED, STAGED, Desk, TinyModel, assert_close, make_site, random_tokens

KINDS = pytest.mark.parametrize("kind", ["breakable", "piecewise"])
Rows = Mapping[int, Sequence[int]]

CHUNKS: tuple[Mapping[int, int], ...] = (
    {1: 9, 2: 3},
    {3: 4},
    {2: 1, 1: 20},
    {4: 31},
    {3: 1, 2: 2, 5: 3},
    {1: 2, 2: 2},
    {6: 32},
)
"""{slot: tokens} of each step; the steps have 12, 4, 21, 31, 6, 4 and 32 tokens."""


def prompts(made: GraphSite, chunks: Sequence[Mapping[int, int]] = CHUNKS) -> list[tuple[Tensor, str]]:
    """Run the prefill of several requests in chunks."""
    desk = Desk(3)
    return [made.run(desk.extend(rows)) for rows in rows_of(chunks)]


def rows_of(chunks: Sequence[Mapping[int, int]]) -> list[Rows]:
    """Random tokens for each chunk."""
    return [
        {slot: random_tokens(10 * step + slot, count) for slot, count in chunk.items()}
        for step, chunk in enumerate(chunks)
    ]


def expected(model: TinyModel, chunks: Sequence[Mapping[int, int]] = CHUNKS) -> list[Tensor]:
    """The hidden states of each request by the dense oracle, joined per step."""
    tokens: dict[int, list[int]] = {}
    results = []
    for rows in rows_of(chunks):
        for slot, new in rows.items():
            tokens.setdefault(slot, []).extend(new)
        results.append(torch.cat([model.dense(tokens[slot])[-len(new) :] for slot, new in rows.items()]))
    return results


def differs(made: GraphSite, chunks: Sequence[Mapping[int, int]] = CHUNKS) -> bool:
    """Whether any step differs from the oracle."""
    found, wanted = prompts(made, chunks), expected(made.site.model, chunks)
    return not all(torch.allclose(one, other, atol=2e-5) for (one, _), other in zip(found, wanted, strict=True))


@KINDS
@pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
@pytest.mark.parametrize("poison", [False, True], ids=["clean", "poisoned"])
def test_chunks_of_any_size_give_what_each_request_gives_alone(kind: str, poison: bool, facts: Any) -> None:
    assert not differs(make_graph_site(kind, poison=poison, facts=facts))


@KINDS
def test_every_bucket_full_and_padded(kind: str) -> None:
    made = make_graph_site(kind, poison=True)
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32):
        assert not differs(made, ({1: 32}, {2: count}, {3: 32}, {4: count}))
        found = prompts(made, ({5: count},))
        bucket = next(size for size in (4, 6, 8, 12, 16, 24, 32) if size >= count)
        assert found[0][1] == f"{kind}:{bucket}"


@KINDS
def test_decodes_and_prompts_of_a_mixed_step_share_a_bucket(kind: str) -> None:
    made, desk = make_graph_site(kind, poison=True, tokens=(8, 16)), Desk(4)
    first, second, new = random_tokens(1, 5), random_tokens(2, 6), random_tokens(3, 3)
    made.run(desk.extend({1: first, 2: second[:2]}))
    made.site.tokens.last[1] = new[0]
    mixed, path = made.run(desk.batch({1: [-1], 2: second[2:], 3: new[1:]}, ForwardMode.MIXED))
    assert path == f"{kind}:8"
    dense = made.site.model.dense
    wanted = torch.cat([dense([*first, new[0]])[-1:], dense(second)[2:], dense(new[1:])])
    assert_close(mixed, wanted)


@KINDS
def test_decode_steps_between_prompts_are_full_graphs(kind: str) -> None:
    made, desk = make_graph_site(kind, tokens=(12,)), Desk(4)
    prompt = random_tokens(1, 9)
    made.run(desk.extend({1: prompt}))
    made.site.tokens.last[1] = 7
    hidden, path = made.run(desk.decode(1))
    assert path == "full:1"
    assert_close(hidden, made.site.model.dense([*prompt, 7])[-1:])


def test_few_tokens_run_eagerly_rather_than_as_padding() -> None:
    made = make_graph_site("breakable", tokens=(16, 32))
    desk = Desk()
    paths = [made.run(desk.extend({slot: random_tokens(slot, count)}))[1] for slot, count in ((1, 7), (2, 8), (3, 17))]
    assert paths == ["eager", "breakable:16", "breakable:32"]


@given(st.integers(SMALLEST, 5000), st.integers(1, 5000))
def test_padding_is_at_most_twice_the_real_tokens_and_gaps_are_small(most: int, count: int) -> None:
    sizes = token_buckets(most)
    assert sizes[-1] == most and sizes[0] >= min(SMALLEST, most)
    assert all(big <= MOST_PADDING * small for small, big in pairwise(sizes))
    holding = [size for size in sizes if size >= count]
    if holding and count >= SMALLEST / 2:
        assert holding[0] <= MOST_PADDING * count


# -- attention between the pieces
# --------------------------------------------------------------------------------------


class Watching(GatheredAttention):
    """Records the rows of each call, the tokens of its batch, and its forward context."""

    seen: tuple[tuple[int, int], ...] = ()
    contexts: tuple[ForwardContext, ...] = ()

    def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: Any) -> Tensor:
        """Record the call and run it."""
        self.seen += ((q.shape[0], batch.num_tokens),)
        self.contexts += (get_forward_context(),)
        return super().attend(q, layer, batch, plan)


class Observed:
    """Segments that capture nothing. `calls`: the calls with the rows of their inputs; `kept`: for
    each call, the number of its inputs that were still alive at the next call or at the end."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[int]]] = []
        self._inputs: list[list[weakref.ref]] = []
        self._alive: list[int] = []

    @property
    def kept(self) -> list[int]:
        """The number of inputs of each call that were still alive afterwards."""
        return [*self._alive, self._left()]

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Record the call; return zeros."""
        if self._inputs:
            self._alive.append(self._left())
        self.calls.append((call, [value.shape[0] for value in inputs]))
        self._inputs.append([weakref.ref(value.untyped_storage()) for value in inputs])
        return torch.zeros_like(inputs[0])

    def _left(self) -> int:
        return sum(found() is not None for found in self._inputs[-1])


@KINDS
def test_attention_sees_the_real_tokens_only_under_one_scope(kind: str) -> None:
    made = make_graph_site(kind, attention=Watching, buckets=(), tokens=(8,))
    backend = made.site.attention
    assert isinstance(backend, Watching)
    assert backend.seen == ()
    made.run(Desk().extend({1: random_tokens(1, 5)}))
    assert backend.seen == ((5, 5), (5, 5))
    assert backend.contexts[0] is backend.contexts[1]


@KINDS
def test_a_forward_is_one_segment_more_than_it_has_breaks(kind: str) -> None:
    made = make_graph_site(kind, buckets=(), tokens=(8, 16))
    assert len(made.capture.segments) == 2 * (2 + 1)
    assert made.capture.pools == 1


@KINDS
def test_steps_that_prompts_do_not_bring_run_eagerly(kind: str) -> None:
    made, desk = make_graph_site(kind, tokens=(8,)), Desk()
    batch = made.site.runner.init_batch(desk.extend({1: random_tokens(1, 5)}))
    assert made.graphs.can_run(batch)
    batch.input_embeds = torch.zeros(5, 8)
    assert not made.graphs.can_run(batch)
    batch.input_embeds, batch.forward_mode = None, ForwardMode.EMBED
    assert not made.graphs.can_run(batch)


@KINDS
def test_pieces_of_every_layer_and_size_share_the_memory_between_them(kind: str) -> None:
    made = make_graph_site(kind, buckets=(), tokens=(8, 16))
    assert made.graphs.prompts is not None
    captured = [made.graphs.prompts._captured[size].step for size in (8, 16)]
    parts = [part for step in captured if isinstance(step, Pieces) for part in step.parts]
    calls = [part for part in parts if isinstance(part, EagerCall)]
    assert len(calls) == 2 * 2
    places = {tuple(value.data_ptr() for value in (*call.inputs, call.output)) for call in calls}
    assert len(places) == 1 and len(set(places.pop())) == 4


@KINDS
def test_a_forward_keeps_no_value_between_segments_that_nothing_takes_any_more(kind: str) -> None:
    site, segments = make_site(), Observed()
    batch = site.runner.init_batch(Desk().extend({1: random_tokens(1, 6)}))
    layers = site.model.attention_layers
    with torch.inference_mode(), forward_context(ForwardContext(site.attention, batch, layers)):
        step = (lambda: site.model(batch)) if kind == "breakable" else trace(lambda: site.model(batch)).run
    with torch.inference_mode(), forward_context(ForwardContext(site.attention, batch, layers, segments)):
        step()
    assert segments.kept == [0, 0]


@KINDS
def test_a_capture_that_fails_after_a_segment_raises_its_own_error_and_the_next_one_works(kind: str) -> None:
    made = make_graph_site(kind, buckets=(), tokens=(8,))
    assert made.graphs.prompts is not None
    recorder, count = made.graphs.backend.recorder, len(made.capture.segments)  # pyright: ignore[reportAttributeAccessIssue]
    layer, x = made.site.model.attention_layers[0], torch.ones(4, 8)

    def broken() -> Tensor:
        inputs = (x + 1, x[:, :4] + 1, x[:, 4:] + 1)
        segments = get_forward_context().segments
        assert segments is not None
        result = segments.run_between(layer, *inputs)
        if isinstance(segments, Captured):
            raise LookupError("in the forward")
        return result

    context = ForwardContext(made.site.attention, None, made.site.model.attention_layers)
    with torch.inference_mode(), made.streams.running(), forward_context(context):
        with pytest.raises(LookupError, match="in the forward"):
            record_pieces(recorder, broken)
        assert get_forward_context() is context
    assert len(made.capture.segments) == count + 1
    made.graphs.recapture()
    assert not differs(made, ({1: 8}, {2: 5}))


def test_a_trace_is_gone_with_its_last_user() -> None:
    site = make_site()
    batch = site.runner.init_batch(Desk().extend({1: random_tokens(1, 6)}))
    with torch.inference_mode(), forward_context(ForwardContext(site.attention, batch, site.model.attention_layers)):
        module = weakref.ref(trace(lambda: site.model(batch)).module)
    gc.collect()
    assert module() is None


def test_more_sizes_than_torch_recompiles_one_function_are_traced() -> None:
    sizes = tuple(range(4, 4 + 2 * torch._dynamo.config.recompile_limit, 2))
    made = make_graph_site("piecewise", buckets=(), tokens=(*sizes, 32))
    assert made.graphs.prompts is not None and len(made.graphs.prompts.sizes) == len(sizes) + 1


# -- mutants
# --------------------------------------------------------------------------------------------------


class Keeping(TinyModel):
    """The same sums; each layer computes its input anew from all attention outputs so far."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, HIDDEN]."""
        first = hidden = self.embedding[batch.input_ids] + self.places[batch.positions]
        attended: list[Tensor] = []
        for layer, qkv in zip(self.attention_layers, self.qkv, strict=True):
            attended.append(layer(*self._split(hidden @ qkv)))
            hidden = first + sum(given @ out for given, out in zip(attended, self.out, strict=False))
        return hidden


@KINDS
def test_what_attention_gave_stays_when_the_next_one_runs(kind: str) -> None:
    assert not differs(make_graph_site(kind, model=Keeping()))


def skips_calls(made: GraphSite) -> None:
    """Mutant: the last attention call is left out; its output is that of an older step."""
    for captured in made.graphs.prompts._captured.values():  # pyright: ignore[reportOptionalMemberAccess]
        parts = captured.step.parts  # pyright: ignore[reportAttributeAccessIssue]
        last = max(place for place, part in enumerate(parts) if isinstance(part, EagerCall))
        del parts[last]


def next_bucket(made: GraphSite) -> None:
    """Mutant: every bucket replays the pieces of the smallest one."""
    captured = made.graphs.prompts._captured  # pyright: ignore[reportOptionalMemberAccess]
    for size in captured:
        captured[size] = captured[4]


def rebind(made: GraphSite) -> None:
    """Mutant: the input buffers are reallocated after capture."""
    made.site.runner.prefill_registry.make_buffers()


def foreign_context(made: GraphSite) -> None:
    """Mutant: pieces replay under the scope of another runner."""
    foreign = make_site(TinyModel(5), attention=GatheredAttention).attention
    made.graphs.prompts._context = replace(made.graphs._context, attn_backend=foreign)  # pyright: ignore


@KINDS
@pytest.mark.parametrize("plant", [skips_calls, next_bucket, rebind, foreign_context])
def test_a_broken_runner_is_caught(kind: str, plant: Callable[[GraphSite], None]) -> None:
    made = make_graph_site(kind, tokens=(4, 12, 32))
    plant(made)
    try:
        assert differs(made)
    except (RuntimeError, IndexError, AssertionError) as error:
        assert "differs" not in str(error)


@pytest.mark.parametrize("mutant", [pad_nothing, count_padding])
def test_a_broken_registry_is_caught_where_tokens_see_each_other(mutant: Any) -> None:
    model = TinyModel(couples=True)
    chunks = ({1: 32}, {2: 5}, {3: 7})
    eager, plain = make_graph_site(model=model), make_graph_site("breakable", model=model, poison=True)
    wanted = [hidden for hidden, _ in prompts(eager, chunks)]
    for (found, path), other in zip(prompts(plain, chunks), wanted, strict=True):
        assert path.startswith("breakable")
        assert_close(found, other)
    broken = make_graph_site("breakable", model=model, poison=True)
    mutant(broken.site.runner.prefill_registry)
    try:
        found = [hidden for hidden, _ in prompts(broken, chunks)]
    except IndexError:
        return
    assert not all(torch.allclose(one, other, atol=2e-5) for one, other in zip(found, wanted, strict=True))


# -- refusals
# --------------------------------------------------------------------------------------------------


@KINDS
def test_a_moved_pool_is_refused_until_everything_is_captured_again(kind: str) -> None:
    made = make_graph_site(kind, tokens=(4, 6, 12, 24, 32))
    made.site.cells.replace_storage()
    with pytest.raises(StalePlanError, match=r"bucket 12 tokens was captured over generation 0"):
        prompts(made)
    made.graphs.recapture()
    assert not differs(made)


def test_a_registry_that_graphs_hold_does_not_grow() -> None:
    made = make_graph_site("breakable")
    with pytest.raises(ValueError, match="that captured graphs hold addresses of"):
        made.run(Desk().extend({1: random_tokens(1, 33)}))


def test_a_mechanism_of_decode_steps_only_is_not_asked_for_prompts() -> None:
    made = make_graph_site("full")
    forward = PromptForward(made.site.model, made.site.runner.prefill_registry, (8,))
    context = ForwardContext(made.site.attention, None, made.site.model.attention_layers)
    with pytest.raises(TypeError, match="capture no prompts"):
        GraphRunner(
            made.graphs.backend,
            made.site.runner.decode_registry,
            context,
            made.site.model,
            (1,),
            prompts=forward,
            streams=made.streams,
        )


class Lopsided(TinyModel):
    """A model with a forward that returns more than hidden states."""

    def __call__(self, batch: ForwardBatch) -> Any:
        """Two results."""
        hidden = self.embedding[batch.input_ids]
        return hidden, hidden + 1


def test_a_forward_that_gives_more_than_hidden_states_is_not_split() -> None:
    with pytest.raises(CaptureError, match="returns 2 values"):
        make_graph_site("piecewise", model=Lopsided(), buckets=())


@pytest.mark.needs("graphs.compiled")
def test_compiled_pieces_give_what_the_forward_gives() -> None:
    site = make_site(attention=GatheredAttention)
    batch = site.runner.init_batch(Desk().extend({1: random_tokens(1, 6), 2: random_tokens(2, 3)}))
    with torch.inference_mode():
        wanted = site.runner.run_eager(batch)
        context = ForwardContext(site.attention, batch, site.model.attention_layers)
        with forward_context(context):
            assert_close(trace(lambda: site.model(batch), inductor).run(), wanted)


def test_every_attention_asks_for_segments_with_its_inputs() -> None:
    site, segments = make_site(), Observed()
    batch = site.runner.init_batch(Desk().extend({1: random_tokens(1, 6)}))
    with forward_context(ForwardContext(site.attention, batch, site.model.attention_layers, segments)):
        site.model(batch)
    assert segments.calls == [(layer, [6, 6, 6]) for layer in site.model.attention_layers]

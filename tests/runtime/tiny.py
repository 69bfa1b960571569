"""A tiny language model with everything that runs it on the CPU, the host that makes its batches,
and a dense oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sglcore.checkpoint.pooling_config import Pooling
from sglcore.device.facts import Facts
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.attention.contract import AttentionBackend, AttentionShape, HostUpdate
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.graphs.graph_backend import Step
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool, WindowTable
from sglcore.runtime.model_runner import Extensions, ModelRunner, RunnerOptions
from sglcore.runtime.pooling import EmbeddingSteps, Pooler
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.runtime.streams import Streams
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import BatchResult, Limits
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 29, 8, 2, 1, 4
PAGE, SLOTS, CONTEXT = 4, 8, 40
PAGES = SLOTS * CONTEXT // PAGE
SHARED = Facts(tensor_device="cpu", shares_host_memory=True)
STAGED = Facts(tensor_device="cpu", shares_host_memory=False)
GREEDY = SamplingParams(temperature=0.0)


class TinyModel:
    """Embedding, attention layers with a residual, head. `couples`: every token also sees the mean
    of the real ones, as with the load of experts, so that a wrong count of real tokens changes the
    results."""

    def __init__(self, seed: int = 0, windows: tuple[int | None, ...] = (None, 3), couples: bool = False) -> None:
        torch.manual_seed(seed)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.embedding, self.places = torch.randn(VOCAB, HIDDEN), torch.randn(CONTEXT + 1, HIDDEN)
        self.qkv = [torch.randn(HIDDEN, width) * HIDDEN**-0.5 for _ in windows]
        self.out = [torch.randn(HEADS * HEAD_DIM, HIDDEN) * HIDDEN**-0.5 for _ in windows]
        self.head = torch.randn(HIDDEN, VOCAB)
        self.windows, self.couples = windows, couples
        self.attention_layers = tuple(
            BackendAttention(i, HEADS, KV_HEADS, HEAD_DIM, sliding_window=window) for i, window in enumerate(windows)
        )
        self.seen: list[ForwardBatch] = []

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, HIDDEN]; records the batch."""
        self.seen.append(batch)
        hidden = self.embedding[batch.input_ids] + self.places[batch.positions]
        if self.couples:
            real = torch.arange(len(hidden)) < batch.num_token_non_padded
            hidden = hidden + torch.where(real[:, None], hidden, 0).sum(0) / batch.num_token_non_padded
        for layer, qkv, out in zip(self.attention_layers, self.qkv, self.out, strict=True):
            hidden = hidden + layer(*self._split(hidden @ qkv)) @ out
        return hidden

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Hidden states, twice: there is no last norm."""
        hidden = self(batch)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, VOCAB]."""
        return hidden @ self.head

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Embed ids: [T] to [T, HIDDEN]."""
        return self.embedding[ids]

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """The oracle: hidden states [n, HIDDEN] of one request alone, without pages, batches or
        registries."""
        hidden = self.embedding[torch.tensor(tokens)] + self.places[: len(tokens)]
        for window, qkv, out in zip(self.windows, self.qkv, self.out, strict=True):
            hidden = hidden + attend_densely(*self._split(hidden @ qkv), window) @ out
        return hidden

    def next_token(self, tokens: Sequence[int]) -> int:
        """The greedy next token after these tokens."""
        return int(self.logits(self.dense(tokens)[-1:]).argmax())

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` greedy tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)


def attend_densely(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one whole request: q [n, heads * dim], k and v [n, kv_heads * dim]."""
    count = len(q)
    rows, columns = torch.arange(count)[:, None], torch.arange(count)[None]
    mask = columns <= rows
    if window is not None:
        mask = mask & (columns > rows - window)
    heads = [part.view(count, -1, HEAD_DIM).transpose(0, 1) for part in (q, k, v)]
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in heads[1:])
    return sdpa(heads[0], keys, values, attn_mask=mask).transpose(0, 1).reshape(count, HEADS * HEAD_DIM)


class RecordedStep:
    """A captured step of the fake graphs: replaying runs it again on the content of the static
    buffers."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.updates: list[HostUpdate | None] = []

    def replay(self, update: HostUpdate | None) -> Tensor:
        """Run it again."""
        self.updates.append(update)
        return self.step()


class RecordedGraphs:
    """A graph mechanism that records a step and replays it eagerly."""

    kind = "recorded"

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self.closed = 0

    def capture(self, step: Step) -> RecordedStep:
        """Run the step once and record it."""
        step()
        self.steps.append(RecordedStep(step))
        return self.steps[-1]

    def close(self) -> None:
        """Count the call."""
        self.closed += 1


@dataclass
class Site:
    """One model with its pools, backend, registries, runner and worker."""

    model: TinyModel
    table: ReqToTokenPool
    cells: MHATokenToKVPool
    attention: AttentionBackend
    runner: ModelRunner
    tokens: TokenTable
    worker: TpModelWorker
    graphs: RecordedGraphs | None = None


def make_attention(
    model: TinyModel, kind: Callable[..., AttentionBackend] = ReferenceAttention
) -> tuple[ReqToTokenPool, MHATokenToKVPool, AttentionBackend]:
    """New pools and a backend over them."""
    layers = ((KV_HEADS, HEAD_DIM),) * len(model.windows)
    table, cells = (
        ReqToTokenPool(SLOTS, CONTEXT, PAGE, "cpu"),
        MHATokenToKVPool(PAGES, PAGE, layers, torch.float32, "cpu"),
    )
    shape = AttentionShape(HEADS, layers, tuple(dict.fromkeys(model.windows)))
    return table, cells, kind(shape, table, cells, KernelTable())


def make_site(
    model: TinyModel | None = None,
    *,
    facts: Facts = SHARED,
    attention: Callable[..., AttentionBackend] = ReferenceAttention,
    runner: type[ModelRunner] = ModelRunner,
    worker: type[TpModelWorker] = TpModelWorker,
    buckets: tuple[int, ...] = (),
    max_bs: int = SLOTS,
    batch_type: type[ForwardBatch] = ForwardBatch,
    window_table: WindowTable | None = None,
    **options: Any,
) -> Site:
    """Make a site from the declarations; `buckets` captures decode graphs with the fake
    mechanism."""
    model = model or TinyModel()
    table, cells, backend = make_attention(model, attention)
    inputs: dict[str, Any] = {"batch_type": batch_type, "window_table": window_table}
    decode = build_decode_registry(facts, table, max_bs=max_bs, **inputs)
    prefill = build_prefill_registry(facts, table, max_bs=2, max_num_tokens=4, **inputs)
    tokens = TokenTable(SLOTS, CONTEXT, "cpu")
    added = {name: options.pop(name) for name in ("state_pool", "entered", "halves") if name in options}
    streams = options.pop("streams", Streams())
    extensions = Extensions(window_table=window_table, **added)
    running = runner(model, backend, decode, prefill, tokens, RunnerOptions(**options), extensions, streams)
    graphs = RecordedGraphs() if buckets else None
    if graphs is not None:
        context = ForwardContext(backend, None, model.attention_layers, state_pool=running.state_pool)
        running.graphs = GraphRunner(graphs, decode, context, model, buckets)
    limits = Limits(CONTEXT, SLOTS, PAGE, PAGES, SLOTS * CONTEXT, VOCAB)
    pooler = Pooler(Pooling(("mean",), is_normalized=True), model.logits, torch.float32)
    return Site(
        model, table, cells, backend, running, tokens, worker(running, tokens, limits, [EmbeddingSteps(pooler)]), graphs
    )


class Desk:
    """The host's side: the tokens and pages of each slot. Pages are handed out in random order."""

    def __init__(self, seed: int = 0) -> None:
        self.free = list(range(1, PAGES + 1))
        random.Random(seed).shuffle(self.free)
        self.lens: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.step = 0

    def leave(self, slot: int) -> None:
        """End a request; its pages are the next to be reused."""
        self.free += self.pages.pop(slot)
        del self.lens[slot]

    def extend(self, rows: Mapping[int, Sequence[int]], mode: ForwardMode = ForwardMode.EXTEND, **values: Any) -> Any:
        """A step in which slot s brings the tokens rows[s]."""
        return self.batch(rows, mode, **values)

    def decode(self, *slots: int, **values: Any) -> ScheduleBatch:
        """A step in which each slot brings its last token; the host does not know its value."""
        return self.batch({slot: [-slot] for slot in slots}, ForwardMode.DECODE, **values)

    def batch(
        self,
        rows: Mapping[int, Sequence[int]],
        mode: ForwardMode,
        *,
        params: Sequence[tuple] | None = None,
        emits: Sequence[bool] | None = None,
        **values: Any,
    ) -> ScheduleBatch:
        """Any step; `params` are tuples for SamplingBatch.from_params (all greedy if None)."""
        self.step += 1
        slots = list(rows)
        before = [self.lens.get(slot, 0) for slot in slots]
        counts = [len(self.pages.get(slot, [])) for slot in slots]
        new = [self._grow(slot, len(rows[slot])) for slot in slots]
        sampling = SamplingBatch.from_params(params or [(GREEDY, 0)] * len(slots))
        made = ScheduleBatch(
            step=self.step,
            forward_mode=mode,
            slots=ints(slots),
            seq_lens=ints([self.lens[slot] for slot in slots]),
            prefix_lens=ints(before),
            token_offsets=offsets([len(rows[slot]) for slot in slots]),
            input_ids=ints([token for slot in slots for token in rows[slot]]),
            page_counts=ints(counts),
            new_page_offsets=offsets([len(pages) for pages in new]),
            new_pages=ints([page for pages in new for page in pages]),
            emits=np.array([True] * len(slots) if emits is None else emits, dtype=np.bool_),
            composition=self.step,
            sampling=sampling,
        )
        for name, value in values.items():
            setattr(made, name, value)
        return made

    def _grow(self, slot: int, count: int) -> list[int]:
        self.lens[slot] = self.lens.get(slot, 0) + count
        pages = self.pages.setdefault(slot, [])
        new = [self.free.pop() for _ in range(-(-self.lens[slot] // PAGE) - len(pages))]
        pages += new
        return new


def ints(values: Any) -> np.ndarray:
    """int32."""
    return np.asarray(values, dtype=np.int32)


def offsets(lengths: Sequence[int]) -> np.ndarray:
    """CSR offsets of rows with these lengths."""
    return ints([0, *np.cumsum(lengths)]) if len(lengths) else ints([0])


def random_tokens(seed: int, count: int) -> list[int]:
    """`count` ids other than 0, the id in padding rows."""
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def tokens_of(result: BatchResult, row: int) -> list[int]:
    """The tokens that one row sampled."""
    return result.token_ids[result.token_offsets[row] : result.token_offsets[row + 1]].tolist()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Compare with a tolerance for float32 sums in another order."""
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)

"""Runs a model with the runtime's own runner, page table and reference attention, one step at a
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.device.package import resolve
from sglcore.models.layer_kinds import Architecture
from sglcore.runtime.attention.backend_selection import OF_ROWS, shape_of
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.deepseek_v4_rows import DeepSeekV4TokenToKVPool
from sglcore.runtime.memory.geometry import has_window, layer_shapes
from sglcore.runtime.memory.kv_rows import RowCounts, RowPool
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from sglcore.runtime.memory.states import StatePool
from sglcore.runtime.model_runner import Extensions, ModelRunner
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry, previous_buffer
from sglcore.runtime.token_table import TokenTable
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch

PAGE, SLOTS, CONTEXT = 4, 3, 128
FACTS = Facts(tensor_device="cpu", shares_host_memory=True)


class Steps:
    """A model on a device with its runner; steps run on the current stream. Request slots 1 to
    `SLOTS` hold one sequence each, of at most `CONTEXT` tokens; each step appends to it. Pages are
    taken from the highest number down, interleaved. `snapshots`: places for saved states of
    recurrent layers."""

    def __init__(self, model: Architecture, snapshots: int = 0, device: str = "cpu") -> None:
        facts = FACTS if device == "cpu" else Facts(tensor_device=device)
        encoder, table = model.config.is_encoder, ReqToTokenPool(SLOTS, CONTEXT, PAGE, device)
        self.model, self._tokens = model, TokenTable(SLOTS, CONTEXT, device)
        own = [[previous_buffer(self._tokens, model.previous_ids)] if model.previous_ids else [] for _ in range(2)]
        given = facts, None if encoder else table
        self.runner = ModelRunner(
            model,
            _attention(model, table, device),
            build_decode_registry(*given, max_bs=SLOTS, extra_buffers=own[0]),
            build_prefill_registry(*given, max_bs=SLOTS, max_num_tokens=CONTEXT, extra_buffers=own[1]),
            self._tokens,
            extensions=Extensions(state_pool=StatePool(model.state_layers, SLOTS, snapshots, device)),
        )
        self._free = list(range(1, SLOTS * CONTEXT // PAGE + 1))
        self._pages = dict.fromkeys(range(1, SLOTS + 1), 0)
        self._lens = dict.fromkeys(range(1, SLOTS + 1), 0)

    def hidden(self, tokens: Mapping[int, Sequence[int]], mode: ForwardMode = ForwardMode.EXTEND) -> Tensor:
        """Run one step that appends tokens[s] to the sequence of slot s; return the hidden states
        [T, H] of these tokens, slot by slot."""
        with torch.inference_mode():
            return self.runner.run_eager(self.staged(tokens, mode))

    def staged(self, tokens: Mapping[int, Sequence[int]], mode: ForwardMode = ForwardMode.EXTEND) -> ForwardBatch:
        """Return the step's batch on the device, without running it. The tokens count as appended:
        the next call continues after them."""
        first = dict(self._lens)
        batch = self.runner.init_batch(self._batch(tokens, mode))
        if self.model.previous_ids:
            for slot, ids in tokens.items():
                row = self._tokens.history[slot]
                row[first[slot] : self._lens[slot]] = torch.tensor(ids, dtype=row.dtype, device=row.device)
        return batch

    def logprobs(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Run one step; return float32 [T, vocab], the log-probabilities after each token."""
        hidden = self.hidden(tokens)
        with torch.inference_mode():
            return torch.log_softmax(self.runner.logits(hidden, None), dim=-1)

    def _batch(self, tokens: Mapping[int, Sequence[int]], mode: ForwardMode) -> ScheduleBatch:
        slots = list(tokens)
        prefix = [self._lens[slot] for slot in slots]
        counts = [self._pages[slot] for slot in slots]
        for slot in slots:
            self._lens[slot] += len(tokens[slot])
        pages = [self._take(slot) for slot in slots]
        ids = [token for slot in slots for token in tokens[slot]]
        return ScheduleBatch(
            step=0,
            forward_mode=mode,
            slots=_ints(slots),
            seq_lens=_ints([self._lens[slot] for slot in slots]),
            prefix_lens=_ints(prefix),
            token_offsets=_ints(np.cumsum([0, *(len(tokens[slot]) for slot in slots)])),
            input_ids=_ints(ids),
            page_counts=_ints(counts),
            new_page_offsets=_ints(np.cumsum([0, *map(len, pages)])),
            new_pages=_ints([page for row in pages for page in row]),
            emits=np.ones(len(slots), dtype=np.bool_),
        )

    def _take(self, slot: int) -> list[int]:
        wanted = -(-self._lens[slot] // PAGE) - self._pages[slot]
        self._pages[slot] += wanted
        return [self._free.pop() for _ in range(wanted)]


def _attention(model: Architecture, table: ReqToTokenPool, device: str) -> AttentionBackend:
    """Return the reference attention for KV slots; for other cache entries, the first backend that
    supports the layers."""
    layers, pages = model.attention_layers, SLOTS * CONTEXT // PAGE
    shape = shape_of(layers, model.config.is_encoder)
    if any(layer.rows for layer in layers):
        pool = DeepSeekV4TokenToKVPool if any(has_window(layer) for layer in layers) else RowPool
        rows = pool([layer.rows for layer in layers], PAGE, RowCounts(pages, 0, SLOTS), device, poison=True)
        offered = (resolve(each) for each in OF_ROWS.values())
        backend = next(each for each in offered if shape.features <= each.facts.features)
        return backend(shape, table, rows, model.kernels)
    cells = MHATokenToKVPool(pages, PAGE, layer_shapes(layers, lambda layer: True), model.dtype, device, model.kernels)
    return ReferenceAttention(shape, table, cells, model.kernels)


def _ints(values: object) -> NDArray[np.int32]:
    return np.asarray(values, dtype=np.int32)

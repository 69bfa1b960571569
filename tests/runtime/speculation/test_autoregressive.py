"""Draft models against dense torch: after any history, every draft token is drawn from the
distribution that a forward from scratch gives for the true tokens and features."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger
from sglcore.models.drafts.draft_loader import load_draft
from sglcore.runtime.attention.backend_selection import shape_of
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.geometry import layer_shapes
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.runtime.speculative.chain_drafts import AutoregressiveDrafter, FeatureDrafter, StandaloneDrafter
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.token_table import TokenTable
from sglcore.worker.schedule_batch import ForwardMode
from tests.checkpoints import SIZES, llama, save
from tests.drafts import TARGET, eagle, eagle3, next_token
from tests.models.steps import FACTS, load

SLOTS, CONTEXT, TOKENS, PAGES = 3, 64, 4, 240
VOCAB = SIZES["vocab_size"]
TOLERANCE = 1e-4


@dataclass
class Case:
    """A draft model. `width`: elements of the features that it reads (0: none). `dense(tokens,
    features [L, F] of all tokens but the last, path)`: log-probabilities [len(path) + 1, vocab] by
    dense torch, after the tokens and after each token of the path."""

    model: Any
    width: int
    dense: Callable[[list[int], Tensor, list[int]], Tensor]


@dataclass
class Text:
    """A request: its tokens (the last one has no KV cell yet), a feature for each token with a KV
    cell, the number of these cells, and its pages."""

    tokens: list[int]
    features: Tensor
    cells: int = 0
    pages: list[int] = field(default_factory=list)


def drafted(kind: str, folder: Path) -> Case:
    """A draft model of a kind, loaded by the engine's loader."""
    target = llama(**TARGET)
    if kind == "standalone":
        oracle = llama(num_hidden_layers=1)

        def dense(tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
            with torch.no_grad():
                found = oracle(torch.tensor([tokens + path])).logits[0]
            return torch.log_softmax(found[len(tokens) - 1 :], -1)

        return Case(load(save(oracle, folder)), 0, dense)
    if kind == "mtp":
        made, model = next_token(target, folder, llama), load(folder)
    else:
        made = (eagle if kind == "eagle" else eagle3)(target, folder / "draft")
        model = load(save(target, folder))
    given = {"facts": FACTS, "kernels": KernelTable(), "ledger": DecisionLedger(), "progress": lambda *_: None}
    draft = load_draft(EngineConfig(), folder if kind == "mtp" else folder / "draft", kind, model, **given)
    width = SIZES["hidden_size"] * (len(draft.aux_layers or ()) or 1)
    return Case(draft.model, width, lambda tokens, rows, path: made.propose(tokens[1:], rows, path))


CASES = ("eagle", "eagle3", "mtp", "standalone")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {kind: drafted(kind, tmp_path_factory.mktemp(kind)) for kind in CASES}


def make_drafter(case: Case, page_size: int) -> AutoregressiveDrafter:
    """A drafter with its own runner over new pools."""
    model, table = case.model, ReqToTokenPool(SLOTS, CONTEXT, page_size, "cpu")
    shapes = layer_shapes(model.attention_layers, lambda layer: True)
    cells = MHATokenToKVPool(PAGES // page_size, page_size, shapes, torch.float32, "cpu", model.kernels)
    for layer in range(len(shapes)):
        for each in cells.kv(layer):
            each.fill_(7.0)  # makes reads of unwritten cells visible
    attention = ReferenceAttention(shape_of(model.attention_layers, False), table, cells, model.kernels)
    decode = build_decode_registry(FACTS, table, max_bs=SLOTS * (TOKENS + 2))
    prefill = build_prefill_registry(FACTS, table, max_bs=SLOTS, max_num_tokens=CONTEXT)
    runner = ModelRunner(model, attention, decode, prefill, TokenTable(SLOTS, CONTEXT, "cpu"))
    if not case.width:
        return StandaloneDrafter(runner, TOKENS)
    return FeatureDrafter(runner, TOKENS, model.project)


def ints(values: Any) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


class Desk:
    """Plays scheduler and target: random texts with random features; the caller says how many draft
    tokens are accepted."""

    def __init__(self, case: Case, page_size: int, seed: int, drafter: AutoregressiveDrafter | None = None) -> None:
        self.case, self.page_size = case, page_size
        self.drafter = make_drafter(case, page_size) if drafter is None else drafter
        self.table = self.drafter.runner.attn_backend.req_to_token_pool.page_table
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.texts: dict[int, Text] = {}
        self.free = list(range(1, PAGES // page_size + 1))
        self.random.shuffle(self.free)
        self.proposals: dict[int, list[int]] = {}
        self.wanted = cycle((TOKENS, TOKENS, 2, TOKENS, 0))
        self.compared = 0

    def token(self) -> int:
        return self.random.randrange(1, VOCAB)

    def admit(self, slot: int, length: int, like: int | None = None) -> int:
        """Admit a new text and return its number of cached KV cells. With `like`, it starts with
        the tokens of that slot and shares the full pages, except those that need the next token
        (`lookahead`)."""
        text = Text([self.token() for _ in range(length)], torch.randn(length, self.case.width))
        if like is not None:
            other = self.texts[like]
            same = min(length - 1, other.cells)
            text.tokens[:same], text.features[:same] = other.tokens[:same], other.features[:same]
            pages = (same - self.drafter.lookahead) // self.page_size
            text.pages, text.cells = other.pages[:pages], pages * self.page_size
        self.texts[slot] = text
        self.table[slot] = 0
        self.reserve(slot, text.cells)
        return text.cells

    def reserve(self, slot: int, cells: int) -> None:
        """Give the slot pages for `cells` KV cells."""
        text = self.texts[slot]
        while len(text.pages) * self.page_size < cells:
            text.pages.append(self.free.pop())
        self.table[slot, : len(text.pages)] = ints(text.pages)

    def limit(self, slot: int) -> int:
        return len(self.texts[slot].pages) * self.page_size

    def prompts(self, chunks: dict[int, int]) -> None:
        """Run one step that prefills chunks[s] tokens of each slot s; a prompt that is complete
        samples a token."""
        rows = list(chunks.items())
        for slot, count in rows:
            self.reserve(slot, self.texts[slot].cells + count + self.random.randrange(2 * TOKENS))
        starts = [self.texts[slot].cells for slot, _ in rows]
        lens, counts = [start + count for start, (_, count) in zip(starts, rows, strict=True)], [n for _, n in rows]
        emits = [lens[i] == len(self.texts[slot].tokens) for i, (slot, _) in enumerate(rows)]
        for (slot, _), done in zip(rows, emits, strict=True):
            self.texts[slot].tokens += [self.token()] * done
        parts = [(self.texts[slot], start, end) for (slot, _), start, end in zip(rows, starts, lens, strict=True)]
        given = {"extend_prefix_lens": starts, "extend_seq_lens": counts, "seq_lens": lens}
        on_device: dict[str, Any] = {name: ints(values) for name, values in given.items()}
        on_host: dict[str, Any] = {f"{name}_cpu": np.array(values, np.int32) for name, values in given.items()}
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(rows),
            num_tokens=sum(counts),
            req_pool_indices=ints([slot for slot, _ in rows]),
            input_ids=ints([token for text, start, end in parts for token in text.tokens[start:end]]),
            positions=ints([place for _, start, end in parts for place in range(start, end)]),
            extend_start_loc=ints(np.cumsum([0, *counts[:-1]])),
            **on_device,
            **on_host,
        )
        ids = [token for text, start, end in parts for token in text.tokens[start + 1 : end + 1]]
        features = torch.cat([text.features[start:end] for text, start, end in parts])
        for text, _, end in parts:
            text.cells = end
        ends = np.cumsum(counts) - 1
        done = [i for i, each in enumerate(emits) if each]
        self.advance([rows[i][0] for i in done], batch, 1, ids, features, ends[done])

    def verify(self, accepted: dict[int, int]) -> None:
        """Run one verification that accepts the first accepted[s] draft tokens of slot s, as far as
        its pages reach."""
        width, slots, rows = TOKENS + 1, list(accepted), []
        ids, features, select = [], [], []
        for i, slot in enumerate(slots):
            text = self.texts[slot]
            self.reserve(slot, min(text.cells + 1 + self.random.randrange(3 * width), CONTEXT))
            before, limit, path = text.cells, self.limit(slot), self.proposals[slot]
            right = min(accepted[slot], limit - before - 1)
            wrong = next(each for each in iter(self.token, 0) if right == TOKENS or each != path[right])
            drawn = [*path[:right], wrong, *(self.token() for _ in range(TOKENS - right))]
            made = torch.randn(width, self.case.width)
            usable = [before + node < limit for node in range(width)]
            rows += [
                (slot, before + node, token) if usable[node] else (0, 0, token)
                for node, token in enumerate([text.tokens[-1], *path])
            ]
            ids, features, select = ids + drawn, [*features, made], [*select, i * width + right]
            text.tokens += drawn[: right + 1]
            text.features = torch.cat([text.features[:before], made[: right + 1]])
            text.cells = before + right + 1
        most = np.array([place + 1 + self.random.randrange(TOKENS) for _, place, _ in rows], np.int32)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            num_tokens=len(rows),
            req_pool_indices=ints([slot for slot, _, _ in rows]),
            positions=ints([place for _, place, _ in rows]),
            seq_lens=ints([place + 1 for _, place, _ in rows]),
            input_ids=ints([token for _, _, token in rows]),
            seq_lens_cpu=most,
        )
        self.advance(slots, batch, width, ids, torch.cat(features), select)

    def advance(
        self, slots: list[int], batch: ForwardBatch, width: int, ids: Any, features: Tensor, select: Any
    ) -> None:
        """Have tokens drafted, and compare the distribution of each with the oracle."""
        drawn: list[Tensor] = []

        def draw(logits: Tensor, depth: int) -> Tensor:
            assert depth == len(drawn) + 1
            drawn.append(torch.log_softmax(logits, -1))
            return ints([self.token() for _ in slots])

        lengths = [self.texts[slot].cells for slot in slots]
        limits = [self.limit(slot) for slot in slots]
        wanted = next(self.wanted)
        rows = DraftRows(
            batch,
            width,
            ints(ids),
            features if self.case.width else None,
            torch.as_tensor(np.asarray(select, np.int32)),
            ints(slots),
            ints(lengths),
            ints(limits),
            np.array([length + self.random.randrange(TOKENS) for length in lengths], np.int32),
            np.array(limits, np.int32),
            draw,
            wanted,
        )
        with torch.inference_mode():
            found = self.drafter.advance(self.planted(rows))
        assert found.shape == (len(slots), wanted) and found.dtype is torch.int32
        for row, slot in enumerate(slots):
            self.proposals[slot] = found[row].tolist() + [self.token() for _ in range(TOKENS - wanted)]
            if wanted:
                self.compare(slot, torch.stack([each[row] for each in drawn]))

    def planted(self, rows: DraftRows) -> DraftRows:
        """The rows passed to the drafter; a defect changes them."""
        return rows

    def compare(self, slot: int, found: Tensor) -> None:
        """Compare every draft token with KV cells for all of its forwards."""
        text = self.texts[slot]
        first = self.drafter.lookahead + 1
        within = min(len(found), max(self.limit(slot) - text.cells + first - 1, first - 1))
        wanted = self.case.dense(text.tokens, text.features[: text.cells], self.proposals[slot][: TOKENS - 1])
        assert torch.equal(found[:within].isinf(), wanted[:within].isinf())
        worst = (found[:within] - wanted[:within]).nan_to_num().abs().max() if within else 0.0
        assert worst < TOLERANCE, f"slot {slot} at {text.cells} cells: {worst}"
        self.compared += within


def play(desk: Desk, rounds: int = 4) -> None:
    """Prefill in chunks of 1 to 7 tokens, with one prompt that shares a prefix; verify with every
    number of accepted draft tokens; reuse a slot."""
    rng = desk.random
    desk.admit(1, rng.randrange(8, 20))
    desk.admit(2, rng.randrange(1, 12))
    while waiting := {s: len(t.tokens) - t.cells for s, t in desk.texts.items() if s not in desk.proposals}:
        desk.prompts({slot: min(rng.randrange(1, 8), left) for slot, left in waiting.items()})
    desk.admit(3, desk.texts[1].cells + 3, like=1)
    while 3 not in desk.proposals:
        left = len(desk.texts[3].tokens) - desk.texts[3].cells
        desk.prompts({3: min(rng.randrange(1, 8), left)})
    for turn in range(rounds):
        slots = rng.sample([1, 2, 3], rng.randrange(1, 4)) if turn else [1, 2, 3]
        desk.verify({slot: (turn + slot) % (TOKENS + 1) if turn < 2 else rng.randrange(TOKENS + 1) for slot in slots})
    del desk.proposals[2]
    desk.admit(2, 5, like=3)
    desk.prompts({2: 5 - desk.texts[2].cells})
    desk.verify({2: TOKENS, 1: 0})
    desk.verify({1: TOKENS, 2: 1, 3: 2})


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", CASES)
def test_proposals_are_drawn_of_what_a_forward_from_scratch_gives(cases, kind: str, page_size: int) -> None:
    desk = Desk(cases[kind], page_size, seed=11 + page_size)
    play(desk)
    assert desk.compared > 40


class SkipsVerified(FeatureDrafter):
    """Keeps the KV that it wrote for its own draft tokens; only the row of the last accepted token
    is rewritten."""

    def take_in(self, rows: DraftRows) -> Tensor:
        batch = rows.batch
        if batch.forward_mode.is_decode:
            kept = torch.zeros_like(batch.positions)
            kept[rows.select] = 1
            slots, places = batch.req_pool_indices * kept, batch.positions * kept
            batch = replace(batch, req_pool_indices=slots, positions=places, seq_lens=places + 1)
        return super().take_in(replace(rows, batch=batch))


class KeepsRejected(Desk):
    """Lengths still count a rejected token."""

    def planted(self, rows: DraftRows) -> DraftRows:
        if rows.width == 1:
            return rows
        return replace(rows, lengths=rows.lengths + 1)


class ShiftedFeatures(Desk):
    """Each token is joined with the feature of the token itself instead of the one before."""

    def planted(self, rows: DraftRows) -> DraftRows:
        assert rows.features is not None
        return replace(rows, features=rows.features.roll(-1, 0))


class WrongTail(Desk):
    """The last token of a chunk is always followed by a drawn token, also when the prompt goes
    on."""

    def planted(self, rows: DraftRows) -> DraftRows:
        if rows.width > 1 or len(rows.select):
            return rows
        ids = rows.ids.clone()
        ids[-1] = 5
        return replace(rows, ids=ids)


class StaleRoots(StandaloneDrafter):
    """The KV of the verified rows is not rewritten: the last draft token was never run, so it has
    none."""

    def take_in(self, rows: DraftRows) -> Tensor:
        roots = rows.ids.index_select(0, rows.select)
        if not rows.batch.forward_mode.is_decode:
            return super().take_in(rows)
        return self.run(self.decode(rows, roots, 0))


@pytest.mark.parametrize(
    "defect", [KeepsRejected, ShiftedFeatures, WrongTail, SkipsVerified], ids=lambda each: each.__name__
)
def test_a_defect_of_what_features_are_joined_with_shows(cases, defect: type) -> None:
    case = cases["eagle3"]
    if issubclass(defect, Desk):
        desk = defect(case, 4, seed=15)
    else:
        runner = make_drafter(case, 4).runner
        desk = Desk(case, 4, 15, defect(runner, TOKENS, case.model.project))
    with pytest.raises(AssertionError, match="cells"):
        play(desk)


@pytest.mark.parametrize("defect", [KeepsRejected, StaleRoots], ids=lambda each: each.__name__)
def test_a_defect_of_a_model_without_features_shows(cases, defect: type) -> None:
    case = cases["standalone"]
    desk = (
        defect(case, 4, seed=15)
        if issubclass(defect, Desk)
        else Desk(case, 4, 15, defect(make_drafter(case, 4).runner, TOKENS))
    )
    with pytest.raises(AssertionError, match="cells"):
        play(desk)


class WritesOnce(StandaloneDrafter):
    """Checks that no KV cell of a slot is written twice in one forward: which write stays would
    depend on the device."""

    def run(self, batch: ForwardBatch) -> Tensor:
        if batch.forward_mode.is_decode:
            cells = [
                cell for cell in zip(batch.req_pool_indices.tolist(), batch.positions.tolist(), strict=True) if cell[0]
            ]
            assert len(set(cells)) == len(cells), "a cell is written twice"
        return super().run(batch)


class RunsRejected(WritesOnce):
    """The rows after the accepted tokens write to their KV cells too, and so overwrite the
    root's."""

    def _with_roots(self, rows: DraftRows, roots: Tensor) -> ForwardBatch:
        made, verified = super()._with_roots(rows, roots), rows.batch.num_tokens
        made.req_pool_indices[:verified] = rows.batch.req_pool_indices
        made.positions[:verified] = rows.batch.positions
        return made


def test_what_was_rejected_takes_no_cell_from_the_root(cases) -> None:
    runner = make_drafter(cases["standalone"], 4).runner
    play(Desk(cases["standalone"], 4, 15, WritesOnce(runner, TOKENS)))
    with pytest.raises(AssertionError, match="written twice"):
        play(Desk(cases["standalone"], 4, 15, RunsRejected(runner, TOKENS)))


@pytest.mark.parametrize("kind", ["eagle3", "standalone"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_bounds_of_lengths_stay_within_the_page_table(cases, kind: str, page_size: int, monkeypatch) -> None:
    """A library reads as many pages as the host says, also where a text ends with the table."""
    desk, bounds = Desk(cases[kind], page_size, seed=15), list[int]()
    runner = desk.drafter.runner
    decode = desk.drafter.decode

    def watched(*given: Any) -> ForwardBatch:
        made = decode(*given)
        assert made.seq_lens_cpu is not None
        bounds.extend(made.seq_lens_cpu.tolist())
        return made

    monkeypatch.setattr(desk.drafter, "decode", watched)
    desk.admit(1, CONTEXT - 12)
    desk.prompts({1: CONTEXT - 12})
    while desk.texts[1].cells < CONTEXT - 1:
        desk.verify({1: 1})
    assert max(bounds) == runner.attn_backend.req_to_token_pool.max_tokens

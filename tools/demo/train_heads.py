"""Trains a draft head of the demo model and writes it into the model's folder: python -m
tools.demo.train_heads mtp --minutes 10; also eagle3, dflash, mtp-layers.

A head learns the target's softmax, unrolled over the depths of drafting or in blocks after random
tokens, on generated text and on text that the target writes, greedily and at temperature 1. The
learning rate follows CPU time.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglcore import LLM
from tools.demo.acceptance import TEMPERATURES, Text, asked, encoded, held_out, record, tau, walks, written
from tools.demo.dflash import MASK, SIZE, DFlash, load_dflash, save_dflash
from tools.demo.heads import (
    Eagle3,
    Head,
    NextToken,
    load_eagle3,
    load_next_token,
    load_target,
    read,
    save_eagle3,
    save_next_token,
)
from tools.demo.layers import FOLDER as LAYERS
from tools.demo.layers import NextTokenLayers, load_layers, save_layers
from tools.demo.model import Decoder, DemoConfig
from tools.demo.text import document, long_document
from tools.demo.train_model import IGNORED, OUTPUT, Packer, Progress, learning_rate, make_optimizers

DEPTHS = 4
DEPTH_WEIGHT = 0.8
DRAFT_VOCAB = 1024
EAGLE3_INTERMEDIATE = 512
DFLASH_LAYERS, DFLASH_INTERMEDIATE = 2, 384
LAYERS_INTERMEDIATE = 384
TOKENS_A_BLOCK = 4
"""A row of N tokens trains N / TOKENS_A_BLOCK blocks."""
BLOCK_DECAY = 4.0
CHECKED = 4

Batches = Iterator[tuple[Tensor, Tensor]]


def training_texts(llm: LLM, tokenizer: Tokenizer, seed: int, count: int) -> list[list[int]]:
    """Return `count` documents that the target was not trained on, cut at a random point and
    continued by the target: half greedily, half at temperature 1."""
    prompts = []
    for index in range(count):
        rng = random.Random(f"heads:{seed}:{index}")
        make = long_document if index % 10 == 0 else document
        ids = encoded(tokenizer, make(seed + 1, index).text)
        prompts.append(ids[: max(1, int(len(ids) * rng.uniform(0.02, 0.5)))])
    half = count // 2
    params = [*asked(half, 0.0, 256, to_the_end=False), *asked(count - half, 1.0, 256, to_the_end=False)]
    return [text.ids for text in written(llm, prompts, params)]


class TextPacker(Packer):
    """Packs rows in which every second short document is one that the target wrote."""

    def __init__(self, tokenizer: Tokenizer, seed: int, texts: Sequence[list[int]]) -> None:
        super().__init__(tokenizer, seed, Progress())
        self.texts = texts

    def tokens(self, index: int, is_long: bool) -> list[int]:
        """Return the token ids of one document."""
        if index % 2 or is_long:
            return super().tokens(index, is_long)
        return self.texts[index // 2 % len(self.texts)]


def batches(packer: Packer, rows: int, length: int) -> Batches:
    """Yield batches without end; every twelfth has rows of 1,024 tokens, the model's maximum."""
    while True:
        for _ in range(11):
            yield packer.batch(rows, length, False)
        yield packer.batch(rows * length // 1024, 1024, True)


def draft_ids(texts: Sequence[list[int]], vocab_size: int) -> Tensor:
    """Return the `DRAFT_VOCAB` most frequent ids in the texts, ascending: int64[V_d]."""
    counts = torch.bincount(torch.tensor([token for ids in texts for token in ids]), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values


def unrolled_loss(head: Head, target: Decoder, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy against the target's softmax on the draft vocabulary, in nats:
    the sum over depths with weights DEPTH_WEIGHT**depth. Positions where the target's most likely
    token is not in the draft vocabulary do not count."""
    features, logits = read(head, target, ids)
    wanted = logits[:, 1:].float()
    can_draft = torch.isin(wanted.argmax(-1), head.ids) & (targets[:, 1:] != IGNORED)
    p = wanted[..., head.ids].softmax(-1)
    total = torch.zeros(())
    for depth, drafted in enumerate(head.drafts(target, ids, features, DEPTHS)):
        counts = can_draft.clone()
        counts[:, :depth] = False
        q = drafted[counts].float().log_softmax(-1)
        total = total + DEPTH_WEIGHT**depth * -(p[counts] * q).sum(-1).mean()
    return total


def block_loss(head: DFlash, target: Decoder, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy against the target's softmax in blocks after random tokens, in nats:
    a weighted mean with weights by position in the block (arXiv 2602.06036, section 4)."""
    features, logits = read(head, target, ids)
    rows, length = ids.shape
    roots = torch.rand(rows, length - SIZE).argsort(1)[:, : length // TOKENS_A_BLOCK] + 1
    row, cells = torch.arange(rows)[:, None, None], roots[..., None] + torch.arange(SIZE - 1)
    counts = targets[row, cells] != IGNORED
    q = head.blocks(target, ids, features, roots)[counts].float().log_softmax(-1)
    p = logits[row, cells][counts].float().softmax(-1)
    weights = torch.exp(-torch.arange(SIZE - 1) / BLOCK_DECAY).expand(counts.shape)[counts]
    return -((p * q).sum(-1) * weights).sum() / weights.sum()


class HeadTrainer:
    """One training run: a head, its optimizers and its CPU time."""

    def __init__(self, head: Head, target: Decoder, minutes: float, rate: float) -> None:
        self.head, self.target, self.minutes, self.rate = head, target, minutes, rate
        head.begin(target)
        self.optimizers = make_optimizers(head, rate)
        self.seconds, self.steps, self.tokens, self.loss = 0.0, 0, 0, math.nan

    def step(self, ids: Tensor, targets: Tensor) -> None:
        """Make one update; sets `loss` to the loss before it."""
        begun = time.process_time()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(self.seconds / (60 * self.minutes), self.rate)
        with torch.autocast("cpu", torch.bfloat16):
            if isinstance(self.head, DFlash):
                loss = block_loss(self.head, self.target, ids, targets)
            else:
                loss = unrolled_loss(self.head, self.target, ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += int((targets != IGNORED).sum())
        self.loss = float(loss.detach())
        self.seconds += time.process_time() - begun

    def run(self, source: Batches, checks: Sequence[Sequence[Text]]) -> None:
        """Train for `minutes` of CPU time, and print progress after each tenth of it."""
        for tenth in range(1, 11):
            while self.seconds < 6 * self.minutes * tenth:
                self.step(*next(source))
            self.report(checks)

    def report(self, checks: Sequence[Sequence[Text]]) -> None:
        """Print one line of progress."""
        taus = [round(tau(walks(self.head, self.target, texts)), 3) for texts in checks]
        place = {"step": self.steps, "minutes": round(self.seconds / 60, 2), "tokens": self.tokens}
        print(json.dumps({**place, "loss": round(self.loss, 3), "tau": taus}), flush=True)


AnyHead = Eagle3 | NextToken | NextTokenLayers | DFlash


def make_head(kind: str, tokenizer: Tokenizer, texts: Sequence[list[int]]) -> AnyHead:
    """Make an untrained head; EAGLE-3's draft vocabulary comes from these texts."""
    vocab_size, mask = tokenizer.get_vocab_size(), tokenizer.token_to_id(MASK)
    config = DemoConfig(vocab_size=vocab_size)
    if kind == "dflash":
        assert mask is not None
        return DFlash(replace(config, layers=DFLASH_LAYERS, intermediate=DFLASH_INTERMEDIATE), mask)
    if kind == "mtp":
        return NextToken(config)
    if kind == LAYERS:
        return NextTokenLayers(replace(config, layers=DEPTHS, intermediate=LAYERS_INTERMEDIATE))
    return Eagle3(replace(config, intermediate=EAGLE3_INTERMEDIATE), draft_ids(texts, vocab_size))


def ship(head: AnyHead, folder: Path) -> AnyHead:
    """Write the head's files; returns the head as loaded from them."""
    if isinstance(head, DFlash):
        save_dflash(head, folder)
        return load_dflash(folder)
    if isinstance(head, Eagle3):
        save_eagle3(head, folder)
        return load_eagle3(folder)
    if isinstance(head, NextTokenLayers):
        save_layers(head, folder)
        return load_layers(folder)
    save_next_token(head, folder)
    return load_next_token(folder)


def arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("eagle3", "mtp", "dflash", LAYERS))
    parser.add_argument("--minutes", type=float, default=10.0, help="processor time of the training alone")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--texts", type=int, default=6000, help="texts that the target writes to train on")
    parser.add_argument("--folder", type=Path, default=OUTPUT, help="folder of the target, where the head goes")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Train, write and measure a head; with one thread, so that CPU time is training time."""
    given = arguments(words)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    tokenizer = Tokenizer.from_file(str(given.folder / "tokenizer.json"))
    target, prompts = load_target(given.folder), held_out(tokenizer)
    with LLM(str(given.folder)) as llm:
        texts = training_texts(llm, tokenizer, given.seed, given.texts)
        tests = [written(llm, list(prompts.values()), asked(len(prompts), temperature)) for temperature in TEMPERATURES]
    head = make_head(given.kind, tokenizer, texts)
    trainer = HeadTrainer(head, target, given.minutes, given.rate)
    source = batches(TextPacker(tokenizer, given.seed, texts), given.rows, given.length)
    trainer.run(source, [part[:CHECKED] for part in tests])
    record(given.folder, given.kind, ship(head, given.folder), target, list(prompts), tests)


if __name__ == "__main__":
    main(sys.argv[1:])

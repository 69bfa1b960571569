"""Trains the demo model that sglcore ships, from this repository alone: python -m
tools.demo.train_model --minutes 40.

Writes the folder of a Llama model that transformers can load. The learning rate follows the clock,
so that its schedule completes at any speed of the machine; --resume continues from the last
checkpoint. On a busy machine set OMP_WAIT_POLICY=PASSIVE.
"""

import argparse
import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo.model import DemoConfig, DemoModel, save_model
from tools.demo.text import long_document
from tools.demo.text.corpus import document
from tools.demo.tokenizer import make_tokenizer, save_tokenizer

OUTPUT = Path(__file__).resolve().parents[2] / "sglcore" / "assets" / "demo"
IGNORED = -100
WARM_UP = 0.02
FLOOR = 0.01

Optimizers = tuple[torch.optim.Optimizer, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a run. `length` in tokens; `minutes` of wall-clock time."""

    seed: int
    minutes: float
    rows: int
    length: int
    rate: float
    long_every: int


@dataclass(slots=True)
class Progress:
    """Progress of a run; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    next_document: int = 0


class Packer:
    """Fills rows with whole documents, drawn one after the other from a seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int, progress: Progress) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.progress = progress
        self.bos = tokenizer.encode("").ids[0]

    def tokens(self, index: int, is_long: bool) -> list[int]:
        """Return the token ids of one document. One in ten has no <|bos|> and one in twenty has
        two, so that the model tolerates both."""
        make = long_document if is_long else document
        ids = self.tokenizer.encode(make(self.seed, index).text, add_special_tokens=False).ids
        chance = random.Random(f"bos:{self.seed}:{index}").random()
        return ids[1:] if chance < 0.1 else [self.bos, *ids] if chance > 0.95 else ids

    def row(self, length: int, is_long: bool) -> list[int]:
        """Return up to `length` + 1 tokens: first a long document if `is_long`, then whole
        documents while they fit."""
        found: list[int] = []
        misses = 0
        while misses < 3:
            ids = self.tokens(self.progress.next_document, is_long and not found)
            self.progress.next_document += 1
            if len(found) + len(ids) > length + 1:
                misses += 1
                continue
            found += ids
        return found

    def batch(self, rows: int, length: int, is_long: bool) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each [rows, length] int64; targets of padding are IGNORED."""
        inputs = torch.zeros(rows, length, dtype=torch.int64)
        targets = torch.full((rows, length), IGNORED, dtype=torch.int64)
        for place in range(rows):
            ids = torch.tensor(self.row(length, is_long))
            inputs[place, : len(ids) - 1] = ids[:-1]
            targets[place, : len(ids) - 1] = ids[1:]
        return inputs, targets


def batches(packer: Packer, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end; every `long_every`-th has rows of 1,024 tokens, the maximum."""
    while True:
        is_long = packer.progress.step % plan.long_every == plan.long_every - 1
        rows, length = (plan.rows * plan.length // 1024, 1024) if is_long else (plan.rows, plan.length)
        yield packer.batch(rows, length, is_long)


def learning_rate(done: float, peak: float) -> float:
    """Return the rate after the fraction `done` (0 to 1) of the time: linear warm-up, then a cosine
    down to `FLOOR` times `peak`."""
    if done < WARM_UP:
        return peak * (done + 0.001) / (WARM_UP + 0.001)
    phase = min(1.0, (done - WARM_UP) / (1 - WARM_UP))
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * phase)))


def make_optimizers(model: nn.Module, rate: float) -> Optimizers:
    """Return Muon for the layers' matrices and AdamW for gains and token embeddings; their updates
    have the same RMS."""
    of_tokens = ("embed_tokens.weight", "lm_head.weight")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.endswith(of_tokens)]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or name.endswith(of_tokens)]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True)


def save_checkpoint(folder: Path, model: DemoModel, optimizers: Optimizers, progress: Progress) -> None:
    """Write everything that --resume needs; the old checkpoint is replaced when the new one is
    complete."""
    folder.mkdir(parents=True, exist_ok=True)
    states = [optimizer.state_dict() for optimizer in optimizers]
    state = {"model": model.state_dict(), "optimizers": states, "progress": asdict(progress)}
    torch.save(state, folder / "new.pt")
    (folder / "new.pt").replace(folder / "last.pt")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of the run in `folder`. Raises FileNotFoundError if there is no run to
    resume."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"found no checkpoint in {folder}, wanted one to resume; leave out --resume or name the folder with --work"
        )
    return Tokenizer.from_file(str(path))


def load_checkpoint(folder: Path, model: DemoModel, optimizers: Optimizers) -> Progress:
    """Restore a run from its folder."""
    state = torch.load(folder / "last.pt")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


class Trainer:
    """One training run: model, optimizers, progress and folders."""

    def __init__(self, plan: Plan, output: Path, work: Path, resume: bool, compiled: bool) -> None:
        self.plan, self.output, self.work = plan, output, work
        self.tokenizer = load_tokenizer(work) if resume else make_tokenizer(plan.seed)
        self.config = DemoConfig(vocab_size=self.tokenizer.get_vocab_size())
        torch.manual_seed(plan.seed)
        self.model = DemoModel(self.config)
        self.optimizers = make_optimizers(self.model, plan.rate)
        self.progress = load_checkpoint(work, self.model, self.optimizers) if resume else Progress()
        self.is_stopping = False
        self.loss = torch.compile(self.model.loss, dynamic=False) if compiled else self.model.loss

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Make one update; returns the loss before it."""
        done = self.progress.seconds / (self.plan.minutes * 60)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(done, self.plan.rate)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += int((targets != IGNORED).sum())
        return float(loss.detach())

    def stop(self, number: int, frame: FrameType | None) -> None:
        """End after the current step, with a checkpoint; the handler of SIGTERM and SIGINT."""
        self.is_stopping = True

    def save(self) -> None:
        """Write the model folder and the checkpoint."""
        save_tokenizer(self.tokenizer, self.output, self.config.max_positions)
        save_model(self.model, self.tokenizer, self.output)
        save_tokenizer(self.tokenizer, self.work, self.config.max_positions)
        save_checkpoint(self.work, self.model, self.optimizers, self.progress)

    def run(self) -> None:
        """Train until the time is over, with a progress line every 50 steps and a checkpoint every
        5 minutes."""
        self.save()
        source = batches(Packer(self.tokenizer, self.plan.seed, self.progress), self.plan)
        before, saved, recent = time.monotonic(), self.progress.seconds, []
        while self.progress.seconds < self.plan.minutes * 60 and not self.is_stopping:
            recent.append(self.step(*next(source)))
            now = time.monotonic()
            self.progress.seconds += now - before
            before = now
            if self.progress.step % 50 == 0:
                self.report(recent)
                recent.clear()
            if self.progress.seconds - saved > 300:
                self.save()
                saved = self.progress.seconds
        self.save()

    def report(self, losses: list[float]) -> None:
        """Print one line of progress."""
        speed = self.progress.tokens / max(self.progress.seconds, 1e-9)
        row = {
            "step": self.progress.step,
            "minutes": round(self.progress.seconds / 60, 2),
            "loss": round(sum(losses) / len(losses), 4),
        }
        print(json.dumps({**row, "tokens": self.progress.tokens, "tokens_per_second": round(speed)}), flush=True)


def arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="wall-clock time of the whole run")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--long-every", type=int, default=12, help="every how many batches rows have 1,024 tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the finished model")
    parser.add_argument("--work", type=Path, default=Path("demo_training"), help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Train and write the model folder."""
    given = arguments(words)
    torch.set_num_threads(given.threads)
    plan = Plan(given.seed, given.minutes, given.rows, given.length, given.rate, given.long_every)
    trainer = Trainer(plan, given.output, given.work, given.resume, not given.no_compile)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, trainer.stop)
    trainer.run()


if __name__ == "__main__":
    main(sys.argv[1:])

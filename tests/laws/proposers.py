"""All drafters over one tiny target: for each a checkpoint with its draft, and the expected
class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.runtime import speculative
from sglcore.runtime.speculative.block_drafts import BlockDrafter
from sglcore.runtime.speculative.chain_drafts import FeatureDrafter, StandaloneDrafter
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.frozen_drafts import FrozenDrafter
from sglcore.runtime.speculative.mtp_drafts import MultiHeadDrafter
from sglcore.runtime.speculative.ngram_drafts import NgramDrafter
from sglcore.runtime.speculative.tree import DraftTree
from sglcore.runtime.speculative.tree_drafts import FrozenTreeDrafter, StandaloneTreeDrafter, TreeDrafter
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.checkpoints import llama, save
from tests.drafts import TARGET, dflash, eagle, eagle3, next_token, next_tokens
from tests.frozen_drafts import frozen
from tests.laws.engine import TokenEngine
from tests.laws.speculation.test_speculative_laws import CONTEXT, VOCABULARY
from tests.laws.speculation.test_speculative_laws import run as run_texts
from tests.laws.speculation.texts import SAMPLING, Ran

TOKENS, BLOCK = 3, 5
TREE = MappingProxyType({"draft_width": 3, "draft_depth": 3, "draft_tokens": 7})


@dataclass(frozen=True)
class Proposer:
    """A drafter: its `kind` in the settings, its class, whether it drafts trees, and whether a step
    always waits for the one before. `make(target, folder)` saves a target with its draft, and
    returns the draft in dense torch if it is a model."""

    kind: str
    drafter: type
    make: Callable[[Any, Path], Any] = save
    is_tree: bool = False
    waits: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an engine with this drafter."""
        return {"speculative": self.kind, **(TREE if self.is_tree else {"draft_tokens": TOKENS})}


def _beside(make: Callable[[Any, Path], Any]) -> Callable[[Any, Path], Any]:
    return lambda target, folder: make(target, save(target, folder) / "draft")


def _standalone(target: Any, folder: Path) -> Any:
    oracle = llama(max_position_embeddings=CONTEXT, vocab_size=VOCABULARY, hidden_size=32)
    save(target, folder)
    save(oracle, folder / "draft")
    return oracle


_EAGLE, _EAGLE3 = _beside(eagle), _beside(eagle3)
_KINDS = ("full_attention", "full_attention")
_FROZEN = _beside(lambda target, folder: frozen(target, folder, _KINDS, 12, 12))


def _mtp(target: Any, folder: Path) -> Any:
    return next_token(target, folder, llama)


PROPOSERS: Mapping[str, Proposer] = MappingProxyType(
    {
        "ngram": Proposer("ngram", NgramDrafter),
        "suffix": Proposer("suffix", NgramDrafter, waits=True),
        "standalone": Proposer("standalone", StandaloneDrafter, _standalone),
        "standalone, trees": Proposer("standalone", StandaloneTreeDrafter, _standalone, is_tree=True),
        "eagle": Proposer("eagle", FeatureDrafter, _EAGLE),
        "eagle, trees": Proposer("eagle", TreeDrafter, _EAGLE, is_tree=True),
        "eagle3": Proposer("eagle3", FeatureDrafter, _EAGLE3),
        "eagle3, trees": Proposer("eagle3", TreeDrafter, _EAGLE3, is_tree=True),
        "mtp": Proposer("mtp", FeatureDrafter, _mtp),
        "mtp, trees": Proposer("mtp", TreeDrafter, _mtp, is_tree=True),
        "mtp of several layers": Proposer("mtp", MultiHeadDrafter, lambda t, f: next_tokens(t, f, llama, TOKENS)),
        "frozen-mtp": Proposer("frozen-mtp", FrozenDrafter, _FROZEN),
        "frozen-mtp, trees": Proposer("frozen-mtp", FrozenTreeDrafter, _FROZEN, is_tree=True),
        "dflash": Proposer("dflash", BlockDrafter, _beside(lambda t, f: dflash(t, f, BLOCK))),
    }
)


def drafter_classes() -> set[type]:
    """Return every class of the package that can be a drafter: not abstract, no protocol, and with
    a method `advance`."""
    found = set[type]()
    for module in pkgutil.iter_modules(speculative.__path__, f"{speculative.__name__}."):
        classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        found |= {each for _, each in classes if "advance" in dir(each) and each.__module__ == module.name}
    return {each for each in found if not inspect.isabstract(each) and Protocol not in each.__bases__}


@dataclass
class Proposers:
    """A checkpoint of each drafter, made at its first use, and engines over them."""

    folder: Path
    target: Any = field(default_factory=lambda: llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY))
    made: dict[str, tuple[Path, Any]] = field(default_factory=dict)
    engines: list[TokenEngine] = field(default_factory=list)

    def of(self, name: str) -> tuple[Path, Any]:
        """Return a drafter's checkpoint, and its draft in dense torch."""
        if name not in self.made:
            folder = self.folder / name.replace(", ", "-").replace(" ", "-")
            self.made[name] = folder, PROPOSERS[name].make(self.target, folder)
        return self.made[name]

    def engine(self, name: str, **settings: Any) -> TokenEngine:
        """Start an engine with a drafter."""
        (folder, _), own = self.of(name), PROPOSERS[name]
        where = {"draft_model": str(folder / "draft")} if (folder / "draft").is_dir() else {}
        self.engines.append(TokenEngine(folder, **{**own.settings, **where, **settings}))
        return self.engines[-1]

    def plain(self) -> TokenEngine:
        """Start an engine without draft tokens."""
        self.engines.append(TokenEngine(self.of("ngram")[0], graph="off"))
        return self.engines[-1]

    def close(self) -> None:
        """Close all engines that were made; may be called again."""
        while self.engines:
            self.engines.pop().worker.close()


def proposers_fixture() -> Any:
    """Make a module's fixture `proposers`: all drafters; their engines are closed after the
    module's last test."""

    @pytest.fixture(scope="module")
    def proposers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proposers]:
        made = Proposers(tmp_path_factory.mktemp("proposers"))
        yield made
        made.close()

    return proposers


def plain_fixture(samplings: Sequence[dict[str, Any]] = SAMPLING) -> Any:
    """Make a module's fixture `plain`: the results of all prompts without draft tokens, with these
    sampling parameters."""

    @pytest.fixture(scope="module")
    def plain(proposers: Proposers) -> Ran:
        return run_texts(proposers.plain(), samplings=samplings)

    return plain


class Steered:
    """A drafter with correct tokens put into a random number of its draft tokens, so that every
    number of accepted tokens occurs. Waits for the device, which no real drafter does."""

    def __init__(self, inner: Any, chance: Any = None) -> None:
        """`chance`: a numpy random generator; default_rng(0) if None."""
        self.inner = inner
        self.chance = chance or np.random.default_rng(0)
        self.requests, self.texts = list[Request](), list[list[int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, texts: Sequence[list[int]], requests: list[Request]) -> None:
        """Use these requests, with these texts as their future results."""
        self.texts, self.requests = list(texts), requests

    def advance(self, rows: DraftRows) -> Tensor:
        """See `Drafter.advance`."""
        found = self.inner.advance(rows)
        chain = [[*range(found.shape[1])]] * len(found)
        return self.steer(rows, found, chain)

    def grow(self, rows: DraftRows) -> DraftTree:
        """See the tree drafters' `grow`."""
        tree = self.inner.grow(rows)
        return tree._replace(tokens=self.steer(rows, tree.tokens, tree.parents.tolist()))

    def steer(self, rows: DraftRows, tokens: Tensor, parents: list[list[int]]) -> Tensor:
        """Put correct tokens on a path from the root, for a random number of steps."""
        by_slot = {each.run.slot: text for each, text in zip(self.requests, self.texts, strict=True)}
        steered = tokens.tolist()
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            following, own, at = by_slot.get(slot, [])[length + 1 :], steered[row], 0
            for token in following[: self.chance.integers(rows.wanted + 1)]:
                children = [n for n, parent in enumerate(parents[row]) if parent == at and own[n] >= 0]
                if not children:
                    break
                chosen = next((n for n in children if own[n] == token), self.chance.choice(children))
                own[chosen], at = token, int(chosen) + 1
        return torch.tensor(steered, dtype=torch.int32).view(tokens.shape).to(tokens.device)


class InFlight(RecordingWorker):
    """Also records the largest number of steps that were submitted and not collected."""

    most = now = 0

    @classmethod
    def of(cls, engine: TokenEngine) -> Self:
        """Watch the worker of an engine from now on."""
        made = cls(engine.worker)
        engine.loop.worker, made.paths = made, engine.paths
        return made

    def submit(self, batch: ScheduleBatch) -> Ticket:
        self.now += 1
        self.most = max(self.most, self.now)
        return super().submit(batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        self.now -= 1
        return super().collect(ticket)

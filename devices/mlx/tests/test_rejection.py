"""Tests of the acceptance rules that keep the distribution of texts: results are those of the torch
runtime's rules with the same random numbers, and greedy text is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import TokenEngine
from devices.mlx.tests.sampling_rows import make_state
from devices.mlx.tests.speculating import Ran, check_same, run
from devices.mlx.tests.test_draft_texts import SETTINGS, opened, prompts
from sglcore.engine.start import embedded_model
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore_mlx.sampling.sampler import Sampler
from sglcore_mlx.speculative import rejection
from sglcore_mlx.speculative.rejection import RULES, Chain, DraftRejectionStepper, RejectionStepper

if find_spec("torch") is not None:
    import torch

    from sglcore.conformance.inputs.sampling_state import make_state as torch_state
    from sglcore.runtime.speculative.rejection import RULES as TORCH_RULES
    from sglcore.runtime.speculative.rejection import Chain as TorchChain
    from sglcore.runtime.speculative.rejection import draw_coins as torch_coins
    from sglcore.sampling.sampler import Sampler as TorchSampler

VOCAB, DRAFTS, ROWS = 40, 4, 64
GREEDY = [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.4}, *[{"temperature": 0.0}] * 5]
DRAWN = [{"temperature": 1.0, "seed": seed, "top_p": 0.95, "top_k": 60} for seed in range(7)]
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=9),
    SamplingParams(temperature=1.2, top_p=0.8, min_p=0.02),
)


class Case:
    """Logits of a target and a draft that resembles it, and chains drawn from the draft."""

    def __init__(self, seed: int, is_certain: bool) -> None:
        rng = np.random.default_rng(seed)
        self.logits = rng.normal(0, 2.5, (ROWS, DRAFTS + 1, VOCAB)).astype(np.float32)
        draft = self.logits[:, :DRAFTS] + rng.normal(0, 1.0, (ROWS, DRAFTS, VOCAB)).astype(np.float32)
        laws = np.exp(draft - draft.max(-1, keepdims=True))
        laws /= laws.sum(-1, keepdims=True)
        ends = np.cumsum(laws, -1)
        self.tokens = (rng.random((ROWS, DRAFTS, 1)) * ends[..., -1:] > ends).sum(-1).astype(np.int32)
        count = rng.integers(0, DRAFTS + 1, ROWS)
        self.offered = np.arange(DRAFTS) < np.where(rng.random(ROWS) < 0.7, DRAFTS, count)[:, None]
        self.lengths = rng.integers(3, 90, ROWS).astype(np.int32)
        self.laws = None if is_certain else laws.astype(np.float32)
        self.host = SamplingBatch.from_params([(PARAMS[row % 4], 1000 * seed + row) for row in range(ROWS)])

    def here(self, rule: str) -> list[np.ndarray]:
        """Return accepted draft tokens, the tokens after them, and bad rows."""
        laws = None if self.laws is None else mx.array(self.laws)
        return [np.array(each) for each in RULES[rule](Sampler(VOCAB)).verify(*self.given(laws))]

    def given(self, laws: mx.array | None) -> tuple[mx.array, Any, Chain]:
        """Return the arguments of `Rejection.verify`."""
        offered = mx.array(self.offered.astype(np.int8)).astype(mx.bool_)
        chain = Chain(mx.array(self.tokens), offered, mx.array(self.lengths), laws)
        return mx.array(self.logits), make_state(self.host, mx.array(self.lengths)), chain

    def there(self, rule: str) -> list[np.ndarray]:
        """Return the same from the torch runtime."""
        laws = None if self.laws is None else torch.from_numpy(self.laws)
        tokens, offered, lengths = map(torch.from_numpy, (self.tokens, self.offered, self.lengths))
        state = torch_state(self.host, torch.from_numpy(self.lengths), None, None)
        found = TORCH_RULES[rule](TorchSampler(VOCAB, "cpu")).verify(
            torch.from_numpy(self.logits), state, TorchChain(tokens, offered, lengths, laws)
        )
        return [each.numpy() for each in found]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_is_accepted_as_by_torch(seed: int, rule: str, is_certain: bool) -> None:
    case = Case(seed, is_certain)
    for mine, theirs in zip(case.here(rule), case.there(rule), strict=True):
        assert np.array_equal(mine, theirs)
    assert len(set(case.here(rule)[0].tolist())) > 2


@pytest.mark.needs("torch")
def test_random_numbers_are_torchs() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (9, 2)).astype(np.int32)
    lengths = np.arange(9, dtype=np.int32) * 7
    found = np.array(rejection.draw_coins(mx.array(words), mx.array(lengths), 5))
    assert np.array_equal(found, torch_coins(torch.from_numpy(words), torch.from_numpy(lengths), 5).numpy())


class NoShare(rejection.BlockRejection):
    """The target's distribution is not scaled where a block ends."""

    def _accepted(self, *given: Any) -> Any:
        accepted, share = super()._accepted(*given)
        return accepted, mx.ones_like(share)


class NoRest(rejection.Rejection):
    """A rejected token is replaced by one of the target's whole distribution."""

    def _rest(self, target: mx.array, draft: mx.array, share: mx.array) -> mx.array:
        return target


class AcceptsLikely(rejection.Rejection):
    """A draft token is accepted if the target prefers it to the draft's."""

    def _of_token(self, *given: Any) -> Any:
        target, draft = super()._of_token(*given)
        return target, (draft > target).astype(mx.float32) * 2


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rule, defect", [("block", NoShare), ("rejection", NoRest), ("rejection", AcceptsLikely)])
def test_a_defect_of_a_rule_is_caught(rule: str, defect: Any) -> None:
    differences = 0
    for seed in range(4):
        case = Case(seed, is_certain=False)
        assert case.laws is not None
        found = defect(Sampler(VOCAB)).verify(*case.given(mx.array(case.laws)))
        pairs = zip(found, case.there(rule), strict=True)
        differences += sum(not np.array_equal(np.array(mine), theirs) for mine, theirs in pairs)
    assert differences


@pytest.fixture(scope="module")
def greedy() -> Iterator[Ran]:
    """Greedy results without speculation."""
    with TokenEngine(embedded_model(), **SETTINGS) as engine:
        yield run(engine, prompts(), GREEDY)


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "dflash", "standalone", "mtp-layers"])
def test_greedy_text_is_as_without_draft_tokens(greedy: Ran, kind: str, rule: str, graph: str) -> None:
    with opened(kind, speculative_verify=rule, graph=graph) as engine:
        stepper = engine.worker._stepper  # type: ignore[attr-defined]
        assert type(stepper) is (RejectionStepper if kind == "ngram" else DraftRejectionStepper)
        check_same(run(engine, prompts(), GREEDY, stagger=2, chunk=16), greedy)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "mtp-layers"])
def test_drawn_text_is_that_of_the_processors_device(kind: str, rule: str) -> None:
    found: list[Ran] = []
    for device in ("mlx", "cpu"):
        with opened(kind, device=device, speculative_verify=rule) as engine:
            found.append(run(engine, prompts(), DRAWN, overlap=False))
    mine, theirs = found
    # A random number between two probabilities that differ by rounding alone may decide otherwise.
    assert sum(one == other for one, other in zip(mine.tokens, theirs.tokens, strict=True)) >= len(DRAWN) - 1
    assert abs(mine.accepted - theirs.accepted) <= 3
    assert mine.accepted > (0 if kind == "ngram" else 40)


@pytest.mark.parametrize("rule", list(RULES))
def test_a_text_depends_on_no_other_request(rule: str) -> None:
    with opened("eagle3", speculative_verify=rule) as engine:
        together = run(engine, prompts(), DRAWN, stagger=3)
        for place in (0, 4):
            alone = run(engine, prompts()[place : place + 1], DRAWN[place : place + 1])
            assert alone.tokens == together.tokens[place : place + 1]


def laws_of_the_next_request(patch: pytest.MonkeyPatch) -> None:
    """A request's draft tokens are compared with another request's distributions."""
    right = DraftRejectionStepper._probs_of

    def turned(self: Any, count: int) -> mx.array:
        laws = right(self, count)
        assert laws is not None
        return mx.concatenate([laws[1:], laws[:1]])

    patch.setattr(DraftRejectionStepper, "_probs_of", turned)


def noise_of_the_target(patch: pytest.MonkeyPatch) -> None:
    """Draft tokens are drawn with the noise of the target's draws."""
    patch.setattr(rejection, "step_words", lambda words, lengths, domain: words)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("defect", [laws_of_the_next_request, noise_of_the_target], ids=lambda each: each.__name__)
def test_a_defect_of_a_step_is_caught(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("eagle3", device="cpu", speculative_verify="rejection") as engine:
        wanted = run(engine, prompts(), DRAWN, overlap=False)
    defect(monkeypatch)
    with opened("eagle3", speculative_verify="rejection") as engine:
        found = run(engine, prompts(), DRAWN, overlap=False)
    assert sum(one == other for one, other in zip(found.tokens, wanted.tokens, strict=True)) < len(DRAWN) - 1


def test_distributions_of_other_requests_are_kept_alone() -> None:
    with opened("eagle3", speculative_verify="rejection") as engine:
        run(engine, prompts(), DRAWN, stagger=3)
        laws = engine.worker._stepper._draft_probs  # type: ignore[attr-defined]
        newest = max(len(made) for made, _ in laws.values())
        assert sum(len(made) for made in {id(made): made for made, _ in laws.values()}.values()) <= len(laws) + newest

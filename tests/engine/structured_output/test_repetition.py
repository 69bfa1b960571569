"""The DRY sampler, compared with a search by hand: in any text, token by token, after rollbacks,
from the start or the middle, and in whole texts with transformers."""

from __future__ import annotations

import random
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from sglcore import LLM, SamplingParams
from sglcore.engine.structured_output import repetition_penalty as module
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Repetition
from tests.planted import planted

CODEC = TextCodec(Path(str(files("sglcore") / "assets" / "demo")))
LETTERS = [CODEC.encode(letter, special=False)[0] for letter in ("a", "b", ".", "c", "\n")]
VOCABULARY = Vocabulary(CODEC.tokenizer, 4096, (2,))

KEPT = module.KEPT_STEPS
TAKEN_BACK = (1, 1, 2, 3, KEPT - 1, KEPT, KEPT + 1, 2 * KEPT + 3)
"""Numbers of tokens to roll back: fewer than the kept steps, equal, and more."""


def by_hand(tokens: list[int], asked: Repetition) -> dict[int, float]:
    """Return the DRY penalty of each token that would continue a repetition."""
    texts = [CODEC.token(token) for token in tokens]
    ends = np.cumsum([0, *map(len, texts)])
    whole = "".join(texts)
    found = [
        place + len(word) for word in asked.breakers for place in range(len(whole)) if whole.startswith(word, place)
    ]
    broken = [any(begin < end <= after for end in found) for begin, after in pairwise(ends)]
    first = max(len(tokens) - asked.last_n, 0) if asked.last_n > 0 else 0
    lost: dict[int, float] = {}
    for place in range(first + 1, len(tokens)):
        same = 0
        while (
            place - 1 - same >= first
            and not broken[len(tokens) - 1 - same]
            and tokens[place - 1 - same] == tokens[len(tokens) - 1 - same]
        ):
            same += 1
        if same >= max(asked.allowed_length, 1) and not any(word in texts[place] for word in asked.breakers):
            loss = asked.multiplier * asked.base ** (same - asked.allowed_length)
            lost[tokens[place]] = max(lost.get(tokens[place], 0.0), loss)
    return lost


def some(rng: random.Random) -> Repetition:
    breakers = rng.choice([(), (".",), ("\n", "ab"), ("ab.",)])
    return Repetition(0.8, 1.75, rng.choice((1, 2, 3)), rng.choice((-1, -1, 7, 20)), breakers)


def check(matcher: Any, tokens: list[int], asked: Repetition) -> None:
    ids, values = matcher.change()
    wanted = by_hand(tokens, asked)
    assert ids.dtype == np.int32 and values.dtype == np.float32
    assert sorted(wanted) == ids.tolist(), tokens
    assert np.allclose(values, [-wanted[token] for token in ids.tolist()], rtol=1e-6)


def law(found_in: Any = module, seeds: int = 60) -> None:
    for seed in range(seeds):
        rng = random.Random(seed)
        asked, tokens = some(rng), rng.choices(LETTERS[: rng.choice((2, 3, 5))], k=rng.randint(1, 30))
        rules = found_in.RepetitionRules(asked, VOCABULARY, None)
        matcher = rules.start(np.array(tokens, np.int32))
        check(matcher, tokens, asked)
        for _ in range(rng.randint(0, 40)):
            if len(tokens) > 3 and rng.random() < 0.3:
                count = rng.choice(TAKEN_BACK)
                more = rng.choices(LETTERS[:3], k=count)
                assert all(matcher.accept(token) for token in more)
                check(matcher, tokens + more, asked)
                matcher.rollback(count)
                if rng.random() < 0.5:
                    check(matcher, tokens, asked)
            else:
                tokens.append(rng.choice(LETTERS[:3]))
                assert matcher.accept(tokens[-1])
        check(matcher, tokens, asked)
        check(rules.start(np.array(tokens, np.int32)), tokens, asked)


def test_what_repeats_is_found_token_by_token_and_at_once() -> None:
    law()


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("np.minimum(found.lengths, found.places - start)", "found.lengths"),
        ("lengths >= asked.allowed_length", "lengths > asked.allowed_length"),
        ("self._count -= count", "pass"),
        ("self._found.pop()", "pass"),
        ("range(min(count, len(self._found)))", "range(min(count, 15))"),
        ("known.places[where[within]] == places[within]", "known.places[where[within]] >= places[within]"),
        ("max(begin - len(word) + 1, 0)", "0"),
        ("np.maximum.at(longest, owner", "np.minimum.at(longest, owner"),
        ("going = going[going >= back]", "pass"),
        ("is_breaker(int(token))", "is_breaker(int(token)) or True"),
        ("(longest[kept] - asked.allowed_length)", "longest[kept]"),
    ],
)
def test_the_law_catches_a_planted_defect(sound: str, defect: str) -> None:
    broken = planted(module, sound, defect)
    with pytest.raises((AssertionError, IndexError)):
        law(broken, 200)


def test_long_repetitions_count_up_to_a_bound_and_nothing_is_infinite() -> None:
    asked = Repetition(1000.0, 1000.0, 1, -1, ())
    matcher = module.RepetitionRules(asked, VOCABULARY, None).start(np.full(2000, LETTERS[0], np.int32))
    for _ in range(module.KEPT_STEPS + 4):
        assert matcher.accept(LETTERS[0])
    assert matcher.change()[1].tolist() == [np.float32(-module.MOST)]
    matcher.rollback(module.KEPT_STEPS + 2)
    assert matcher._matches().lengths.max() == module.LONGEST_MATCH


class ByHand(LogitsProcessor):
    """DRY by the search by hand, as a logits processor of transformers."""

    def __init__(self, asked: Repetition) -> None:
        self._asked = asked

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for token, lost in by_hand(input_ids[0].tolist(), self._asked).items():
            scores[0, token] -= lost
        return scores


def test_whole_texts_are_those_of_transformers_with_a_search_by_hand(llm: LLM, oracle: Any) -> None:
    prompts = ["The fox ran. The fox ran. The fox", "Once upon a time"]
    strong = SamplingParams(
        temperature=0.0,
        max_tokens=40,
        ignore_eos=True,
        dry_multiplier=3.0,
        dry_allowed_length=1,
        dry_sequence_breakers=(".",),
    )
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = strong.repetition
    assert asked is not None and plain.repetition is None
    outputs = llm.generate([prompts[0], prompts[1], prompts[0]], [strong, strong, plain])
    for output in outputs[:2]:
        ids = output.prompt_token_ids
        with torch.no_grad():
            wanted = oracle.generate(
                torch.tensor([ids]),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([ByHand(asked)]),
            )
        assert output.outputs[0].token_ids == wanted[0, len(ids) :].tolist()
    assert outputs[2].outputs[0].token_ids != outputs[0].outputs[0].token_ids
    assert outputs[2].outputs[0].token_ids == llm.generate(prompts[0], plain)[0].outputs[0].token_ids


def test_a_text_of_any_length_is_kept() -> None:
    """More tokens than there is room for at first, with and without a prompt."""
    asked = Repetition(1.0, 2.0, 2, -1, ())
    for prompt in (0, module.LEAST_ROOM + 3):
        tokens = [LETTERS[place % 3] for place in range(prompt + 3 * module.LEAST_ROOM + 1)]
        matcher = module.RepetitionRules(asked, VOCABULARY, None).start(np.array(tokens[:prompt], np.int32))
        assert all(matcher.accept(token) for token in tokens[prompt:])
        ids, lost = matcher.change()
        assert ids.tolist() == [LETTERS[len(tokens) % 3]] and lost[0] < -1e20

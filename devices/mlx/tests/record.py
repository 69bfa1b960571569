"""Records the CPU device's results on the embedded model in float32, for machines without torch.

python devices/mlx/tests/record.py # writes recorded/embedded.json.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglcore.engine.llm import LLM
from sglcore.engine.outputs import RequestOutput
from sglcore.sampling.params import SamplingParams

FILE = Path(__file__).parent / "recorded" / "embedded.json.gz"
TOKENS = 200
"""Tokens of each greedy completion."""

PROMPTS = ("Once upon a time", "One morning, Rosa found a", "Leo was a brave boy who")
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its parameters, as `SamplingParams` takes them."""

    prompt: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: its text, its tokens with log-probabilities, and its finish reason."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish: str


def greedy() -> list[Question]:
    """Return questions with greedy sampling."""
    return [Question(prompt, {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}) for prompt in PROMPTS]


def sampled() -> list[Question]:
    """Return questions with random sampling: each parameter alone, and several together."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.6, "seed": 2**63 + 5},
        {"temperature": 1.3, "top_k": 12, "seed": 3},
        {"temperature": 1.0, "top_p": 0.85, "seed": 4},
        {"temperature": 1.1, "min_p": 0.08, "seed": 5},
        {"temperature": 1.0, "repetition_penalty": 1.3, "seed": 6},
        {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "seed": 7},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logit_bias": {20: 4.0, 300: -100.0, 45: 1.5}, "seed": 8},
        {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": (10, 11, 12, 13, 14, 15, 16), "seed": 9},
        {"temperature": 1.0, "n": 3, "seed": 10},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.3, "n": 2, "seed": 11},
    )
    common = {"max_tokens": 40}
    return [Question(PROMPTS[index % len(PROMPTS)], {**common, **kind}) for index, kind in enumerate(kinds)]


def answer(llm: LLM, questions: Sequence[Question]) -> list[list[Answer]]:
    """Run all questions together and return the completions of each. Waits."""
    params = [SamplingParams(**question.params, logprobs=0) for question in questions]
    return [_answers(output) for output in llm.generate([question.prompt for question in questions], params)]


def _answers(output: RequestOutput) -> list[Answer]:
    found: list[Answer] = []
    for completion in output.outputs:
        logprobs = [round(entry.logprob, DIGITS) for entry in completion.logprobs or ()]
        found.append(Answer(completion.text, completion.token_ids, logprobs, str(completion.finish_reason)))
    return found


def write(answers: Mapping[str, Sequence[Sequence[Answer]]], file: Path = FILE) -> None:
    """Write the answers by kind; equal answers give equal bytes."""
    text = json.dumps({kind: [[asdict(one) for one in each] for each in found] for kind, found in answers.items()})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(file: Path = FILE) -> dict[str, list[list[Answer]]]:
    """Read what `write` wrote."""
    values = json.loads(gzip.decompress(file.read_bytes()))
    return {kind: [[Answer(**one) for one in each] for each in found] for kind, found in values.items()}


def differences(found: Sequence[Sequence[Answer]], wanted: Sequence[Sequence[Answer]], tolerance: float) -> list[str]:
    """Describe how answers differ: in a token, in the text, in the finish reason, or by more than
    the tolerance in a log-probability."""
    told: list[str] = []
    for place, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            reason = _difference(one, other, tolerance)
            told += [f"prompt {place}, sample {index}: {reason}"] if reason else []
    return told


def _difference(one: Answer, other: Answer, tolerance: float) -> str:
    for place, (token, wanted) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if token != wanted:
            return f"token {place} is {token}, wanted {wanted}"
        error = abs(one.logprobs[place] - other.logprobs[place])
        if not error <= tolerance:
            return f"the log-probability of token {place} differs by {error:.3g}"
    mine, theirs = (one.text, one.finish, len(one.token_ids)), (other.text, other.finish, len(other.token_ids))
    return "" if mine == theirs else f"{mine}, wanted {theirs}"


def main() -> None:
    """Run the CPU device and write the file."""
    with LLM(device="cpu", dtype="float32", threads=1) as llm:
        write({"greedy": answer(llm, greedy()), "sampled": answer(llm, sampled())})
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

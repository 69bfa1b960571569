"""Measures how many draft tokens of a head the demo model accepts, on text that it writes after
held-out prompts.

A draft token is accepted if it equals the token that the model draws. One pass over a written text,
with the engine's sampler and noise, therefore gives the steps that the engine would make.
`acceptance.json` in the model's folder holds the results.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglcore import LLM, SamplingParams
from sglcore.sampling.gumbel_race import RaceTables, draw_race, gaps_below_best, make_race_tables, row_keys
from sglcore.sampling.noise import fixed_scale, seed_words
from tools.demo.heads import Head, read
from tools.demo.model import Decoder
from tools.demo.text import document

RECORD = "acceptance.json"
DRAFTS = 4
BLOCK_DRAFTS = 7
"""Draft tokens of heads that draft a block at once; these are also measured with full blocks."""
SPLIT, SEED, PROMPTS = "test", 1001, 64
PROMPT, WRITTEN = 32, 128
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of `prompt` tokens, and its continuation by the model at `temperature` with
    `seed`."""

    ids: list[int]
    prompt: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Walk:
    """The verification steps over one text, and by depth how many draft tokens were reached and how
    many were accepted (`right`)."""

    tokens: int
    steps: int
    reached: list[int]
    right: list[int]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a document; its text includes the special tokens."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def held_out(tokenizer: Tokenizer, count: int = PROMPTS) -> dict[int, list[int]]:
    """Return, by document number, the first PROMPT tokens of the first `count` documents of the
    test split that have at least 2 * PROMPT tokens."""
    found: dict[int, list[int]] = {}
    index = 0
    while len(found) < count:
        ids = encoded(tokenizer, document(SEED, index, SPLIT).text)
        if len(ids) >= 2 * PROMPT:
            found[index] = ids[:PROMPT]
        index += 1
    return found


def asked(count: int, temperature: float, most: int = WRITTEN, to_the_end: bool = True) -> list[SamplingParams]:
    """Return sampling parameters for `count` prompts: exactly `most` tokens, or with `to_the_end`
    false at most until the end token. The seed is the index."""
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=most, ignore_eos=to_the_end)
        for seed in range(count)
    ]


def written(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Text]:
    """Let the model continue the prompts. Waits."""
    outputs = llm.generate(prompts, params)
    return [
        Text([*prompt, *output.outputs[0].token_ids], len(prompt), each.temperature, output.outputs[0].seed)
        for prompt, each, output in zip(prompts, params, outputs, strict=True)
    ]


def drawn(logits: Tensor, text: Text, tables: RaceTables) -> Tensor:
    """Return the tokens that the engine would draw, int[cells], from logits float32[cells, V] of
    the text's third and later tokens."""
    if not text.temperature:
        return logits.argmax(-1)
    cells = len(logits)
    words = torch.from_numpy(seed_words(np.array([text.seed], np.uint64), np.zeros(1, np.int64)))
    keys = row_keys(words.expand(cells, 2), torch.arange(2, cells + 2, dtype=torch.int32))
    scale = torch.full((cells,), float(fixed_scale(text.temperature)))
    return draw_race(gaps_below_best(logits, logits.amax(-1), scale), keys, tables)


@torch.no_grad()
def hits(head: Head, target: Decoder, text: Text, drafts: int = DRAFTS) -> np.ndarray:
    """Return bool[drafts, cells]: whether the draft token for a position, at each depth, is the
    text's token."""
    ids = torch.tensor([text.ids])
    vocab_size = target.embed_tokens.num_embeddings
    tables = make_race_tables(vocab_size, ids.device)
    features, _ = read(head, target, ids)
    found = []
    for drafted in head.drafts(target, ids, features, drafts):
        logits = torch.full((ids.shape[1] - 2, vocab_size), float("-inf"))
        logits.index_copy_(1, head.ids, drafted[0, :-1].float())
        found.append(drawn(logits, text, tables) == ids[0, 2:])
    return torch.stack(found).numpy()


def walk(hit: np.ndarray, prompt: int) -> Walk:
    """Simulate verification over one text, given bool[drafts, cells]. The first written token comes
    from the prefill; the last step ends with the text."""
    drafts, last = hit.shape[0], hit.shape[1] + 1
    reached, right = [0] * drafts, [0] * drafts
    root, steps = prompt, 0
    while root < last:
        accepted, is_right = 0, True
        while is_right and accepted < min(drafts, last - root):
            is_right = bool(hit[accepted, root - 1 + accepted])
            reached[accepted] += 1
            right[accepted] += is_right
            accepted += is_right
        root += accepted + 1
        steps += 1
    return Walk(last - prompt, steps, reached, right)


def walks(head: Head, target: Decoder, texts: Sequence[Text], drafts: int = DRAFTS) -> list[Walk]:
    """Return the walk of each text."""
    return [walk(hits(head, target, text, drafts), text.prompt) for text in texts]


def tau(found: Sequence[Walk]) -> float:
    """Return tokens per verification step, including the model's own."""
    return sum(one.tokens for one in found) / sum(one.steps for one in found)


def measured(found: Sequence[Walk]) -> dict[str, object]:
    """Return the record of a head at one temperature: `tau`, the accepted share of reached draft
    tokens `by_depth`, and the `steps` of each prompt."""
    reached, right = (np.sum([getattr(one, name) for one in found], axis=0) for name in ("reached", "right"))
    shares = [round(float(share), 4) for share in right / np.maximum(reached, 1)]
    return {"tau": round(tau(found), 3), "by_depth": shares, "steps": [one.steps for one in found]}


def measured_head(kind: str, head: Head, target: Decoder, texts: Sequence[Text]) -> dict[str, object]:
    """Return `measured` of a head; for DFlash also `longer`: that with full blocks, by number of
    draft tokens."""
    found = measured(walks(head, target, texts))
    if kind != "dflash":
        return found
    return found | {"longer": {str(BLOCK_DRAFTS): measured(walks(head, target, texts, BLOCK_DRAFTS))}}


def record(
    folder: Path, kind: str, head: Head, target: Decoder, documents: Sequence[int], texts: Sequence[Sequence[Text]]
) -> None:
    """Write a head's part of the record; `texts` has one list for each of `TEMPERATURES`."""
    path = folder / RECORD
    known = json.loads(path.read_text()) if path.exists() else {"heads": {}}
    own = {
        str(temperature): measured_head(kind, head, target, part)
        for temperature, part in zip(TEMPERATURES, texts, strict=True)
    }
    found = {
        "drafts": DRAFTS,
        "prompts": {"split": SPLIT, "seed": SEED, "tokens": PROMPT, "documents": list(documents)},
        "written": WRITTEN,
        "heads": {**known["heads"], kind: own},
    }
    path.write_text(json.dumps(found) + "\n")

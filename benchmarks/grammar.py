"""Host cost of grammars: compilation, one request's mask, and a step of the embedded model with all
requests constrained.

The large vocabulary is the embedded tokenizer's plus random pairs of its tokens, up to LARGE
tokens, a size that today's models have.

    python benchmarks/grammar.py [--rows 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from results import machine, write_results
from tokenizers import Tokenizer

from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import embedded_model, start
from sglcore.engine.structured_output.grammar_cache import BACKENDS, GrammarBackend, open_grammars
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.tokenizers.text_codec import TextCodec, eos_token_ids
from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop

LARGE = 128_000
STEPS = 150
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = MappingProxyType(
    {
        "schema": Grammar("json_schema", json.dumps(PERSON)),
        "any object": Grammar("json_object"),
        "words": Grammar("regex", "[a-z]+( [a-z]+)*"),
    }
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds to compile; microseconds to fill one mask (median and 99th percentile) and to
    accept one token (median)."""

    compile_ms: float
    fill_us: float
    fill_p99_us: float
    accept_us: float


def larger(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Return the tokenizer with random pairs of its tokens added, up to `size` tokens."""
    rng, saved = np.random.default_rng(0), json.loads(tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    special = {token["id"] for token in saved["added_tokens"]}
    pieces = [text for text, token in vocabulary.items() if token not in special]
    while len(vocabulary) < size:
        first, second = (pieces[place] for place in rng.integers(0, len(pieces), 2))
        if first + second not in vocabulary:
            vocabulary[first + second] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(saved))


def measure(backend: GrammarBackend, grammar: Grammar, size: int) -> Cost:
    """Measure one grammar with random walks of allowed tokens."""
    backend.compile(Grammar("regex", "x"))
    begin = time.perf_counter()
    compiled = backend.compile(grammar)
    compile_ms = (time.perf_counter() - begin) * 1e3
    words, rng = np.zeros(-(-size // 32), dtype=np.int32), np.random.default_rng(1)
    fills, accepts = [], []
    for _ in range(6):
        matcher = compiled.start()
        for _ in range(60):
            first = time.perf_counter()
            matcher.fill(words)
            fills.append(time.perf_counter() - first)
            bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:size])
            token = int(rng.choice(bits))
            first = time.perf_counter()
            if token == 2 or not matcher.accept(token):
                break
            accepts.append(time.perf_counter() - first)
    return Cost(
        compile_ms,
        float(np.median(fills)) * 1e6,
        float(np.percentile(fills, 99)) * 1e6,
        float(np.median(accepts)) * 1e6,
    )


def step_ms(rows: int, grammar: Grammar | None, overlap: bool) -> float:
    """Return median milliseconds of a decode step of `rows` requests of the embedded model in
    float32, all constrained by `grammar` (None: free)."""
    started = start(resolve_config({"max_requests": rows, "dtype": "float32", "kv_cache_memory": 256 << 20}, {}))
    codec, limits = TextCodec(started.model_path), started.worker.limits
    eos_ids = frozenset(eos_token_ids(started.model_path))
    vocabulary = Vocabulary(codec.tokenizer, limits.vocab_size, tuple(eos_ids))
    grammars, _ = open_grammars("auto", vocabulary)
    scheduler = Scheduler(limits)
    loop = Loop(scheduler, started.worker, overlap=overlap)
    params = SamplingParams(max_tokens=STEPS + 20, logit_bias=dict.fromkeys(eos_ids, -100.0))
    for index in range(rows):
        request = Request(f"r{index}", np.array(codec.encode("Once upon a time")), params, seed=index)
        if grammar is not None and grammars is not None:
            request.matcher = grammars.compile(grammar).start()
        scheduler.add(request)
    for _ in range(10):
        loop.step()
    steps = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loop.step()
        steps.append(time.perf_counter() - begin)
    assert scheduler.stats().decoding == rows
    loop.drain()
    started.worker.close()
    return float(np.median(steps)) * 1e3


def main() -> None:
    """Measure, print, and with `--json` write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json")
    given = parser.parse_args()
    small = TextCodec(embedded_model()).tokenizer
    found: dict[str, object] = {}
    for size, tokenizer in ((small.get_vocab_size(), small), (LARGE, larger(small, LARGE))):
        for name in BACKENDS:
            grammars, _ = open_grammars(name, Vocabulary(tokenizer, size, (2,)))
            assert grammars is not None
            for title, grammar in GRAMMARS.items():
                cost = measure(grammars.backend, grammar, size)
                found[f"{name}, {size} tokens, {title}"] = {key: round(getattr(cost, key), 2) for key in Cost.__slots__}
                print(
                    f"{name:10} {size:7} {title:10} compile {cost.compile_ms:7.1f} ms, mask {cost.fill_us:7.1f} us",
                    end="",
                )
                print(f" (p99 {cost.fill_p99_us:8.1f}), token {cost.accept_us:5.1f} us")
    for title, grammar, overlap in (
        ("free", None, True),
        ("free, no overlap", None, False),
        ("constrained", GRAMMARS["words"], True),
    ):
        spent = step_ms(given.rows, grammar, overlap)
        found[f"step of {given.rows} rows, {title}"] = round(spent, 3)
        print(f"step of {given.rows} rows, {title}: {spent:.2f} ms")
    if given.json:
        write_results(given.json, {"machine": machine(), "costs": found})


if __name__ == "__main__":
    main()

"""Acceptance of draft tokens by the cached share of the prompt, and by the position in the context.

Neither should matter much. If tokens per step fall with the cached share, the cache lacks the
draft's KV entries; if they fall with the position, the draft reads wrong KV slots. The embedded
model continues held-out texts greedily with four draft tokens per step. Each figure is over all
requests, with its standard error between requests.

    python benchmarks/speculative_acceptance.py [--texts N] [--json FILE] [--png FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from results import machine, write_results

from sglcore import LLM, SamplingParams
from sglcore.engine.outputs import RequestOutput
from tools.demo.text import document, long_document

KINDS = ("ngram", "eagle3", "mtp", "dflash")
DRAFTS, WRITTEN, SEED = 4, 96, 1001
PROMPT, SHARES = 256, (0.0, 0.25, 0.5, 0.75, 1.0)
PLACES = (32, 128, 256, 384, 512, 640, 768, 896)
INK, LINE = "#24221e", "#e5e1d8"
STYLES = {"ngram": ("#6b4fa0", "v"), "eagle3": ("#0b6e63", "o"), "mtp": ("#b3640a", "s"), "dflash": ("#2d6fb0", "D")}


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens per step (`tau`) with standard error, at a cached share or a position (`at`)."""

    at: float
    tau: float
    error: float
    requests: int


def texts(llm: LLM, number: int) -> list[list[int]]:
    """Return `number` texts of held-out documents, concatenated up to PLACES[-1] token ids, which
    leaves room in the context for the WRITTEN tokens."""
    found, indices = [], count()
    most = PLACES[-1]
    for index in range(number):
        text = list(llm.engine.codec.encode(long_document(SEED, index, "test").text, special=False))
        while len(text) < most:
            text += llm.engine.codec.encode(document(SEED, next(indices), "test").text, special=False)
        found.append(text[:most])
    return found


def engine(kind: str, requests: int, is_cached: bool) -> LLM:
    """Make an engine with the embedded model."""
    given = {"speculative": kind, "draft_tokens": DRAFTS, "max_requests": requests, "prefix_cache": is_cached}
    return LLM(device="cpu", **given)


def written(llm: LLM, prompts: Sequence[list[int]], tokens: int = WRITTEN) -> list[RequestOutput]:
    """Continue the prompts greedily by exactly `tokens` tokens."""
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))


def point(at: float, outputs: Sequence[RequestOutput]) -> Point:
    """Return tokens per verification step (a ratio of sums) with its standard error."""
    steps = np.array([output.outputs[0].verified_steps for output in outputs], float)
    tokens = steps + [output.outputs[0].accepted_tokens for output in outputs]
    tau = tokens.sum() / steps.sum()
    error = float(np.sqrt(((tokens - tau * steps) ** 2).sum()) / steps.sum())
    return Point(round(at, 4), round(float(tau), 3), round(error, 3), len(outputs))


def by_cached(kind: str, prompts: Sequence[list[int]]) -> list[Point]:
    """Measure with each share of the prompts in the prefix cache, in a new engine per share."""
    found = []
    for share in SHARES:
        with engine(kind, len(prompts), True) as llm:
            if share:
                written(llm, [prompt[: int(share * len(prompt))] for prompt in prompts], 1)
            outputs = written(llm, prompts)
            cached = sum(output.cached_tokens for output in outputs) / sum(map(len, prompts))
            found.append(point(cached, outputs))
    return found


def by_place(kind: str, whole: Sequence[list[int]]) -> list[Point]:
    """Measure texts that continue after each of PLACES tokens; `at` is the middle of the
    continuation."""
    with engine(kind, len(whole), False) as llm:
        return [point(place + WRITTEN / 2, written(llm, [text[:place] for text in whole])) for place in PLACES]


def save_png(file: Path, found: dict[str, dict[str, list[Point]]]) -> None:
    """Draw both panels. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(sheet)
    panels: Any = sheet.subplots(1, 2, sharey=True)
    labels = {"cached": "share of the prompt from the prefix cache", "place": "position in the context"}
    for panel, (name, label) in zip(panels, labels.items(), strict=True):
        for kind, parts in found.items():
            color, mark = STYLES[kind]
            at, taus, errors = zip(*((each.at, each.tau, each.error) for each in parts[name]), strict=True)
            panel.errorbar(at, taus, errors, color=color, marker=mark, markersize=4, linewidth=1.3, label=kind)
        panel.set_xlabel(label)
        panel.set_ylim(1, DRAFTS + 1)
        panel.grid(True, color=LINE, linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("tokens of a step, 5 at most")
    panels[0].legend(frameon=False, ncols=len(found), loc="upper center", fontsize=8)
    sheet.suptitle(f"Four proposals a step, greedy, {WRITTEN} tokens of each text", fontsize=11, color=INK)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, dpi=110, facecolor="white")


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="draw both; needs matplotlib")
    options = parser.parse_args()
    with engine("off", 1, False) as llm:
        whole = texts(llm, options.texts)
    found = {}
    for kind in KINDS:
        cached = by_cached(kind, [text[:PROMPT] for text in whole])
        found[kind] = {"cached": cached, "place": by_place(kind, whole)}
        print(kind, *(f"\n  {name}: {parts}" for name, parts in found[kind].items()), flush=True)
    if options.json:
        what = {"benchmark": "acceptance by cached share and by position", "drafts": DRAFTS, "written": WRITTEN}
        rows = {
            kind: {name: [asdict(each) for each in points] for name, points in parts.items()}
            for kind, parts in found.items()
        }
        write_results(str(options.json), {**what, "machine": machine(), "figures": rows})
    if options.png:
        save_png(options.png, found)


if __name__ == "__main__":
    main()

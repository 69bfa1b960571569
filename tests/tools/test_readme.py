"""The README's figures equal the stored results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
CASES = (
    ("decode, batch 1 (tokens/s)", "b1", "median", True),
    ("decode, batch 8 (tokens/s)", "b8", "median", True),
    ("decode, batch 32 (tokens/s)", "b32", "median", True),
    ("prompt of 2,048 tokens (tokens/s)", "prefill", "median", True),
    ("32 requests that share 1,024 tokens (s)", "shared", "median", False),
    ("start to the first token (s)", "start", "median", False),
    ("peak memory, batch 1 (GB)", "b1", "peak_gb", False),
)
"""(row of the table, case of the results, compared field, whether more is better)"""
ENGINES = ("sglcore", "vllm", "llama_cpp", "openvino", "transformers")


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def cells(label: str) -> list[str]:
    """The cells of a row of the README's tables, without the first; the best one keeps its
    asterisks."""
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


def measured(case: str, key: str) -> list[float | None]:
    rows = {row["engine"]: row for row in results("cpu_peers_amx.json")["rows"] if row["case"] == case}
    return [rows[engine].get(key) for engine in ENGINES]


def agree(texts: Iterable[str], values: Iterable[float | None]) -> bool:
    """Whether each text is its value, rounded to the shown digits."""
    for text, value in zip(texts, values, strict=True):
        plain = text.strip("*").replace(",", "")
        if (value is None) != (plain == ""):
            return False
        if value is not None and abs(float(plain) - value) > 0.51 * 10 ** -len(plain.partition(".")[2]):
            return False
    return True


@pytest.mark.parametrize(("label", "case", "key", "is_more_better"), CASES)
def test_a_row_of_the_processors_table_is_what_was_measured_and_marks_the_best(
    label: str, case: str, key: str, is_more_better: bool
) -> None:
    texts, values = cells(label), measured(case, key)
    assert agree(texts, values), (texts, values)
    known = [value for value in values if value is not None]
    best = values.index(max(known) if is_more_better else min(known))
    assert [text.startswith("**") for text in texts] == [place == best for place in range(len(texts))]


def test_a_figure_that_is_not_the_measured_one_would_be_seen() -> None:
    assert agree(["26.1", "1,156", ""], [26.08, 1156.0, None])
    assert not agree(["26.2"], [26.08]) and not agree(["1,157"], [1155.9]) and not agree([""], [1.0])
    assert not agree(["1"], [None])


def test_the_versions_of_the_table_are_those_that_ran() -> None:
    (head,) = re.findall(r"\| \| (sglcore .*?) \|\n", README)
    shown = dict(re.findall(r"(sglcore|vLLM|llama\.cpp|OpenVINO|transformers) ([\d.]+)", head))
    ran = results("cpu_peers_amx.json")["versions"]
    names = {"sglcore": "sglcore", "vLLM": "vllm", "llama.cpp": "llama_cpp", "OpenVINO": "openvino"}
    names["transformers"] = "transformers"
    assert shown.keys() == names.keys()
    assert all(ran[names[name]].startswith(version) for name, version in shown.items())


def test_the_rows_of_gpus_are_what_was_measured() -> None:
    eight = results("h100/decode_8b.json")["ours"]
    middle = results("h100/decode_8b_graphs_to_64.json")["ours"]
    steps = [1e3 / eight["1"], None, 32e3 / middle["32"], 128e3 / eight["128"]]
    assert agree(cells("sglcore, H100"), steps), steps
    quiet = results("h200/prompt_slices_8b.json")["forms"]["off"]["quiet_p50_ms"]
    rows = results("h200/gpu.json")["parts"]["engine-8B"]["rows"]
    one, few, many = (
        next(row["us"] / 1e3 for row in rows if (row["what"], row["size"]) == ("decode greedy", size))
        for size in (1, 32, 128)
    )
    assert agree(cells("sglcore, H200"), [one, quiet, few, many])

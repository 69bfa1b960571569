"""lm-eval scores a task through the server with the results of the offline engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglcore import LLM, SamplingParams
from tests.serving.conftest import Server

pytestmark = pytest.mark.needs("clients")

DOCS = (
    {"context": "Once upon a time, there was a kind", "endings": ["boy named Max.", "girl", "box of rain"], "label": 0},
    {"context": '"My little seed is a rose now!"\n\nThe', "endings": ["end.", "seed", "bed"], "label": 0},
    {"context": "She lived in a small", "endings": ["city near the market", "moon"], "label": 0},
    {"context": "é ü 漢字", "endings": ["rain", "ü 🙂"], "label": 1},
)
"""The first ending of the second document ends a story, so the token sampled after it is the
end-of-text token."""

TASK = """\
task: endings
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """The log-likelihood of each ending of each document, by the offline engine."""
    with LLM(dtype="float32") as llm:
        return [[_score(llm, doc["context"], f" {ending}") for ending in doc["endings"]] for doc in DOCS]


def _score(llm: LLM, context: str, ending: str) -> float:
    encode = llm.engine.codec.encode
    first, ids = len(encode(context, special=False)), encode(context + ending, special=False)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = llm.generate([ids], params)[0].prompt_logprobs
    assert found is not None
    return sum(item.logprob for item in found[first:] if item is not None)


def test_log_likelihoods_through_lm_eval_are_those_of_the_engine(
    server: Server, expected: list[list[float]], tmp_path: Path
) -> None:
    samples = _run_lm_eval(server, tmp_path)

    scored = {sample["doc_id"]: [float(score[0][0]) for score in sample["resps"]] for sample in samples}
    assert [scored[place] for place in range(len(DOCS))] == [pytest.approx(scores, abs=1e-6) for scores in expected]


def _run_lm_eval(server: Server, folder: Path) -> list[dict[str, Any]]:
    """The samples of the task, over the server's /v1/completions."""
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    data = folder / "endings.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), encoding="utf-8")
    (folder / "endings.yaml").write_text(TASK.format(file=data, cache=folder / "cache"), encoding="utf-8")
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "",
            "base_url": f"{server.url}/v1/completions",
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 1024,
        },
        tasks=["endings"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None and "samples" in results
    return [dict(sample) for sample in results["samples"]["endings"]]

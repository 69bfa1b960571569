"""The engine laws of half precision on this package's device, and the embedded model on it."""

from __future__ import annotations

from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from sglcore_musa import package
from tests.laws.device_engines import *  # noqa: F403


def test_the_embedded_model_speaks() -> None:
    # Small graphs: every capture runs its kernels in Triton's interpreter.
    with LLM(device=package.name, max_requests=2, max_batch_tokens=16, graph_buckets=(1,)) as engine:
        rows = {row.topic: row for row in engine.ledger.rows}
        (output,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=2, temperature=0.0))
    assert rows["attention"].effective in package.attention and rows["extension"].effective.startswith("torch_musa")
    assert output.outputs[0].text

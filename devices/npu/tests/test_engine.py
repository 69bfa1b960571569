"""The engine laws of half precision on this package's device, and the embedded model on it."""

from __future__ import annotations

from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from sglcore_npu import package
from tests.laws.device_engines import *  # noqa: F403


def test_the_embedded_model_speaks() -> None:
    with LLM(device=package.name, kv_cache_memory=8 << 20) as engine:
        rows = {row.topic: row for row in engine.ledger.rows}
        (output,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=4, temperature=0.0))
    assert rows["attention"].effective in package.attention and rows["extension"].effective.startswith("torch_npu")
    assert output.outputs[0].text

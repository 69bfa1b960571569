"""Tests that one file defines an architecture for every library: the example of
docs/add-a-model.md gives the same results with torch and with MLX."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from devices.mlx.tests.model_cases import load, logprobs
from sglcore.core.errors import ConfigError

pytestmark = pytest.mark.needs("torch")

ROOT = Path(__file__).resolve().parents[3]
NAME = "SideBySideForCausalLM"
IDS = tuple(int(token) for token in np.random.default_rng(5).integers(3, 97, 30))
MISSING = """
from sglcore.models.layer_kinds import Architecture


class AsksTooMuch(Architecture):
    def __init__(self, build):
        super().__init__(build)
        build.convolution("conv", 4)

    def __call__(self, batch):
        return batch
"""


def example() -> str:
    """Return the example file of the page."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-model.md").read_text(), re.DOTALL)
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkpoint of the page's architecture; its file can be imported."""
    from tests import checkpoints

    checkpoints.save(checkpoints.CAUSAL["qwen2"](), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [NAME]}))
    (tmp_path / "side_by_side_of_the_page.py").write_text(example())
    (tmp_path / "asks_too_much.py").write_text(MISSING)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "model"


def test_the_page_s_architecture_gives_the_same_numbers_on_both_libraries(folder: Path) -> None:
    from tests.models.steps import Steps
    from tests.models.steps import load as load_torch

    added = {NAME: f"side_by_side_of_the_page:{NAME}"}
    here = logprobs(load(folder, architectures=added), IDS)
    steps = Steps(load_torch(folder, architectures=added))
    there = np.concatenate([steps.logprobs({1: IDS[:19]}).numpy(), steps.logprobs({1: IDS[19:]}).numpy()])
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-4)
    other = logprobs(
        load(folder, architectures={NAME: "sglcore.models.architectures.qwen.qwen2:Qwen2ForCausalLM"}), IDS
    )
    assert np.abs(here - other).max() > 0.01


def test_a_kind_of_layer_that_a_library_lacks_is_refused_by_name(folder: Path) -> None:
    from tests.models.steps import load as load_torch

    added = {NAME: "asks_too_much:AsksTooMuch"}
    for load_one in (load, load_torch):
        with pytest.raises(ConfigError, match=f"{NAME} needs a layer of kind 'convolution', which "):
            load_one(folder, architectures=added)

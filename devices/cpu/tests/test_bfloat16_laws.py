"""The model laws in bfloat16, the dtype that most users run: eager and recorded steps, every
instruction set.

Log-probabilities are compared with transformers' in float32 on the same rounded weights. Rounding
activations to bfloat16 changes them by up to 0.1 or 0.2; a wrong mask, page or row changes them by
1 or more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.selection import Selection
from devices.cpu.tests.native.libraries import KERNELS, emulated, loaded
from sglcore_cpu import bring_up
from sglcore_cpu.choice import load_library
from sglcore_cpu.compile import Variant
from tests.checkpoints import save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import ARCHITECTURES

TOLERANCE = 0.2
SLOWER = ({"kernels": "torch"}, {"kernels": "reference"}, {"attention_backend": "reference"})


class Rounded:
    """A saved checkpoint with weights rounded to bfloat16, and its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.oracle = choosing_all(ARCHITECTURES[name]())
        with torch.no_grad():
            for parameter in self.oracle.parameters():
                parameter.copy_(parameter.bfloat16().float())
        self.folder = save(self.oracle, folder)

    def check(self, **settings: Any) -> set[str]:
        """Run requests of different lengths in chunks, which join late and share prefixes, and
        compare them with the oracle. Returns the paths of the steps."""
        defaults: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_batch_tokens": 24,
            "graph_buckets": (1, 4),
            "poison": True,
        }
        engine = TokenEngine(self.folder, **{**defaults, **settings})
        try:
            prompts = random_prompts(5, (3, 19, 33))
            results = engine.run(prompts, 8, score_prompts=True, stagger=2)
            results += engine.run([prompts[2][:21] + [7, 8, 9], prompts[1]], 8, stagger=1)
        finally:
            engine.worker.close()
        check_logprobs(results, self.oracle, TOLERANCE)
        return engine.paths


def choosing_all(oracle: Any) -> Any:
    """Return the model with every expert chosen for every token, because with fewer a rounding
    could decide which expert is chosen."""
    config = oracle.config
    counts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if not any(counts):
        return oracle
    config.num_experts_per_tok = max(filter(None, counts))
    if getattr(config, "n_group", None):
        config.topk_group = config.n_group
    whole = type(oracle)(config).eval()
    whole.load_state_dict(oracle.state_dict(), strict=False)
    return whole


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rounded]:
    yield Rounded(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("graph", ["off", "native"])
def test_log_probabilities_are_those_of_transformers(rounded: Rounded, graph: str) -> None:
    paths = rounded.check(graph=graph)
    assert any(path.startswith("native") for path in paths) == (graph == "native")


@pytest.mark.parametrize("rounded", ["llama", "qwen3-moe", "gpt-oss"], indirect=True)
def test_two_threads_change_nothing(rounded: Rounded) -> None:
    rounded.check(threads=2)


@pytest.mark.parametrize("name", [one.name for one in Variant().instruction_sets])
def test_every_instruction_set_gives_them(
    rounded: Rounded, name: str, selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instruction sets that the processor does not announce run by emulation, if the whole group
    is run."""
    if name not in load_library().usable():
        if KERNELS not in selection.whole:
            pytest.skip(f"needs a processor with {name}, or the whole group")
        choose = functools.partial(bring_up.choose_kernels, load=lambda: loaded(emulated()))
        monkeypatch.setattr(bring_up, "choose_kernels", choose)
    rounded.check(kernels=name, graph="native")


def test_slower_ways_give_them_too(rounded: Rounded) -> None:
    """Each architecture runs one of the slower settings, in turn."""
    assert rounded.check(**SLOWER[list(ARCHITECTURES).index(rounded.name) % len(SLOWER)]) == {"eager"}


def test_a_wrong_row_would_be_seen(rounded: Rounded) -> None:
    engine = TokenEngine(rounded.folder, dtype="bfloat16", max_batch_tokens=24)
    (result,) = engine.run(random_prompts(6, (12,)), 4, score_prompts=True)
    result.prompt[5] += 1
    with pytest.raises(AssertionError, match="first divergent token"):
        check_logprobs([result], rounded.oracle, TOLERANCE)


def test_cells_of_8_bits_stay_close(rounded: Rounded) -> None:
    rounded.check(kv_cache_dtype="int8", graph="native")

"""Tests two ranks on this machine, over mlx.distributed's ring: the log-probabilities of one rank
and of transformers; however a rank ends, the engine ends with its cause, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.mlx.tests.parity import TokenEngine, check_same, write_tiny
from devices.mlx.tests.rank_defects import DEFECTS, with_defect
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore_mlx.parallel.ranks import compile_apart

ATOL = 1e-4
SETTINGS = {"max_model_len": 64, "page_size": 16, "kv_cache_memory": 4 << 20}


def texts(folder: Path, **settings: Any) -> Any:
    """Run texts in chunks, with neighbours and cached prefixes."""
    first, other, third = random_prompts(5, (41, 6, 19))
    with TokenEngine(folder, **{**SETTINGS, **settings}) as engine:
        session = engine.session(chunk=16, stagger=1)
        found = session.run([first, other, third], 10, score_prompts=True)
        again = session.run([[*first[:32], 3], other], 10, temperature=1.0)
        assert again[0].cached > 0
    return [*found, *again]


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_two_ranks_give_the_tokens_and_log_probabilities_of_one(tmp_path: Path, hybrid: bool, graph: str) -> None:
    folder = write_tiny(tmp_path, hybrid=hybrid)
    check_same(texts(folder, tp=2, graph=graph), texts(folder, graph=graph), ATOL)


def ended(pids: tuple[int, ...]) -> bool:
    """Return whether all these processes have ended; waits for it."""
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_engine_with_its_cause(tmp_path: Path, victim: int) -> None:
    settings: dict[str, Any] = {"tp": 2, **SETTINGS}
    with TokenEngine(write_tiny(tmp_path), **settings) as engine:
        worker: Any = engine.worker
        session = engine.session()
        session.run(random_prompts(1, (5, 9)), 2)
        os.kill(worker.pids[victim], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=rf"rank {victim} \(process \d+\) ended by SIGKILL"):
            session.run(random_prompts(1, (5, 9)), 100)
    assert ended(worker.pids)


def test_ranks_compile_in_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX loads a library while another process still writes it."""
    found: list[str] = []
    for local in (0, 1, 2, 1):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        compile_apart(local)
        found.append(os.environ["TMPDIR"])
    assert found[0] == str(tmp_path) and found[1] == found[3] and len(set(found)) == 3
    assert all(Path(each).stat().st_mode & 0o77 == 0 for each in found[1:])


ENDLESS = """
import signal
import sys
from devices.mlx.tests.parity import TokenEngine
from sglcore.conformance.inputs.prompts import random_prompts
signal.signal(signal.SIGINT, signal.default_int_handler)
with TokenEngine(sys.argv[1], tp=2, max_model_len=128, kv_cache_memory=4 << 20) as engine:
    print(*engine.worker.pids, flush=True)
    while True:
        engine.session().run(random_prompts(1, (5, 9)), 100)
"""
"""A program that runs two ranks until it is interrupted."""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_leader_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDLESS, str(write_tiny(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as leader:
        assert leader.stdout is not None
        pids = tuple(map(int, leader.stdout.readline().split()))
        assert len(pids) == 2
        leader.send_signal(how)
        try:
            leader.wait(60)
        finally:
            leader.kill()
    assert ended(pids)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"speculative": "ngram"}, "different numbers of draft tokens"),
        ({"tp": 4, "dp": 2}, "this device divides tensors only"),
        ({"tp": 3}, "attention heads"),
    ],
)
def test_what_ranks_do_not_support_is_refused(tmp_path: Path, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        texts(write_tiny(tmp_path), **{"tp": 2, **settings})


DIVIDED = (
    "llama-biases-tied",
    "llama-one-kv-head-wide",
    "qwen3-biases-tied",
    "gemma3",
    "phi3",
    "glm4-moe",
    "gpt-oss",
    "qwen2-moe",
    "qwen3-next",
    "lfm2",
    "olmo2",
    "granite-hybrid",
    "granite-hybrid-one-group",
    "nemotron-h-biases",
    "deepseek-v3.2",
    "deepseek-v4",
)
"""Names of `tests.checkpoints.CAUSAL` and of `tests.latent.LATENT`: one for each kind of layer that
ranks divide."""


def saved(name: str, folder: Path) -> Any:
    """Save the transformers model of this name to the folder and return it."""
    from tests.checkpoints import CAUSAL, granite_hybrid, save
    from tests.deepseek_v4 import deepseek_v4
    from tests.latent import LATENT

    more = {"deepseek-v4": deepseek_v4, "granite-hybrid-one-group": lambda: granite_hybrid(mamba_n_groups=1)}
    oracle = {**CAUSAL, **LATENT, **more}[name]()
    save(oracle, folder)
    return oracle


def check(oracle: Any, results: Any) -> None:
    """Compare the log-probabilities of outputs with the transformers model's."""
    from tests.checkpoints import oracle_logprobs

    for result in results:
        assert result.finish == "length"
        text = (*result.prompt, *result.tokens)
        found = oracle_logprobs(oracle, list(text)).numpy()[np.arange(len(text) - 1), text[1:]]
        np.testing.assert_allclose(result.logprobs, found[len(result.prompt) - 1 :], rtol=0, atol=ATOL)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", DIVIDED)
def test_two_ranks_give_the_log_probabilities_of_transformers(tmp_path: Path, name: str) -> None:
    check(saved(name, tmp_path), texts(tmp_path, tp=2))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_ranks_is_caught(tmp_path: Path, defect: str) -> None:
    oracle = saved("llama-biases-tied", tmp_path)
    with pytest.raises(AssertionError, match="tolerance"):
        check(oracle, texts(tmp_path, tp=2, ranks=with_defect(defect)))

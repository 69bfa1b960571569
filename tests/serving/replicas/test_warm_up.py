"""After the warm-up of a device that compiles kernels when they are first used, requests use no
other kernel, and no other form of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import start
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas import warm_up
from tests.checkpoints import llama, qwen3_moe, save

pytestmark = pytest.mark.needs("streams")
Forms = set[tuple[str, tuple[Any, ...]]]
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.1},
    {"min_p": 0.1},
    {"xtc_probability": 0.9},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2, "top_p": 0.5},
    {"logit_bias": {3: 2.0}, "logprobs": 4},
    {"prompt_logprobs": 1, "temperature": 0.0},
)


def form(name: str, value: Any) -> str:
    """What the compiler distinguishes: constants, the types of tensors, and whether a number is 1
    or divisible by 16."""
    if isinstance(value, int) and not isinstance(value, bool) and not name.isupper():
        return "1" if value == 1 else "16n" if value % 16 == 0 else "n"
    return str(getattr(value, "dtype", value))


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Forms:
    """The kernels that were launched, each with the values for which it is compiled."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs the library triton")
    run, found = interpreter.InterpretedFunction.run, Forms()

    def spied(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        apart = kernel.kwargs.get("do_not_specialize") or ()
        values = {name: form(name, value) for name, value in given.items() if name not in apart}
        found.add((kernel.fn.__name__, tuple(sorted(values.items()))))
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", spied)
    return found


MODELS: dict[str, Any] = {
    "dense": lambda: llama(max_position_embeddings=256, num_attention_heads=8, num_key_value_heads=2),
    "experts": lambda: qwen3_moe(max_position_embeddings=256),
}


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TokenEngine]:
    asked = {"model": str(save(MODELS[request.param](), tmp_path)), "device": os.environ["LANE_DEVICE"]}
    sizes: dict[str, Any] = {"dtype": "float32", "max_requests": 4, "kv_cache_memory": 4 << 20}
    started = start(resolve_config({**asked, **sizes}, {}))
    made = TokenEngine(started.worker, frozenset(), overlap=started.overlap)
    yield made
    made.worker.close()


def serve(engine: TokenEngine) -> None:
    """Serve requests of each kind, alone and beside each other, with prompts of several lengths."""
    for number, asked in enumerate(ASKED):
        params = SamplingParams(max_tokens=3, ignore_eos=True, **asked)
        engine.add(f"r{number}", [3 + at % 7 for at in range(5 + 9 * number)], params, seed=number)
        if number % 3 == 2:
            run(engine)
    run(engine)


def run(engine: TokenEngine) -> None:
    while engine.has_work:
        assert not [each.error for each in engine.step() if each.error]


def test_requests_need_no_kernel_that_the_warm_up_has_not_used(engine: TokenEngine, forms: Forms) -> None:
    warm_up.warm_up(engine)
    known = set(forms)
    if not known:
        pytest.skip("needs kernels in Triton")
    serve(engine)
    assert [f"{name}: {dict(form)}" for name, form in sorted(forms - known)] == []


@pytest.mark.parametrize("engine", ["dense"], indirect=True)
def test_a_warm_up_without_draws_of_all_kinds_is_caught(
    engine: TokenEngine, forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "DRAWS", ())
    monkeypatch.setattr(warm_up, "BESIDE_TOKENS", ())
    warm_up.warm_up(engine)
    known = set(forms)
    if not known:
        pytest.skip("needs kernels in Triton")
    serve(engine)
    late = {name for name, _ in forms - known}
    assert {"histogram_kernel", "race_kernel", "extend_kernel"} <= late

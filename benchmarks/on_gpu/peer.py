"""The peer: transformers' model with the same weights, a static cache, sdpa, and a decode step
compiled by torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .engine import prompts
from .made import draw
from .run import Run

WARM = 4
"""Tokens of each request before its steps are timed, including the prefill's token."""
REDUCES = frozenset({"cuda"})
"""Device types for which torch's compiler makes its own graphs ("reduce-overhead")."""


def measure(run: Run) -> None:
    """Report a row for each batch size; for batch size 1 also how many first tokens equal the
    engine's."""
    try:
        import transformers
    except ImportError:
        run.report.skip("peer", "transformers is not installed; wanted 5.17 or later")
        return
    run.report.note(transformers=transformers.__version__, state=run.state())
    with torch.no_grad():
        model = _model(run)
        for batch in run.sizes.peers:
            _decode(run, model, batch)


def _model(run: Run) -> Any:
    """Make the model; `draw` fills its weights on the device, seeded by their checkpoint names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in run.geometry.config(run.sizes.context).items() if name != "model_type"}
    config = AutoConfig.for_model("qwen3", **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    # The constructor makes the rotary frequencies; they are not stored.
    model = model.to_empty(device=run.device).eval()
    rotary = type(model.model.rotary_emb)(config=config)
    model.model.rotary_emb = rotary.to(run.device)
    model.tie_weights()
    for name, weight in model.named_parameters():
        draw(name, weight)
    return model


def _decode(run: Run, model: Any, batch: int) -> None:
    from transformers import StaticCache

    sizes = run.sizes
    cache = StaticCache(config=model.config, max_cache_len=sizes.prompt + sizes.tokens)
    ids = torch.tensor(prompts(batch, sizes.prompt, run.geometry.vocab), device=run.device)

    def step(ids: Tensor) -> Tensor:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    given = [step(ids)]
    begin = time.perf_counter()
    compiled, how = _compiled(run, step)
    try:
        given.append(compiled(given[-1]).clone())
    except Exception as error:
        if not run.is_dry:
            raise
        run.report.skip(
            "a traced step", f"{type(error).__name__}: this build of torch traces nothing for {run.device.type}"
        )
        compiled, how = step, "as it is"
    while len(given) < WARM:
        given.append(compiled(given[-1]).clone())
    run.wait()
    compiling = time.perf_counter() - begin
    count = sizes.tokens - len(given)
    begin = time.perf_counter()
    for _ in range(count):
        given.append(compiled(given[-1]).clone())
    run.wait()
    us = None if run.is_dry else (time.perf_counter() - begin) / count * 1e6
    speed = None if us is None else batch / us * 1e6
    same = _agreement(run, given) if batch == 1 else None
    run.report.row(
        batch=batch, compiled=how, us=us, tokens_a_second=speed, compile_seconds=compiling, first_tokens_alike=same
    )


def _compiled(run: Run, step: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], str]:
    """Compile the step with torch; in a dry run only trace it, because there is no device to
    compile for. Also returns the mode."""
    torch._dynamo.reset()
    if run.is_dry:
        return torch.compile(step, backend="eager", dynamic=False), "traced"
    options: Mapping[str, Any] = {"mode": "reduce-overhead"} if run.device.type in REDUCES else {}
    return torch.compile(step, dynamic=False, **options), options.get("mode", "default")


def _agreement(run: Run, given: list[Tensor]) -> str:
    """Return how many of the first tokens of one prompt equal the engine's."""
    ours = run.earlier.get(f"engine-{run.of}", {}).get("first_tokens")
    if ours is None:
        return "the engine was not measured"
    pairs = list(zip(ours, (int(each[0, 0]) for each in given), strict=False))
    alike = next((place for place, (our, their) in enumerate(pairs) if our != their), len(pairs))
    return f"{alike} of {len(pairs)}"

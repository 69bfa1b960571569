"""Tiny random models of transformers' types, and how far the engine is from their own forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglcore.device.worker import Limits
from sglcore.models.implementation import TRANSFORMERS
from sglcore.models.loader import load_model
from sglcore.models.transformers_config import transformers_config
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from tests.models.steps import PAGE, SLOTS, Steps

LENGTH, OTHER = 40, 23
"""Tokens of the two requests."""
SNAPSHOTS = 4


def tiny_model(kind: str, sizes: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model of a type with random weights, of which none is near nothing, computed by its own eager attention."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def load(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, kernels: KernelTable | None = None
) -> Any:
    """The model, saved, as the engine loads it by transformers' class."""
    model.save_pretrained(folder)
    config = transformers_config(folder)
    found = {config.architecture: TRANSFORMERS}
    kernels = kernels or KernelTable()
    return load_model(folder, config, kernels=kernels, device="cpu", dtype=dtype, architectures=found)


def compare(model: PreTrainedModel, folder: Path, seed: int = 0, kernels: KernelTable | None = None) -> float:
    """The greatest difference of log-probabilities [T, vocab] between a model's own forward and the engine's steps: two
    prompts in random chunks side by side, then their other tokens one by one, and both in one batch. A model with states has
    two forwards of its own, of all tokens at once, and of one after the other from its cache, of which the nearer one counts:
    they are not always one."""
    loaded = load(model, folder, kernels=kernels)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, loaded.config.vocab_size, (length,), generator=generator) for length in (LENGTH, OTHER)]
    found = _by_steps(Steps(loaded), [each.tolist() for each in tokens], generator)
    forwards = (_whole, _cached) if loaded.state_layers else (_whole,)
    wanted = [[forward(model, each) for each in tokens] for forward in forwards]
    return min(max(float((a - b).abs().max()) for a, b in zip(own, found, strict=True)) for own in wanted)


def compare_served(model: PreTrainedModel, folder: Path) -> float:
    """The same of the tokens that the engine's scheduler gets out of a model, against its forward of each text: few slots and
    pages, short chunks, the next step planned ahead, so that prefixes are hit and requests retracted."""
    loaded = load(model, folder)
    limits = Limits(
        max_model_len=48,
        max_requests=SLOTS,
        page_size=PAGE,
        num_pages=16,
        max_batch_tokens=8,
        vocab_size=loaded.config.vocab_size,
        keeps_state=bool(loaded.state_layers),
        num_snapshots=SNAPSHOTS if loaded.state_layers else 0,
    )
    runner = Steps(loaded, SNAPSHOTS).runner
    loop = Loop(Scheduler(limits), TpModelWorker(runner, runner.token_table, limits), overlap=True)
    requests = _serve(loop, loaded.config.vocab_size)
    stats = loop.scheduler.stats()
    assert stats.retractions and stats.hit_tokens, stats
    return max(_error(model, request) for request in requests)


def _serve(loop: Loop, vocab_size: int) -> list[Request]:
    """A prompt, it again with others that branch off from it, and those branches again, to their ends."""
    rng, params = np.random.default_rng(3), SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, max_tokens=14)
    base, *tails = (rng.integers(3, vocab_size, length).astype(np.int32) for length in (21, 3, 7, 18))
    branches = [np.concatenate([base[:13], tail]) for tail in tails]
    done: list[Request] = []
    for prompts in ([base], [base, *branches], branches):
        for prompt in prompts:
            done.append(Request(f"r{len(done)}", prompt, params, seed=0))
            loop.scheduler.add(done[-1])
        while loop.has_work:
            loop.step()
    loop.scheduler.audit()
    return done


def _error(model: PreTrainedModel, request: Request) -> float:
    """Of the log-probabilities of its tokens."""
    assert request.finish_reason == "length", request.error
    prompt, tokens = request.prompt_ids.tolist(), list(request.output_ids)
    wanted = _whole(model, torch.tensor(prompt + tokens))[len(prompt) - 1 : -1]
    chosen = wanted[torch.arange(len(tokens)), torch.tensor(tokens)]
    found = torch.tensor([float(each.chosen[0]) for each in request.logprobs])
    return float((chosen - found).abs().max())


def _whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(tokens[None], use_cache=False).logits[0].float(), dim=-1)


def _cached(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Half of the tokens at once, then each from the model's own cache."""
    half, found, kept = len(tokens) // 2, [], {}
    with torch.no_grad():
        for part in (tokens[:half], *tokens[half:].split(1)):
            out = model(part[None], use_cache=True, **kept)
            kept = {name: out[name] for name in ("past_key_values", "cache_params") if name in out}
            found.append(torch.log_softmax(out.logits[0].float(), dim=-1))
    return torch.cat(found)


def _by_steps(steps: Steps, tokens: list[list[int]], generator: torch.Generator) -> list[Tensor]:
    """Chunks until half of each prompt is done, then single tokens of both."""
    found: list[list[Tensor]] = [[], []]
    done = [0, 0]
    while any(at < len(own) // 2 for at, own in zip(done, tokens, strict=True)):
        sizes = torch.randint(0, 9, (2,), generator=generator).tolist()
        _step(steps, tokens, done, found, sizes)
    while any(at < len(own) for at, own in zip(done, tokens, strict=True)):
        _step(steps, tokens, done, found, [1, 1])
    return [torch.cat(own) for own in found]


def _step(
    steps: Steps,
    tokens: list[list[int]],
    done: list[int],
    found: list[list[Tensor]],
    sizes: list[int],
) -> None:
    given = {row + 1: tokens[row][done[row] : done[row] + size] for row, size in enumerate(sizes)}
    given = {slot: part for slot, part in given.items() if part}
    if not given:
        return
    hidden = steps.hidden(given)
    with torch.inference_mode():
        logprobs = torch.log_softmax(steps.runner.logits(hidden, None), dim=-1)
    for (slot, part), own in zip(given.items(), logprobs.split([len(part) for part in given.values()]), strict=True):
        found[slot - 1].append(own)
        done[slot - 1] += len(part)

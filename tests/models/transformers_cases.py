"""Tiny random models of transformers' types, and how far the engine is from their own forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglcore.models.implementation import TRANSFORMERS
from sglcore.models.loader import load_model
from sglcore.models.transformers_config import transformers_config
from sglcore.runtime.kernels.table import KernelTable
from tests.models.steps import Steps

LENGTH, OTHER = 40, 23
"""Tokens of the two requests."""


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
    """The greatest difference of log-probabilities [T, vocab] between a model's whole forward and the engine's steps: two
    prompts in random chunks side by side, then their other tokens one by one, and both in one batch."""
    loaded = load(model, folder, kernels=kernels)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, loaded.config.vocab_size, (length,), generator=generator) for length in (LENGTH, OTHER)]
    wanted = [_whole(model, each) for each in tokens]
    found = _by_steps(Steps(loaded), [each.tolist() for each in tokens], generator)
    return max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True))


def _whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(tokens[None], use_cache=False).logits[0].float(), dim=-1)


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

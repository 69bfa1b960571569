"""Law of level C2 for devices that return hidden states: each request gets those of its own tokens,
and they are the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import Law, LawBroken, NotApplicable
from sglcore.conformance.laws.laws_runner import BUCKETS, LENGTHS, TOKENS
from sglcore.conformance.mutants import mutants_worker as worker
from sglcore.conformance.session import Result
from sglcore.conformance.target import Target

STATES: Mapping[str, float] = MappingProxyType({"float32": 2e-4, "bfloat16": 0.1, "float16": 0.02})
"""How far a hidden state may be from the reference's, which computes in float32: as a share of the
largest element of the text's states, or of 1."""
AFTER: Sequence[Mapping[str, Any]] = (
    {"return_hidden_states": "all"},
    {"return_hidden_states": "last"},
    {},
)
BEFORE: Sequence[Mapping[str, Any]] = (
    *AFTER[:1],
    {"return_hidden_states": "all", "return_hidden_states_before_norm": True},
    {"return_hidden_states": "last", "return_hidden_states_before_norm": True},
)
"""Parameters of neighbouring requests, so that a step has rows of several kinds."""


def states_belong_to_tokens(trial: Trial) -> None:
    """Run requests for hidden states of all kinds, in chunks, with others that join and leave, and
    compare each state with the reference's for the same text."""
    graph = trial.case
    with trial.opened("dense", graph=graph, graph_buckets=BUCKETS, graph_token_buckets=TOKENS) as harness:
        if not harness.limits.hidden_size:
            raise NotApplicable("this worker returns no hidden states")
        for kinds in (AFTER, BEFORE) if harness.limits.gives_norm_inputs else (AFTER,):
            own = [kinds[place % len(kinds)] for place in range(len(LENGTHS))]
            given = {"chunk": 8, "stagger": 1, "sampling": {"optional": own}}
            results = harness.run(random_prompts(8, LENGTHS), 6, **given)
            check(trial, harness, results, own)


def check(trial: Trial, harness: Harness, results: Sequence[Result], kinds: Sequence[Mapping[str, Any]]) -> None:
    """Compare the states of results with the reference's. Raises LawBroken."""
    dtype = harness.geometry.dtype
    reference = trial.kit.reference(harness.model, harness.geometry.head_dim)
    for number, (result, kind) in enumerate(zip(results, kinds, strict=True)):
        wanted = wanted_states(reference, result, kind)
        found = result.states
        if found is None or wanted is None:
            if found is not wanted:
                raise LawBroken(f"request {number} has states {found}; wanted {wanted}")
            continue
        if found.shape != wanted.shape:
            raise LawBroken(f"request {number} has states of shape {found.shape}; wanted {wanted.shape}")
        error = float(np.abs(found - wanted).max() / max(1.0, float(np.abs(wanted).max())))
        trial.note(error, dtype)
        if not error <= trial.tolerance(dtype):
            raise LawBroken(f"a state of request {number} ({dict(kind)}) is {error:.2g} from the reference's")


def wanted_states(reference: Harness, result: Result, kind: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """Return the reference's states of a result's tokens but the last, or the last of them; None if
    none are requested."""
    if not kind:
        return None
    text = (result.prompt + result.tokens)[:-1]
    own = {**kind, "return_hidden_states": "all"}
    states = reference.run([text], 1, sampling={"optional": [own]})[0].states
    assert states is not None
    return states[-1:] if kind["return_hidden_states"] == "last" else states


def cases(target: Target) -> tuple[str, ...]:
    """Return "off", and each kind of graph."""
    return ("off", *target.package.graphs)


LAWS: tuple[Law, ...] = (
    Law(
        name="states_belong_to_tokens",
        level="C2",
        says="Returned hidden states are the reference's for the tokens of their request.",
        check=states_belong_to_tokens,
        mutants=(worker.SWAPS_STATES, worker.MISTAKES_THE_NORM),
        tolerance=STATES,
        cases=cases,
        interpreted=frozenset(),
    ),
)

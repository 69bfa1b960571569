"""A law of level C2 (runner): layered prefill together with decode steps, in each mode
(`--prompt-lane`) that the device supports."""

from __future__ import annotations

from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.kit_run import Trial
from sglcore.conformance.law import LOGPROBS, Law, LawBroken
from sglcore.conformance.mutants import mutants_slices as broken
from sglcore.conformance.target import Target
from sglcore.step.slice_decisions import INTERLEAVE, PARTITION, PRIORITY


def lanes(target: Target) -> tuple[str, ...]:
    """Return the law's cases, the lanes (values of `--prompt-lane`) that a device supports for
    prompt slices: interleaved; with streams also by priority; with a `partition` also on a part of
    the device."""
    beside = (PRIORITY,) if target.facts().has_streams else ()
    return (INTERLEAVE, *beside) if target.package.partition is None else (INTERLEAVE, *beside, PARTITION)


def prompts_by_slices(trial: Trial) -> None:
    """Run prompts that arrive while others decode, one layer at a time, in the lane that the case
    names; one shares a prefix with another. Raises LawBroken where log-probabilities differ from
    the reference's, if the device runs another lane, or if no prompt ran in slices."""
    harness = trial.kit.harness("dense", prompt_slices="1", prompt_lane=trial.case)
    found = harness.started.built.get("lane")
    if found is not None and found.kind != trial.case:
        raise LawBroken(f"slices run in the lane {found.kind}, wanted {trial.case}: {found.why}")
    prompts = random_prompts(11, (6, 25, 18, 3))
    prompts.append(prompts[1][:20] + prompts[3])
    how = {"chunk": 16, "stagger": 3, "overlap": harness.limits.can_overlap, "prefix_cache": True}
    trial.compare(harness, harness.run(prompts, 12, score_prompts=True, **how))
    if not any(path.startswith("layers") for path in harness.recorder.paths):
        raise LawBroken("no prompt ran in slices")


LAWS: tuple[Law, ...] = (
    Law(
        name="prompts_by_slices",
        level="C2",
        says="Prompts whose layers run between or beside decode steps give what whole prompts give.",
        check=prompts_by_slices,
        mutants=(broken.HANDS_ON_HALF, broken.NO_SUCH_PARTS),
        needs=frozenset({"slices"}),
        tolerance=LOGPROBS,
        cases=lanes,
        interpreted=frozenset(),
    ),
)

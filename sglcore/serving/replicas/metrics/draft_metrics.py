"""Prometheus metrics of draft tokens: how many were accepted, at which position, and by length of
context, cached share and number of draft tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from sglcore.schedule.draft_counts import CACHED, DraftCell, DraftSums, at_places, sums_by
from sglcore.serving.replicas.ipc import EngineStats

Engines = Sequence[tuple[str, EngineStats]]
"""Number (as text) and newest counters of each replica."""


def draft_families(model: str, engines: Engines) -> Iterator[Metric]:
    """Yield the metrics of the replicas that verified draft tokens; nothing if none did. `model`:
    the value of the label `model`; the label `replica` is the replica's number."""
    engines = [(replica, numbers) for replica, numbers in engines if numbers.drafts]
    if engines:
        yield _accepted(model, engines)
        yield from _places(model, engines)
        texts = "by the upper bound of the number of tokens", "by the upper bound of the cached share of the prompt"
        for label, text, key, shown in (
            ("context", texts[0], lambda cell: cell.context, lambda value: str(2**value - 1)),
            ("cached", texts[1], lambda cell: cell.cached, lambda value: CACHED[value]),
            ("tokens", "by the number of verified draft tokens", lambda cell: cell.proposed, str),
        ):
            yield from _split(model, engines, label, text, key, shown)


def _accepted(model: str, engines: Engines) -> Metric:
    family = HistogramMetricFamily(
        "sglcore_accepted_draft_tokens",
        "Accepted draft tokens in each step of a request: 1 + sum / count is the mean acceptance length.",
        labels=["model", "replica"],
    )
    for replica, numbers in engines:
        found = sums_by(numbers.drafts, lambda cell: cell.accepted)
        total, buckets = 0, list[tuple[str, float]]()
        for accepted in range(max(found) + 1):
            total += found.get(accepted, DraftSums()).steps
            buckets.append((repr(float(accepted)), total))
        buckets.append(("+Inf", total))
        family.add_metric([model, replica], buckets, math.fsum(one.accepted for one in found.values()))
    return family


def _places(model: str, engines: Engines) -> Iterator[Metric]:
    labels = ["model", "replica", "place"]
    had = CounterMetricFamily("sglcore_draft_tokens", "Draft tokens, by their position in a step.", labels=labels)
    right = CounterMetricFamily(
        "sglcore_draft_tokens_accepted", "Accepted draft tokens, by their position in a step.", labels=labels
    )
    wasted = CounterMetricFamily(
        "sglcore_draft_tokens_wasted", "Rejected draft tokens, and those after a rejected one.", labels=labels
    )
    for replica, numbers in engines:
        for place, (proposed, accepted) in enumerate(at_places(numbers.drafts), start=1):
            where = [model, replica, str(place)]
            had.add_metric(where, proposed)
            right.add_metric(where, accepted)
            wasted.add_metric(where, proposed - accepted)
    yield from (had, right, wasted)


def _split(
    model: str, engines: Engines, label: str, text: str, key: Callable[[DraftCell], int], shown: Callable[[int], str]
) -> Iterator[Metric]:
    """Yield three counters, of steps, verified and accepted draft tokens, by the values of `label`.
    `key`: returns the value of a cell; `shown`: returns its text for the label; `text`: what the
    label says, for the metrics' help."""
    labels, kinds = ["model", "replica", label], ("steps", "proposed", "accepted")
    families = [
        CounterMetricFamily(f"sglcore_draft_{kind}_by_{label}", f"Steps of requests: {kind}, {text}.", labels=labels)
        for kind in kinds
    ]
    for replica, numbers in engines:
        for value, sums in sums_by(numbers.drafts, key).items():
            for family, amount in zip(families, sums, strict=True):
                family.add_metric([model, replica, shown(value)], amount)
    yield from families

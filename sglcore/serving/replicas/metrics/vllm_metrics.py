"""The server's metrics under vLLM's names, for dashboards and autoscalers that use these."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.server_metrics import Metrics, Replicas, kv_usage

_ENGINE = ("model_name", "engine")
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests that take part in steps.", lambda n: n.running),
    ("num_requests_waiting", "Requests that wait for a place in a step.", lambda n: n.waiting),
    ("kv_cache_usage_perc", "The part of the KV pages that requests hold; 1 is all.", kv_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Tokens of prompts.", lambda n: n.prompt_tokens),
    ("generation_tokens", "Tokens drawn.", lambda n: n.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda n: n.looked_up_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda n: n.hit_tokens),
    ("num_preemptions", "Requests preempted because no pages were left.", lambda n: n.retractions),
    ("kv_offload_load_bytes", "Bytes of KV entries copied from host memory to the device.", lambda n: n.loaded_bytes),
    ("kv_offload_store_bytes", "Bytes of KV entries that the device wrote to host memory.", lambda n: n.stored_bytes),
)
_REASONS = frozenset({"stop", "length", "abort", "error"})


class VllmFamilies(Collector):
    """The collector of prometheus_client that reads the counters of a `Metrics` and of the replicas
    at each scrape, under vLLM's names (`vllm:...`); `Metrics.add` adds it."""

    def __init__(self, metrics: Metrics, model: str, replicas: Replicas) -> None:
        """`model`: the label `model_name`; a replica's number is the label `engine`."""
        self._metrics, self._model, self._replicas = metrics, model, replicas

    def collect(self) -> Iterator[Metric]:
        engines = [(name, numbers) for name, _, numbers in self._replicas() if numbers is not None]
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, read in rows:
                family = kind(f"vllm:{name}", text, labels=_ENGINE)
                for engine, numbers in engines:
                    family.add_metric([self._model, engine], read(numbers))
                yield family
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=("model_name", "finished_reason")
        )
        for reason, count in sorted(self._metrics.outcomes.items()):
            if reason in _REASONS:
                ended.add_metric([self._model, reason], count)
        yield ended
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self._metrics.first_token),
            ("inter_token_latency_seconds", "From a token to the next.", self._metrics.between_tokens),
            ("e2e_request_latency_seconds", "From arrival to the end.", self._metrics.whole),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=("model_name",))
            family.add_metric([self._model], *histogram.buckets())
            yield family

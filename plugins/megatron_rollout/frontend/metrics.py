"""`/metrics`: Prometheus text of one app, in a registry of its own (several apps may live in one process)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_rollout.frontend.client import EngineClient
from megatron_rollout.frontend.inflight import Inflight
from megatron_rollout.requests import GenerationOutput

PREFIX = "megatron_rollout_"
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counts of this app, and at each scrape the engine's status."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, client: EngineClient, inflight: Inflight) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(client, inflight))
        self._requests = Counter(
            PREFIX + "http_requests", "Calls answered", ["route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            PREFIX + "http_request_seconds", "Time to the answer's start (streams: to the first event)", ["route"],
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # looked up once
        self._samples = Counter(PREFIX + "samples", "Samples finished", ["finish_reason"], registry=self._registry)
        self._sample_tokens = Counter(PREFIX + "sample_tokens", "Tokens of finished samples", registry=self._registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        children = self._children.get((route, status))
        if children is None:
            children = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._children[route, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def finished(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            self._samples.labels(output.finish_reason).inc()
            self._sample_tokens.inc(len(output.output_ids))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, client: EngineClient, inflight: Inflight) -> None:
        self._client = client
        self._inflight = inflight

    def collect(self) -> Iterable[Metric]:
        status = self._client.status()
        version = -1 if status.weight_version is None else status.weight_version
        gauges = {
            "serving": ("1 if the cell takes requests", int(status.serving)),
            "weight_version": ("Version of the weights, -1 before any", version),
            "running_requests": ("Samples in the engine's batch", status.running_requests),
            "waiting_requests": ("Samples queued", status.waiting_requests),
            "outstanding_tokens": ("Tokens that samples in flight may still need", status.outstanding_tokens),
            "kv_usage_ratio": ("Share of the KV cache in use", status.kv_usage),
            "http_samples_in_flight": ("Samples of HTTP calls in flight", self._inflight.samples),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=float(value))
        counters = {
            "generated_tokens": ("Tokens sampled", status.generated_tokens),
            "prompt_tokens": ("Tokens of prompts processed", status.prompt_tokens),
            "http_disconnects": ("Calls aborted because their client went away", self._inflight.disconnects),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value=float(value))

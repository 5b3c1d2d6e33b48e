"""Prometheus metrics of a column's driver (`--metrics-port`). The dashboard deploy/grafana.json displays them."""

from collections.abc import Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge

from clipmill.prep.core.shard_result import ShardResult
from clipmill.shards.commits import Failure


class Meters:
    """Metrics of all runs in this process, labelled by column."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"clipmill_prep_{name}", text, ("column", *labels), registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"clipmill_prep_{name}", text, ("column",), registry=registry)

        self._made = counter("samples_made", "Samples (chunks in the column video) that were made and committed.")
        self._copied = counter("samples_copied", "Samples that were copied from an earlier shard and committed.")
        self._shards = counter("shards", "Shards that were committed.")
        self._failures = counter("failures", "Failures of samples, shards and sources.", "reason")
        self._bytes = counter("written_bytes", "Size of the tars of committed shards.")
        self._encoded_s = counter("encoded_video_seconds", "Seconds of video that were encoded or read for samples.")
        self._cpu_s = counter("cpu_seconds", "CPU time of the workers in seconds, including child processes.")
        self._excluded = counter("excluded_nodes", "Nodes that were excluded from the run.")
        self._planned = gauge("planned_samples", "Samples that the run makes or copies.")
        self._done = gauge("done_samples", "Finished samples, including samples in shards that are not committed yet.")

    def begin(self, column: str, failures: Iterable[Failure], *, num_samples: int) -> None:
        """Set the number of samples of a run, and count the failures that planning found."""
        self._planned.labels(column).set(num_samples)
        for counter in (self._made, self._copied, self._shards, self._bytes, self._encoded_s, self._cpu_s):
            counter.labels(column)  # export 0 from the start: without a first value, Prometheus cannot compute a rate
        self._excluded.labels(column)
        for failure in failures:
            self._failures.labels(column, failure.code).inc()

    def finish(self, column: str, result: ShardResult) -> None:
        """Count the result of a finished shard."""
        self._cpu_s.labels(column).inc(result.cpu_s)
        for failure in result.reasons:
            self._failures.labels(column, failure.code).inc()
        if result.stopped_by is None:
            self._shards.labels(column).inc()
            self._made.labels(column).inc(result.num_chunks - result.num_reused)
            self._copied.labels(column).inc(result.num_reused)
            self._bytes.labels(column).inc(result.num_bytes)
            self._encoded_s.labels(column).inc(result.encoded_s)

    def exclude(self, column: str) -> None:
        """Count an excluded node."""
        self._excluded.labels(column).inc()

    def show(self, column: str, *, num_done: int) -> None:
        """Set the number of finished samples."""
        self._done.labels(column).set(num_done)


# One object per registry: a process may run several jobs, but can register a metric only once.
meters_of = cache(Meters)

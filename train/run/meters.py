"""Prometheus metrics of a training run (`--metrics-port`), for the dashboard in deploy/grafana.json."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from clipmill.train.config.training import TrainingSettings


class Meters:
    """Tracker that updates Prometheus metrics from the lines of metrics.jsonl. The lines cover all ranks."""

    def __init__(self, registry: CollectorRegistry, settings: TrainingSettings) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"clipmill_train_{name}", text, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"clipmill_train_{name}", text, labels, registry=registry)

        self._batch = settings.batch
        self._steps = counter("steps", "Optimizer steps since this process started.")
        self._samples = counter("samples", "Samples processed by all ranks since this process started.")
        self._step_s = counter(
            "step_seconds", "Total duration of optimizer steps since this process started, including data waits."
        )
        self._data_wait_s = counter(
            "data_wait_seconds", "Total time that optimizer steps waited for data since this process started."
        )
        self._failed = counter("failed_samples", "Samples that could not be loaded since the run began.")
        self._num_failed = 0
        self._step = gauge("step", "Steps completed since the run began.")
        gauge("planned_steps", "Total number of steps of the run.").set(settings.steps)
        self._loss = gauge("loss", "Loss of the last step.")
        self._lr = gauge("learning_rate", "Learning rate of the last step.")
        self._evaluation = gauge("evaluation", "Metrics of the last evaluation during training.", "split", "metric")

    def log(self, line: dict[str, Any]) -> None:
        self._steps.inc()
        self._samples.inc(self._batch)
        self._step_s.inc(line["step_s"])
        self._data_wait_s.inc(line["data_wait_s"])
        self._failed.inc(line["num_failed"] - self._num_failed)
        self._num_failed = line["num_failed"]
        self._step.set(line["step"])
        self._loss.set(line["loss"])
        self._lr.set(line["lr"])
        for name, value in line.items():
            split, slash, metric = name.partition("/")
            if slash:
                self._evaluation.labels(split, metric).set(value)

    def close(self) -> None:
        pass

"""Metrics of running commands, which the dashboard shows, and logs of JSON lines."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from io import StringIO
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch import nn

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.monitoring import JsonLog, Monitoring
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.distributed.world import World
from clipmill.train.run.folder import RunFolder, read_lines
from tests.prep.running import Ran, manifest, prep, prep_here, start, wait_until
from tests.train.plane import PlaneTask, Points, settings, train_plane

Samples = dict[str, float]  # `name{label=value}`
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def scrape(port: int) -> Samples:
    """Return what a command serves, as Prometheus reads it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = {}
    for family in families:
        samples[family.name + ("_total" if family.type == "counter" else "")] = float("nan")  # it may have no values
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def port_of(log: str) -> int:
    match = re.search(r"metrics are served on port (\d+), path /metrics", log)
    assert match, log
    return int(match[1])


class EvaluatedPlane(PlaneTask):
    """A task whose evaluation metrics are named by a split."""

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        return {"val/error": super().evaluate(model, world)["error"]}


@pytest.fixture
def port(capsys: pytest.CaptureFixture[str]) -> Iterator[int]:
    """A port at which this process serves metrics."""
    with Monitoring(metrics_port=0).begin():
        yield port_of(capsys.readouterr().err)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with closing(socket.create_server(("0.0.0.0", 0))) as server:
        yield server.getsockname()[1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A manifest of two videos that can be read and one that cannot."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in ("a", "b"):
        FrameNumberVideo(num_frames=90, fps=Fraction(30), width=160, height=120).write(videos / f"{name}.mp4")
    (videos / "c.mp4").write_bytes(b"not a video")
    manifest(tmp_path / "data", videos)
    return tmp_path / "data"


def chunk(data: Path, *flags: object, status: int | None = 1) -> Ran:
    return prep_here("chunk", "--data", data, "--len", "1s", "--workers", 1, "--json", *flags, status=status)


def test_runs_serve_what_they_do_and_the_dashboard_shows_only_that(
    repository: Path, data: Path, port: int, tmp_path: Path
) -> None:
    summary = chunk(data).summary
    chosen = settings(tmp_path / "run", max_failures=100, evaluate=EvaluationSettings(every=4))
    train_plane(chosen, EvaluatedPlane(), Points(failing=(3, 11)))
    served, lines = scrape(port), read_lines(RunFolder(chosen.out).metrics)
    expected = {
        "clipmill_prep_samples_made_total{column=video}": 6,
        "clipmill_prep_samples_copied_total{column=video}": 0,
        "clipmill_prep_done_samples{column=video}": 6,
        "clipmill_prep_planned_samples{column=video}": 6,
        "clipmill_prep_failures_total{column=video,reason=source_unreadable}": 1,
        "clipmill_prep_written_bytes_total{column=video}": summary["num_bytes_written"],
        "clipmill_prep_encoded_video_seconds_total{column=video}": summary["encoded_s"],
        "clipmill_prep_cpu_seconds_total{column=video}": summary["cpu_s"],
        "clipmill_train_steps_total": chosen.steps,
        "clipmill_train_samples_total": chosen.steps * chosen.batch,
        "clipmill_train_step_seconds_total": sum(line["step_s"] for line in lines),
        "clipmill_train_data_wait_seconds_total": sum(line["data_wait_s"] for line in lines),
        "clipmill_train_failed_samples_total": lines[-1]["num_failed"],
        "clipmill_train_step": chosen.steps,
        "clipmill_train_loss": lines[-1]["loss"],
        "clipmill_train_evaluation{metric=error,split=val}": lines[-1]["val/error"],
    }
    assert {name: served.get(name) for name in expected} == pytest.approx(expected)
    dashboard = (repository / "deploy/grafana.json").read_text()
    queries = " ".join(
        target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel.get("targets", ())
    )
    shown = set(re.findall(r"\b(?:clipmill|process)_\w+", queries))
    assert len(shown) > 15 and shown <= served.keys(), shown - served.keys()
    labels = set(re.findall(r"{{(\w+)}}", dashboard)) - {"instance"}
    assert labels == {name for key in served for name in re.findall(r"(\w+)=", key)}


def test_a_loss_that_is_not_finite_leaves_the_last_finite_values(port: int, tmp_path: Path) -> None:
    with pytest.raises(FailedWork, match="the loss is nan"):
        train_plane(settings(tmp_path / "run"), points=Points(poisoned=7))
    lines, served = read_lines(tmp_path / "run" / "metrics.jsonl"), scrape(port)
    last = lines[-1] if lines else {"step": 0.0, "loss": 0.0}
    assert (served["clipmill_train_step"], served["clipmill_train_loss"]) == (last["step"], last["loss"])


def test_a_port_in_use_is_refused_before_work_starts(data: Path, taken_port: int) -> None:
    ran = chunk(data, "--metrics-port", taken_port, status=2)
    assert ran.error == f"--metrics-port {taken_port} cannot be used: Address already in use"
    assert not (data / "video").exists()


def test_of_several_ranks_the_first_serves(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Monitoring(metrics_port=taken_port).begin():
        pass
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="cannot be used"), Monitoring(metrics_port=taken_port).begin():
        pass


@pytest.mark.nightly
def test_a_killed_process_frees_the_port(data: Path) -> None:
    with closing(socket.create_server(("0.0.0.0", 0))) as server:
        port = server.getsockname()[1]
    flags = ("chunk", "--data", data, "--len", "1s", "--workers", 1, "--metrics-port", port)
    killed = start(*flags)

    def is_working() -> bool:
        try:
            return scrape(port).get("clipmill_prep_planned_samples{column=video}") == 6
        except urllib.error.URLError:
            return False

    wait_until(is_working)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = prep(*flags, status=1)
    assert port_of(again.stderr) == port and "6 chunks" in again.stdout


def test_a_log_of_json_lines_has_objects_alone_and_the_report_stays(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the command replaces
    ran = chunk(data, "--log-format", "json", status=1)
    events = [json.loads(line) for line in ran.stderr.splitlines()]
    assert all(
        event.keys() == {"time", "level", "node", "event"} and re.fullmatch(TIME, event["time"]) for event in events
    )
    assert (events[-1]["level"], events[-1]["event"].partition(":")[0]) == ("error", "failed")
    assert ran.summary["num_chunks"] == 6


def test_levels_and_ranks_of_lines_and_a_traceback_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    stream = StringIO()
    log = JsonLog(stream)
    print("warning: slow", file=log)
    log.write("two")
    print(" parts\n\nerror: wrong\nhint: right", file=log)
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.write_exception(type(error), error, error.__traceback__)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(event["level"], event["event"]) for event in events[:-1]] == [
        ("warning", "warning: slow"),
        ("info", "two parts"),
        ("error", "error: wrong"),
        ("error", "hint: right"),
    ]
    assert events[-1]["event"].startswith("Traceback") and events[-1]["event"].endswith("ValueError: broken")
    assert {event["rank"] for event in events} == {"3"} and not log.isatty()


@pytest.mark.nightly
def test_the_exporter_is_imported_only_if_asked_for(data: Path) -> None:
    program = (
        "import sys; from clipmill.train.run import tracking; from clipmill.prep.cli import main\n"
        f"sys.argv = ['prep', 'chunk', '--data', {str(data)!r}, '--len', '1s', '--workers', '1']\n"
        "try: main()\nexcept SystemExit: print('prometheus_client' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False", ran.stderr

"""Trackers of a run's metrics: each receives each step once, no matter how often the run was resumed."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import TrackSettings, TrainingSettings
from clipmill.train.run.folder import RunFolder, create_run, read_lines
from clipmill.train.run.tracking import (
    EpochLoss,
    Progress,
    check_tracking,
    describe,
    open_trackers,
    run_name,
    tag_metrics,
)
from clipmill.train.tasks.caption.spec import CaptionerSettings
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings


def line_of(step: int) -> dict[str, Any]:
    line = {"step": step, "loss": 1 / step, "lr": 0.5, "grad_norm": None, "samples_per_s": 3.0, "step_s": 0.1}
    line |= {"data_wait_s": 0.0, "num_failed": 0}
    return line | ({"retrieval/recall_at_1": 0.25} if step % 4 == 0 else {})


@pytest.fixture
def track(tmp_path: Path) -> Callable[..., RunFolder]:
    """Function that logs the steps after `after` up to `last`, as a new or resumed run does."""

    def log(after: int, last: int, **chosen: Any) -> RunFolder:
        settings = TrainingSettings(out=tmp_path / "run", steps=20, track=TrackSettings(**chosen))
        run = create_run(settings) if not settings.out.exists() else RunFolder(settings.out)
        trackers = open_trackers(settings, run=run, progress=Progress(), step=after)
        for step in range(after + 1, last + 1):
            trackers.log(line_of(step))
        trackers.close()
        return run

    return log


def test_metrics_have_each_step_once(track: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    track(0, 7)
    run = track(5, 9)
    assert read_lines(run.metrics) == [line_of(step) for step in range(1, 10)]
    printed = capsys.readouterr().out
    assert "step 1/20  loss 1.0000" in printed
    assert printed.count("step 8/20  retrieval: recall_at_1 0.25\n") == 1
    assert {path.name for path in run.path.iterdir()} == {"settings.yaml", "metrics.jsonl"}


def test_tensorboard_shows_each_step_once_and_settings_and_page(track: Callable[..., RunFolder]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for after, last in ((0, 9), (4, 6), (4, 8)):
        run = track(after, last, tensorboard=True)
    shown = accumulator.EventAccumulator(str(run.path / "tensorboard")).Reload()
    tags = shown.Tags()
    assert set(tags["scalars"]) == set(tag_metrics(line_of(4)))
    losses = shown.Scalars("train/loss")
    assert [(loss.step, loss.value) for loss in losses] == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
    assert [scalar.step for scalar in shown.Scalars("retrieval/recall_at_1")] == [4, 8]
    texts = {tag: shown.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    assert "tensorboard: true" in texts["settings/text_summary"]
    assert texts["page/text_summary"] == str(run.page)


@pytest.mark.nightly
def test_wandb_is_sent_each_step_once_under_one_run(
    track: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(track(0, 0).path / name.lower()))
    for after, last in ((0, 9), (4, 11)):
        # W&B names a process's folder by the second in which the process starts.
        time.sleep(1)
        run = track(after, last, wandb="offline")
    # At the end of a run, W&B's service is only asked to close the file. The end of a process waits for that.
    wandb.teardown()
    records = [record for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")) for record in sent_records(path)]
    runs = [record.run for record in records if record.HasField("run")]
    assert len({run_record.run_id for run_record in runs}) == 1
    assert {run_record.run_id for run_record in runs} == {json.loads((run.path / "wandb.json").read_text())["id"]}
    assert {run_record.project for run_record in runs} == {"clipmill"}
    names = {run_record.display_name for run_record in runs}
    assert len(names) == 1 and f"{run.path.resolve().name}_" in names.pop()
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert any(metric.step_metric == "train/epoch" for metric in metrics)
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(logged_step["_step"], logged_step["train/loss"]) for logged_step in history] == [
        (step, pytest.approx(1 / step)) for step in range(1, 12)
    ]
    assert [logged_step["_step"] for logged_step in history if "retrieval/recall_at_1" in logged_step] == [4, 8]
    assert any(str(run.page) in str(record.summary) for record in records)


def sent_records(path: Path) -> list[Any]:
    """Return the records of a W&B file.

    It is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB hold parts of records.
    """
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    all_records, at, data = [], 7, b""
    while at + 7 <= len(content):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        data += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or its last part
            record = vars(wandb_internal_pb2)["Record"]()  # created at import, so type checkers do not know it
            record.ParseFromString(data)
            all_records.append(record)
            data = b""
    return all_records


def test_a_run_is_named_by_what_runs_are_told_apart_by() -> None:
    settings = CaptionerSettings(model="b16", lr=5e-7, batch=16, steps=20, seed=42)
    facts = {"world_size": 16, "captions_per_clip": 10, "decoder": {"depth": 12, "width": 768}}
    # SpaceTimeGPT's code gives this name.
    theirs = "VATEX-psc-H100-run_ws16_nc10_ss1.0_enl12_dnl12_dhs768_ehs768_nf8_ps16_lr5e-07_bs16_rs42"
    assert run_name("VATEX-psc-H100-run", settings, facts) == theirs
    others = DualEncoderSettings(model="b16", num_frames=4, batch=8, share=0.1)
    assert run_name("pairs", others, {"world_size": 1}) == "pairs_ws1_ss0.1_enl12_ehs768_nf4_ps16_lr0.0003_bs8_rs0"


@pytest.mark.parametrize("resumed_at", [0, 1, 3, 4, 7])
def test_an_epoch_has_the_mean_loss_of_its_steps_wherever_the_run_was_resumed(resumed_at: int) -> None:
    lines = [{"step": step, "loss": float(step**2), "epoch": step * 4 / 10} for step in range(1, 9)]
    resumed = EpochLoss(lines[:resumed_at])
    losses_by_step = {line["step"]: resumed.complete(line).get("epoch_loss") for line in lines[resumed_at:]}
    means = {3: (1 + 4 + 9) / 3, 5: (16 + 25) / 2, 8: (36 + 49 + 64) / 3}
    assert losses_by_step == {step: means.get(step) for step in range(resumed_at + 1, 9)}


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipmill.train.run.tracking.find_spec", lambda name: None)
    check_tracking(TrackSettings())
    with pytest.raises(UserError, match=r"--track\.tensorboard needs tensorboard") as raised:
        check_tracking(TrackSettings(tensorboard=True))
    assert raised.value.hint == "run pip install 'clipmill[track]'"
    with pytest.raises(UserError, match=r"--track\.wandb offline needs wandb"):
        check_tracking(TrackSettings(wandb="offline"))


def test_numbers_stand_under_the_names_of_their_rooms() -> None:
    line = {"step": 3, "loss": 2.0, "mfu": 0.5, "mir/map": 0.1, "grad_norm": None, "nothing": float("nan")}
    assert tag_metrics(line) == {"train/loss": 2.0, "speed/mfu": 0.5, "mir/map": 0.1}


def test_the_console_shows_memory_and_mfu_where_they_are_known() -> None:
    line = line_of(2)
    assert describe(line) == "loss 0.5000  lr 5.00e-01  3.0 samples/s  data wait 0%"
    assert describe({**line, "gpu_memory_gb": 19.04, "mfu": 0.416}).endswith("data wait 0%  19.0 GB  MFU 42%")

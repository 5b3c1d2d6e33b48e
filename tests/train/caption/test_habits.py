"""SpaceTimeGPT's conventions: epochs as the unit, the W&B run and later additions to it, weights and sizes by flag."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import TimesformerConfig, TimesformerModel, VisionEncoderDecoderModel

from clipmill.shards.where import parse_where
from clipmill.train.config.clips import ClipSettings
from tests.train.running import error_of, facts, steps, train, weights_of
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard
from tests.train.tracking.test_trackers import sent_records

SMALL = "--model tiny --size-px 32 --num-frames 2 --workers 1 --batch 3 --lr 1e-3 --device cpu"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
TINY = (*SMALL.split(), *DECODER.split())
HABITS = "--checkpoint-every 1ep --evaluate.every 1ep --warmup-steps 0.5ep --seed 42 --track.wandb offline"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data like VATEX: several captions for each complete clip. Here, three training clips have four captions each."""
    folder, videos = tmp_path_factory.mktemp("vatex"), {"a": "train", "b": "train", "c": "train", "d": "val"}
    for shard_id, split in enumerate(("train", "val")):
        split_chunks = [chunk for name, its in videos.items() if its == split for chunk in chunks_of(name, 20)]
        write_shard(folder, shard_id, split_chunks, split=split)
    texts = [(name, f"caption {number} of {name}") for name in videos for number in range(4)]
    write_captions(folder, videos, [Caption(name, 0.0, float("inf"), text) for name, text in texts])
    return folder


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of nine steps with four steps per epoch: twelve captions in batches of three."""
    folder = tmp_path_factory.mktemp("habits")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CACHE", "CONFIG", "DATA"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / name.lower()))
        out = folder / "vatex"
        assert train("caption", "--shards", data_dir, "--out", out, *TINY, *HABITS.split(), "--steps", 9) == 0
        time.sleep(1)  # W&B names a process's folder by the second in which the process starts
        assert train("eval", "caption", out, "--max-samples", 2) == 0
        import wandb

        wandb.teardown()
    return out


def test_checkpoints_evaluations_and_warmup_are_in_epochs_of_every_caption_once(run: Path) -> None:
    assert sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*")) == [4, 8, 9]
    lines = steps(run)
    assert [line["step"] for line in lines if "val/loss" in line] == [4, 8, 9]
    assert [line["lr"] for line in lines[:2]] == [pytest.approx(5e-4), pytest.approx(1e-3)]  # two warmup steps
    assert lines[3]["epoch"] == 1 and lines[7]["epoch"] == 2
    of_batches = [line["batches"]["val/loss of each batch"] for line in lines if "batches" in line]
    assert [len(batch_captions) for batch_captions in of_batches] == [1, 1, 1] and of_batches[0] == [
        pytest.approx(lines[3]["val/loss"])
    ]
    means = [sum(line["loss"] for line in lines[begin : begin + 4]) / 4 for begin in (0, 4)]
    assert [line["epoch_loss"] for line in lines if "epoch_loss" in line] == [pytest.approx(mean) for mean in means]


def test_the_log_says_what_an_epoch_is(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("caption", "--shards", data_dir, "--out", tmp_path / "run", *TINY, "--warmup-steps", 0)
    assert train(*line, "--checkpoint-every", "2ep", "--steps", 1) == 0
    expected = "an epoch has 4.0 steps, which visit every caption once; --checkpoint-every 2ep = 8 steps"
    assert expected in capsys.readouterr().out
    assert train(*line, "--checkpoint-every", "ep") == 2
    assert "--checkpoint-every is ep" in error_of(capsys)


def records(run: Path, kind: str) -> list[Any]:
    records_read = [record for path in sorted(run.glob("wandb/offline-run-*/*.wandb")) for record in sent_records(path)]
    return [getattr(record, kind) for record in records_read if record.HasField(kind)]


def test_its_wandb_run_has_the_documents_name_axes_and_world_size_and_the_results_of_train_eval(run: Path) -> None:
    runs = records(run, "run")
    assert {run_record.run_id for run_record in runs} == {json.loads((run / "wandb.json").read_text())["id"]} and len(
        runs
    ) == 2
    assert runs[0].display_name == "vatex_ws1_nc4_ss1.0_enl2_dnl1_dhs128_ehs128_nf2_ps16_lr0.001_bs3_rs42"
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["world_size"] == 1 and config["seed"] == 42 and config["checkpoint_every"] == "1ep"
    axes = {record.name or record.glob_name: record.step_metric for record in records(run, "metric")}
    assert {axes[name] for name in ("train/loss", "train/epoch_loss", "val/*")} == {"train/epoch"}
    history = records(run, "history")
    values = [{item.key or item.nested_key[0]: item.value_json for item in record.item} for record in history]
    assert [int(logged_step["_step"]) for logged_step in values if "train/loss" in logged_step] == [*range(1, 10)], (
        "each step must be logged once"
    )
    logged = {name for logged_step in values for name in logged_step}
    assert {"train/loss", "train/epoch_loss", "val/loss", "val/loss of each batch", "val/cider_d"} <= logged
    summary = [
        changed_value.key or "/".join(changed_value.nested_key)
        for update in records(run, "summary")
        for changed_value in update.update
    ]
    assert {"captions-val/means/cider_d", "captions-val/loss"} <= set(summary)


def test_java_in_the_loop_is_asked_for_before_the_run_begins(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("caption", "--shards", data_dir, "--out", tmp_path / "run", *TINY, "--evaluate.every", 2)
    assert train(*line, "--evaluate.java") == 2
    assert "--evaluate.java: left out of this test" in error_of(capsys) and not (tmp_path / "run").exists()


def test_a_share_is_of_the_same_videos_for_the_same_seed_and_a_larger_one_has_more_of_them() -> None:
    videos = pa.table({"video_id": [f"video-{number}" for number in range(2000)]})

    def kept_numbers(share: float, seed: int = 0) -> set[int]:
        text = ClipSettings(share=share, seed=seed).selection
        return {number for number, is_selected in enumerate(parse_where(str(text)).mask(videos)) if is_selected}

    assert abs(len(kept_numbers(0.1)) - 200) < 60 and kept_numbers(0.1) == kept_numbers(0.1)
    assert kept_numbers(0.1) < kept_numbers(0.5) and kept_numbers(0.1) != kept_numbers(0.1, seed=1)
    assert ClipSettings().selection is None
    both = str(ClipSettings(share=0.5, where="split = 'train' or split = 'val'").selection)
    assert both.endswith(" and (split = 'train' or split = 'val')")


def test_a_share_trains_and_is_evaluated_on_all(data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = ("caption", "--shards", data_dir, "--out", out, *TINY, "--warmup-steps", 0, "--steps", 1)
    assert train(*line, "--share", 0.5, "--seed", 3, "--batch", 1, "--evaluate.every", 1) == 0
    assert "where md5(concat(video, ' 3')) < '80000000'" in facts(out)["data"] and "val/loss" in steps(out)[-1]


def test_a_timesformer_starts_by_its_name_on_the_hub_and_has_mlps_of_another_width(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "facebook/timesformer-base-finetuned-k600"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    theirs = TimesformerModel(TimesformerConfig(image_size=32, patch_size=16, num_frames=2, **sizes))
    theirs.save_pretrained(tmp_path / "cached")
    asked: list[str] = []

    def snapshot(repo: str, **_: object) -> str:
        asked.append(repo)
        return str(tmp_path / "cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    still = ("--lr", 1e-12, "--warmup-steps", 0, "--steps", 1)
    sized = ("--towers.width", 64, "--towers.depth", 2, "--towers.heads", 2)
    line = ("caption", "--shards", data_dir, *TINY, *still, *sized)
    assert train(*line, "--init.weights", f"hf:{name}", "--out", tmp_path / "run") == 0
    assert set(asked) == {name}
    ours, key = weights_of(tmp_path / "run"), "encoder.layer.1.output.dense.weight"
    parameter = next(
        tensor for our, tensor in ours.items() if our.endswith("blocks.1.mlp.c_proj.weight") and "video" in our
    )
    assert torch.allclose(parameter, theirs.state_dict()[key], atol=1e-6)
    narrow = ("--towers.kind", "timesformer", "--towers.mlp-ratio", 2)
    assert train(*line, *narrow, "--out", tmp_path / "narrow") == 0
    assert train("export", tmp_path / "narrow", "--format", "hf", "--out", tmp_path / "folder") == 0
    exported = VisionEncoderDecoderModel.from_pretrained(tmp_path / "folder")
    assert exported.config.encoder.intermediate_size == 128
    assert exported.encoder.state_dict()[key].shape == (64, 128)

"""`train classify` and `train eval classification` from the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import open_attention
from clipmill.train.run.checkpoint import latest_checkpoint, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.classify.spec import ClassifySettings
from clipmill.train.tasks.classify.task import ClassifyTask
from tests.train.running import error_of, train
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

TINY = ("--model", "tiny", "--num-frames", 2, "--size-px", 32, "--min-crop-area", 0.9, "--workers", 1)
STEPS = ("--batch", 12, "--lr", "2e-3", "--warmup-steps", 5, "--towers.temporal", "random")


def scores(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert train("eval", "classification", *arguments, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_it_learns_which_way_things_move_and_is_scored_by_verb_noun_and_action(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    flags = (*TINY, *STEPS, "--label", "action", "--steps", 60, "--evaluate.every", 30)
    assert train("classify", "--shards", moving, "--out", out, *flags) == 0
    printed = capsys.readouterr().out
    assert "36 of 37 captions of split 'train', 4 of 4 classes (action); 1 without label" in printed
    last = read_lines(RunFolder(out).metrics)[-1]
    # Directions can only be seen from the order of frames.
    assert last["val/action_top1"] > 0.8 and last["val/verb_top1"] > 0.8 and last["val/noun_top1"] > 0.8  # chance: 1/4

    result = scores(capsys, out)
    assert result["numbers"]["action_top1"] == pytest.approx(last["val/action_top1"])
    assert result["num_classes"] == {"verb": 2, "noun": 2, "action": 4} and result["num_samples"] == 12
    assert result["numbers"]["action_mean_class"] == pytest.approx(result["numbers"]["action_top1"])
    views = scores(capsys, out, "--clips", 2, "--crops", 3)
    assert views["numbers"]["action_top1"] > 0.8 and "2 clips x 3 crops" in views["clip"]
    verbs, nouns = tmp_path / "verbs.csv", tmp_path / "nouns.txt"
    verbs.write_text("id,key,instances,category\n1,go-right,[],move\n0,go-left,[],move\n")
    nouns.write_text("\n".join(["night", *(f"noun {number}" for number in range(1, 10)), "snow"]))
    assert train("eval", "classification", out, "--classes", verbs, "--classes", nouns) == 0
    table = capsys.readouterr().out
    assert "top-1" in table and "verb" in table and "T = 2 frames" in table
    page = RunFolder(out).page.read_text()
    assert "go-right snow" in page and "go-left night" in page
    command = json.loads(RunFolder(out).evaluation("classification-val").read_bytes())["command"]
    assert f"--classes {verbs} --classes {nouns}" in command
    assert page.count("<h2>Classification") == 2


def test_it_starts_from_the_video_tower_of_a_run(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "towers", tmp_path / "classes"
    few = ("--batch", 4, "--warmup-steps", 1, "--steps", 1)
    assert train("dual-encoder", "--shards", moving, *TINY, *few, "--out", first) == 0
    # The checkpoint stores the classes that the weights were trained with.
    (first / "settings.yaml").write_text("model: [")
    longer = [4 if before == "--num-frames" else flag for before, flag in zip(("", *TINY), TINY, strict=False)]
    start = ("--init.weights", first, "--lr", "1e-9")
    assert train("classify", "--shards", moving, *longer, *few, *start, "--out", second) == 0
    printed = capsys.readouterr().out
    assert "because a classifier has no such parts: head" not in printed
    assert "weights: not used" in printed and "video.proj" in printed and "interpolated along time" in printed
    theirs, ours = (read_weights(_latest(out)) for out in (first, second))
    name = "video.transformer.resblocks.1.mlp.c_fc.weight"
    assert (theirs[name] - ours[name]).abs().max() < 1e-6
    assert ours["head.weight"].shape == (4, 128) and "video.proj" not in ours
    assert len(ours["video.temporal_embedding"]) == 4


def _latest(out: Path) -> Path:
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--label", "mood"), "the captions have no column label_mood"),
        (("--split", "val", "--evaluate.split", "test"), "no videos of split 'test'"),
        (("--dropout", 1.0), "--dropout is 1.0"),
        (("--mixup", -1), "--mixup is -1"),
        (("--steps", 0), "--steps is 0"),
        (("--evaluate.crops", 0), "--evaluate.crops is 0"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(
    moving: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[Any, ...],
    message: str,
) -> None:
    every = ("--evaluate.every", 1)
    assert train("classify", "--shards", moving, *TINY, *every, "--batch", 4, "--out", tmp_path / "run", *flags) == 2
    assert message in error_of(capsys)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_names_the_flag_that_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("eval", "classification", tmp_path, "--clips", 0) == 2
    assert "error: --clips is 0" in error_of(capsys)


def test_two_clips_are_needed_to_mix_and_enough_for_a_batch(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (("--batch", 1, "--mixup", 0.8), "--batch is 1, but --mixup and --cutmix mix two clips"),
        (("--batch", 37), "--batch 37 is larger than the 36 training samples"),
    ):
        assert train("classify", "--shards", moving, *TINY, *flags, "--out", tmp_path / "run") == 2
        printed = capsys.readouterr()
        assert f"error: {message}" in printed.err
    # An earlier line states why there are no more samples.
    assert "data: 36 of 37 captions of split 'train'" in printed.out + printed.err.split("error:")[0]


def test_one_class_for_all_is_nothing_to_learn_from(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, chunks_of("a", 20), split="train")
    captions = [Caption("a", at, at + 1, "x", labels={"label_class": name}) for at, name in ((0, "p"), (1, "p"))]
    write_captions(
        tmp_path, {"a": "train", "b": "val"}, [*captions, Caption("b", 0, 1, "x", labels={"label_class": "q"})]
    )
    settings = ClassifySettings(shards=str(tmp_path), model="tiny", size_px=32)
    attention = open_attention("sdpa", device_type="cpu")
    with pytest.raises(UserError, match="all clips of split 'train' belong to the class 'p'"):
        ClassifyTask(settings, attention=attention, device=torch.device("cpu")).training_set(World())


def test_a_resumed_run_keeps_its_classes_whatever_labels_the_data_has_by_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir, out = tmp_path / "data", tmp_path / "run"
    for shard_id, (name, split) in enumerate((("a", "train"), ("b", "val"))):
        write_shard(data_dir, shard_id, chunks_of(name, 20), split=split)

    def write_labels(*of_val: str) -> None:
        labels = [("a", "p"), ("a", "q"), *(("b", name) for name in of_val)]
        captions = [
            Caption(video, place % 2, place % 2 + 1, "x", labels={"label_class": name})
            for place, (video, name) in enumerate(labels)
        ]
        write_captions(data_dir, {"a": "train", "b": "val"}, captions)

    write_labels("p", "q")
    few = ("--batch", 2, "--warmup-steps", 1, "--steps", 2, "--checkpoint-every", 1)
    assert train("classify", "--shards", data_dir, *TINY, *few, "--out", out) == 0
    shutil.rmtree(_latest(out))
    write_labels("p", "z")
    assert train("classify", "--resume", "--out", out) == 0
    assert RunFolder(out).read_facts()["classes"]["names"] == ["p", "q"]
    assert train("eval", "classification", out) == 0
    assert "1 of 2 captions of split 'val', 1 of 2 classes (class); 1 of other classes" in capsys.readouterr().out
    write_labels("y", "z")
    assert train("eval", "classification", out) == 2
    assert "2 of other classes (y, z; classes of the model: p, q)" in error_of(capsys)


def test_a_run_of_another_task_has_no_classes(moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "towers"
    few = ("--batch", 4, "--warmup-steps", 1, "--steps", 1)
    assert train("dual-encoder", "--shards", moving, *TINY, *few, "--out", out) == 0
    capsys.readouterr()
    assert train("eval", "classification", out) == 2
    assert "is a run of train dual-encoder, not of train classify" in error_of(capsys)

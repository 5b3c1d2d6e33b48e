"""Commands on tars of images: losses with state, resumption, classes, mixtures with videos, the Python interface."""

import shutil
from pathlib import Path

import pytest
import torch

from clipmill import open_clips
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.train.images.tars import COLOURS, write_tar
from tests.train.running import SMALL, facts, losses, steps, train, two_lines, weights_of

ONE_FRAME = ("--num-frames", 1, "--workers", 1, "--device", "cpu")


@pytest.mark.nightly
def test_a_run_with_a_loss_with_state_goes_on_to_the_same_weights(tars: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("dual-encoder", "--shards", tars, *SMALL, *ONE_FRAME, "--loss.kind", "fastclip-v3")
    assert (
        train(
            *words,
            "--steps",
            4,
            "--checkpoint-every",
            2,
            "--evaluate.every",
            4,
            "--evaluate.shards",
            tars,
            "--out",
            whole,
        )
        == 0
    )
    assert facts(whole)["data"].startswith("18 images of 3 tars") and not facts(whole)["variant"]
    assert "00000..00002-.tar/text_to_video_r1" in steps(whole)[-1]
    shutil.copytree(whole, cut)
    shutil.rmtree(all_checkpoints(RunFolder(cut).checkpoints)[4])
    assert train("dual-encoder", "--resume", "--out", cut) == 0
    assert losses(cut) == losses(whole)
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(cut).items())


def test_a_classifier_learns_the_classes_of_tars(tars: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ("classify", "--shards", tars, *SMALL, *ONE_FRAME, "--steps", 20, "--evaluate.every", 20)
    assert train(*words, "--out", out) == 0
    assert facts(out)["classes"]["names"] == ["0", "1", "2"]
    assert steps(out)[-1]["val/class_top1"] > 0.6  # chance is a third
    assert "the model was trained on these clips" in facts(out)["evaluations"]["val"]["caution"]
    capsys.readouterr()
    assert train("classify", "--shards", tars, *SMALL, "--label", "noun", "--out", tmp_path / "other") == 2
    assert two_lines(capsys)[1] == "hint: use the label class for the cls members of samples, or a key of their json"


def test_an_autoencoder_is_trained_on_images_and_videos(tars: str, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("mae", "--shards", data_dir, "--shards", tars, "--mix", "1,3", *SMALL, "--workers", 1, "--device", "cpu")
    assert train(*words, "--samples-per-chunk", 1, "--steps", 2, "--out", out) == 0
    assert sum(steps(out)[-1]["sources"].values()) == 8 and len(set(steps(out)[-1]["sources"].values())) == 2


def test_tars_are_refused_with_what_only_data_folders_have(
    tars: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, problem in (
        (("--where", "motion > 1"), "no manifest and no scores"),
        (("--captions.sources", "human=1"), "names image tars, whose samples have only one caption each"),
        (("--text-tower", "frozen"), "names image tars, whose samples have only one caption each"),
    ):
        capsys.readouterr()
        assert train("dual-encoder", "--shards", tars, *SMALL, *flags, "--out", tmp_path / "run") == 2
        assert problem in two_lines(capsys)[0]


def test_images_that_all_have_one_caption_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(tmp_path / "same.tar", ((str(number), {"jpg": b"-", "txt": b"a picture"}) for number in range(4)))
    assert train("dual-encoder", "--shards", tmp_path / "same.tar", *SMALL, "--out", tmp_path / "run") == 2
    assert "all 4 captions of split 'all' are 'a picture'" in two_lines(capsys)[0]


def test_open_clips_gives_images_with_captions_or_classes(tars: str, data_dir: Path) -> None:
    with open_clips(tars, batch=6, num_frames=1, size_px=16) as batches:
        batch_list = list(batches)
        assert len(batches) == 3 and batch_list[0]["video"].shape == (6, 1, 16, 16, 3)
        shown = dict(zip(batch_list[0]["clip_id"].tolist(), batch_list[0]["caption"], strict=True))
        assert shown == {number: f"a {COLOURS[number % 3]} picture {number}" for number in shown}
    with open_clips(tars, label="class", shuffle=False, batch=6, num_frames=1, size_px=16) as batches:
        assert batches.classes == ("0", "1", "2")
        assert [label for batch in batches for label in batch["label"].tolist()] == [0, 1, 2] * 6
    with open_clips([tars, data_dir], batch=4, num_frames=2, size_px=16) as batches:
        assert {folder_index for batch in batches for folder_index in batch["folder"].tolist()} == {0, 1}

"""Divided space-time attention trains from image weights, from its own weights, and from LaViLa's weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipmill.train.inference import load_model
from tests.train.inference.test_weights_anywhere import LAVILA, LAVILA_PARTS, rename_tensors
from tests.train.running import error_of, facts, losses, train
from tests.train.tuning.runs import LORA, TINY, kill_copy, stored_names, weights
from tests.train.weights.test_avion import (
    NUM_FRAMES,
    clips,
    double,
    ignore_line,
    lavila_state,
    lavila_video,
    loaded_weights,
    open_source,
    our_model,
    small,
    training_checkpoint,
)

SHORT = ("dual-encoder", *TINY, "--lr", "1e-3", "--steps", 2, "--checkpoint-every", 1)
DIVIDED = ("--towers.attention", "divided")
OLD, NEW = "attn.in_proj_weight", "temporal_attn.in_proj_weight"


def changes(out: Path) -> set[str]:
    return {change["why"].partition(":")[0] for change in facts(out)["weights"]["changes"]}


def test_it_starts_from_images_and_is_resumed(data_dir: Path, tmp_path: Path) -> None:
    joint, divided = tmp_path / "joint", tmp_path / "divided"
    some = (*SHORT, "--shards", data_dir)
    assert train(*some, "--out", joint) == 0
    assert train(*some, *DIVIDED, "--init.weights", joint, "--microbatch", 2, "--out", divided) == 0
    assert changes(divided) == {"--towers.attention divided"}
    block = "video.transformer.resblocks.1."
    assert weights(divided)[block + "temporal_attn.out_proj.weight"].abs().sum() > 0  # it is initialized to zero
    resumed = kill_copy(divided, tmp_path / "killed")
    assert train("dual-encoder", "--resume", "--out", resumed) == 0
    assert losses(resumed) == losses(divided)
    assert train("eval", "retrieval", divided, "--json") == 0


@pytest.mark.nightly
def test_it_starts_from_its_own_weights_and_from_lavilas(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divided, again, theirs = (tmp_path / name for name in ("divided", "again", "theirs"))
    some, block = (*SHORT, "--shards", data_dir), "video.transformer.resblocks.1."
    assert train(*some, *DIVIDED, "--out", divided) == 0

    # The setting is divided because the weights are.
    assert train(*some, "--init.weights", divided, *LORA, "--out", again) == 0
    assert changes(again) == set() and f"{block}temporal_attn.lora.B" in stored_names(again, "model.")
    file = tmp_path / "clip.pt"
    torch.save({"state_dict": rename_tensors(load_model(divided, device="cpu").model, LAVILA, LAVILA_PARTS)}, file)
    assert train(*some, "--init.weights", file, "--out", theirs) == 0
    assert changes(theirs) == set()
    capsys.readouterr()
    assert train(*some, "--init.weights", file, "--towers.attention", "joint", "--out", tmp_path / "no") == 2
    assert "unexpected" in capsys.readouterr().err
    assert train(*some, *DIVIDED, "--towers.patch-dropout", 0.5, "--out", tmp_path / "no") == 2
    assert "--towers.attention divided needs every patch" in error_of(capsys)


def test_its_gradients_are_those_of_lavilas_tower(tmp_path: Path) -> None:
    state = lavila_state()
    torch.save(training_checkpoint(state), tmp_path / "clip.pt")
    divided = replace(small.SIZE, video=replace(small.SIZE.video, is_divided=True))
    ours = our_model(activation="quick_gelu", video_eps=1e-6, num_frames=NUM_FRAMES, size=divided)
    loaded_weights(ours, open_source(tmp_path / "clip.pt"), say=ignore_line)
    ours = ours.double()
    ours.video(clips(NUM_FRAMES)).square().sum().backward()
    known = {name: tensor.requires_grad_() for name, tensor in double(state).items()}
    lavila_video(clips(NUM_FRAMES), known).square().sum().backward()
    for number in range(small.DEPTH):
        for mine, its in ((NEW, "timeattn.qkv.weight"), (OLD, "attn.qkv.weight")):
            gradient = ours.video.get_parameter(f"transformer.resblocks.{number}.{mine}").grad
            expected = known[f"visual.blocks.{number}.{its}"].grad
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)

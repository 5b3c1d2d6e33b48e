"""Runs with adapters: the contents of checkpoints, and how they are used again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from clipmill.train.inference import load_model
from clipmill.train.run.checkpoint import read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.classify.moving import write_moving
from tests.train.running import losses, train
from tests.train.tuning.runs import CROSS, LORA, SHORT, TINY, kill_copy, latest, stored_names, weights


def test_a_checkpoint_of_adapters_holds_nothing_else_and_is_resumed(
    source: Path, adapted_run: Path, tmp_path: Path
) -> None:
    frozen = "(video, with adapters of rank 2; text, with adapters of rank 2)"
    assert RunFolder(adapted_run).read_facts()["parameters"].endswith(f"of them frozen {frozen}")
    names = stored_names(adapted_run, "model.")
    # Each tower has 2 blocks with 4 matrices each, and each matrix has 2 adapter tensors.
    assert len(names) == 4 * 4 * 2 and all(name.endswith((".lora.A", ".lora.B")) for name in names)
    assert (
        stored_names(adapted_run, "ema.")
        == names
        == {name.rpartition(".")[0] for name in stored_names(adapted_run, "optimizer.model.")}
    )
    size, of_source = (sum(path.stat().st_size for path in latest(run).iterdir()) for run in (adapted_run, source))
    assert size < of_source / 10
    before, after = weights(source), weights(adapted_run)
    assert before.keys() == after.keys()
    matrices = {name.rpartition(".lora.")[0] for name in names}
    merged = {name for name in after if name.removesuffix(".weight") in matrices or name.endswith("in_proj_weight")}
    assert {name for name in after if not torch.equal(before[name], after[name])} == merged and len(merged) == 16

    again = kill_copy(adapted_run, tmp_path / "again")
    assert train("dual-encoder", "--resume", "--out", again) == 0
    assert losses(again) == losses(adapted_run)
    resumed = weights(again)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in after.items())


def test_adapters_are_merged_for_evaluation_export_and_a_new_start(
    data_dir: Path, adapted_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eval", "retrieval", adapted_run, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    line = read_lines(RunFolder(adapted_run).metrics)[-1]
    for direction in ("text_to_video", "video_to_text"):
        scores = {f"val/{direction}_r{k}": share for k, share in result[direction]["recall"].items()}
        assert scores and {name: line[name] for name in scores} == scores
    exported, started = tmp_path / "exported", tmp_path / "started"
    assert train("export", adapted_run, "--format", "open_clip", "--out", exported) == 0
    still = [*TINY, "--lr", "1e-12", "--steps", 1, "--shards", data_dir]
    assert train("dual-encoder", *still, "--init.weights", exported, "--out", started) == 0
    begun = weights(started)
    for name, tensor in weights(adapted_run).items():
        torch.testing.assert_close(begun[name], tensor, rtol=0, atol=1e-9)


def test_exports_have_the_adapters_merged_and_are_weights_like_the_run(
    data_dir: Path, adapted_run: Path, masked_run: Path, tmp_path: Path
) -> None:
    classes, captions, base, moving = (tmp_path / name for name in ("classes", "captions", "base", "moving"))
    write_moving(moving, num_videos=4)
    flags = ("--label", "verb", "--init.weights", masked_run, *LORA)
    assert train("classify", *SHORT, "--shards", moving, *flags, "--out", classes) == 0
    words = ("caption", *SHORT, "--shards", data_dir, "--decoder.max-tokens", 8, "--towers.temporal", "random")
    decoder = ("--decoder.name", "tiny", "--decoder.depth", 1, "--decoder.vocabulary", 280)
    assert train(*words, *decoder, "--out", base) == 0
    both = ("--init.weights", base, *LORA, "--lora.towers", "video", "decoder")
    assert train(*words, *both, "--out", captions) == 0
    clips = np.random.default_rng(0).integers(0, 256, (3, 2, 32, 32, 3), dtype=np.uint8)
    for run, forms in ((adapted_run, ("open_clip", "hf")), (classes, ("hf", "videomae")), (captions, ("hf",))):
        adapters = {name: tensor for name, tensor in read_weights(latest(run)).items() if name.endswith(".lora.B")}
        assert adapters and all(adapter.abs().sum() > 0 for adapter in adapters.values())
        base_model = load_model(run)
        for form in forms:
            out = tmp_path / f"{run.name}-{form}"
            assert train("export", run, "--format", form, "--out", out) == 0
            model = load_model(out)
            assert not any(".lora." in name for name in model.model.state_dict())
            assert model.identity == base_model.identity, form
            assert torch.equal(model.encode_video(clips), base_model.encode_video(clips)), form


def test_adapters_need_the_weights_that_they_adapt(
    data_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(source, base)
    flags = [*TINY, "--lr", "1e-2", "--shards", data_dir, *LORA]
    words = ("--steps", 2, "--checkpoint-every", 1, "--init.weights", base, "--out", out)
    assert train("dual-encoder", *flags, *words) == 0
    cut = kill_copy(out, tmp_path / "cut")
    commands = (
        ("dual-encoder", "--resume", "--out", cut),
        ("eval", "retrieval", out),
        ("export", out, "--format", "open_clip", "--out", tmp_path / "exported"),
        ("dual-encoder", *flags, "--steps", 1, "--init.weights", out, "--out", tmp_path / "second"),
    )
    # Weights of a run that continued to train the text tower.
    changed = tmp_path / "changed"
    others = ("--steps", 1, "--freeze", "video", "--init.weights", base, "--out", changed)
    assert train("dual-encoder", *TINY, "--lr", "1e-2", "--shards", data_dir, *others) == 0
    for problem, folder in (
        ("contains only adapters, but the weights that they adapt have changed", changed),
        ("contains only adapters, and the weights that they adapt cannot be read", None),
    ):
        shutil.rmtree(base)
        if folder is not None:
            shutil.copytree(folder, base)
        for command in commands:
            capsys.readouterr()
            assert train(*command) == 2
            error, hint = capsys.readouterr().err.splitlines()[-2:]
            assert problem in error and str(base) in error
            assert hint == f"hint: restore the weights that the run started from: {base}"
    shutil.copytree(source, base)
    for command in commands[:2]:
        assert train(*command) == 0


def test_what_weights_lack_is_trained_whole_beside_the_adapters(data_dir: Path, source: Path, tmp_path: Path) -> None:
    """The projection is new, and the positions are resized to a different image size."""
    out = tmp_path / "run"
    flags = [*TINY[:2], "--num-frames", 4, "--size-px", 48, *TINY[6:], "--lr", "1e-2", "--steps", 2]
    flags += ["--shards", data_dir, "--init.weights", source, *LORA, "--lora.targets", "mlp"]
    flags += ["--towers.embedding-width", 24]
    assert train("dual-encoder", *flags, "--freeze", "blocks:1", "--out", out) == 0
    names = {name for name in stored_names(out, "model.") if ".lora." not in name}
    resized = {"video.positional_embedding", "video.temporal_embedding"}
    assert names == {"video.proj", "text.text_projection", *resized}
    trained = {name.rpartition(".")[0] for name in stored_names(out, "optimizer.model.")}
    assert names - trained == resized
    adapted = {name.partition(".lora.")[0] for name in stored_names(out, "model.") if ".lora." in name}
    blocks = ["video.transformer.resblocks.1", *(f"text.transformer.resblocks.{number}" for number in (0, 1))]
    assert adapted == {f"{block}.mlp.{layer}" for block in blocks for layer in ("c_fc", "c_proj")}


def test_a_captioner_has_adapters_in_its_tower_and_then_in_its_decoder(
    data_dir: Path, masked_run: Path, tmp_path: Path
) -> None:
    out, both = tmp_path / "captions", tmp_path / "both"
    flags = ("--shards", data_dir, "--decoder.name", "tiny", "--decoder.max-tokens", 8, *LORA)
    assert train("caption", *SHORT, *flags, "--init.weights", masked_run, "--out", out) == 0
    names = stored_names(out, "model.")
    assert sum(".lora." in name for name in names) == 2 * 4 * 2
    assert all(name.startswith("decoder.") or ".lora." in name for name in names)
    assert train("eval", "caption", out, "--decoding.min-tokens", 6) == 0
    whole = ("--shards", data_dir, "--init.weights", out, "--lora.towers", "video", "decoder", *LORA)
    assert train("caption", *SHORT, *whole, "--out", both) == 0
    assert stored_names(both, "model.") and all(".lora." in name for name in stored_names(both, "model."))
    before, after = weights(out), weights(both)
    assert before.keys() == after.keys() and not torch.equal(before[CROSS], after[CROSS])

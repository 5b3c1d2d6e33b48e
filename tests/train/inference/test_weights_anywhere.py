"""`train eval`, `export` and `caption-video` accept runs, exported folders, files from other projects, and tags."""

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Towers
from clipmill.train.evaluation import probe_classifiers
from clipmill.train.evaluation.identity import normalisation_of
from clipmill.train.evaluation.probe_classifiers import GRID, choose_l2
from clipmill.train.inference import load_model
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.text import load_tokenizer
from clipmill.train.run.folder import RunFolder
from clipmill.train.weights.open_clip import MISTYPED_MEAN
from tests.tiers import nightly_beyond
from tests.train.inference.conftest import EVALUATIONS, FORMATS
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.running import train
from tests.train.weights.small import open_clip_model, our_model

# These fields differ between results of the same model, because they identify the weights.
OF_THE_NAME = {"source", "shards", "is_own_data", "step", "weights", "command", "all_said"}


@pytest.fixture(scope="module", autouse=True)
def _few_regularisations() -> Iterator[None]:
    """Limit probes to two regularizations that converge in a few steps; weaker ones take hundreds of steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_classifiers, "choose_l2", partial(choose_l2, grid=GRID[-2:]))
        yield


def score(capsys: pytest.CaptureFixture[str], kind: str, weights: object, *flags: object) -> dict[str, Any]:
    capsys.readouterr()
    assert train("eval", kind, weights, *flags, "--json") == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def same(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the fields that identify the weights."""
    return {name: value for name, value in result.items() if name not in OF_THE_NAME}


@pytest.mark.parametrize("task", nightly_beyond(["dual-encoder"], EVALUATIONS))
def test_scores_of_a_run_and_of_its_exports_are_equal_to_the_digit(
    runs: dict[str, Path],
    exports: dict[tuple[str, str], Path],
    moving: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
) -> None:
    forms = [form for name, form in FORMATS if name == task]
    for number, (kind, *flags) in enumerate(EVALUATIONS[task]):
        run_result = score(capsys, kind, runs[task], *flags)
        # Only the first evaluation is run for all formats, because all exports have the identity of their run.
        for form in forms if number == 0 else [forms[number % len(forms)]]:
            its = score(capsys, kind, exports[task, form], "--shards", moving, *flags)
            assert same(its) == same(run_result), (kind, form)
            assert its["source"] == str(exports[task, form]) and its["step"] is None


@pytest.mark.parametrize(("task", "form"), FORMATS)
def test_an_export_has_the_identity_of_its_run(
    runs: dict[str, Path], exports: dict[tuple[str, str], Path], task: str, form: str
) -> None:
    assert load_model(exports[task, form]).identity == load_model(runs[task]).identity


def test_exports_are_converted_to_the_other_format_and_back(
    runs: dict[str, Path], exports: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    for task, first, second, file in (
        ("dual-encoder", "open_clip", "hf", "model.safetensors"),
        ("mae", "videomae", "hf", "model.safetensors"),
    ):
        out = tmp_path / task
        assert train("export", exports[task, first], "--format", second, "--out", out) == 0
        here, there_state = load_file(out / file), load_file(exports[task, second] / file)
        assert here.keys() == there_state.keys() and all(torch.equal(here[name], there_state[name]) for name in here)
        assert (out / "config.json").read_text() == (exports[task, second] / "config.json").read_text()
        assert load_model(out).identity == load_model(runs[task]).identity


def test_a_run_of_4_frames_is_scored_with_16_in_one_command(
    runs: dict[str, Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dual-encoder"], run, ignore=shutil.ignore_patterns("evaluations"))
    plain = score(capsys, "retrieval", run)
    capsys.readouterr()
    assert train("eval", "retrieval", run, "--num-frames", 16) == 0
    printed = capsys.readouterr().out
    assert "4 x 128 -> 16 x 128" in printed and "interpolated along time" in printed
    assert "overrides: --num-frames 16, unlike in training" in printed and "T = 16 frames" in printed
    results = {path.stem: json.loads(path.read_text()) for path in RunFolder(run).results()}
    assert results["retrieval-val"]["text_to_video"] == plain["text_to_video"]
    assert results["retrieval-val-16-frames"]["overrides"] == {"num_frames": 16}
    assert "--num-frames 16" in results["retrieval-val-16-frames"]["command"]
    page = RunFolder(run).page.read_text()
    assert "unlike in training" in page and page.index("(val)</span>") < page.index("(val); num frames 16</span>")
    # Values that training used are not overrides.
    assert "overrides" not in score(capsys, "retrieval", run, "--num-frames", 4)["overrides"]
    assert len(RunFolder(run).results()) == 2
    for flags, name in ((("--sampling", "uniform"), "uniform"), (("--size-px", 48), "48px")):
        assert score(capsys, "retrieval", run, *flags)["overrides"]
        assert RunFolder(run).evaluation(f"retrieval-val-{name}").is_file()


@pytest.mark.parametrize("task", nightly_beyond(["mae"], ["mae", "caption"]))
def test_other_models_are_shown_more_and_larger_frames_too(
    runs: dict[str, Path],
    exports: dict[tuple[str, str], Path],
    moving: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
) -> None:
    kind, *flags = EVALUATIONS[task][0]
    run = tmp_path / "run"
    shutil.copytree(runs[task], run)
    more = ("--num-frames", 8, "--size-px", 48)
    run_result = score(capsys, kind, run, *flags, *more)
    its = score(capsys, kind, exports[task, "hf"], "--shards", moving, *flags, *more)
    assert same(run_result) == same(its) and "T = 8 frames" in run_result["clip"] and "48 px" in run_result["clip"]
    assert ["-8-frames-48px" in path.stem for path in RunFolder(run).results()].count(True) == 1


def test_models_of_latents_are_opened_without_data_and_take_more_frames(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, out = tmp_path / "data", tmp_path / "run", tmp_path / "out"
    shutil.copytree(moving, data)
    chunks = [Chunk(f"v{number:02d}", 2000 * half, 8) for number in range(12) for half in range(2)]
    write_latents(Written(data), [chunks])
    flags = "--input latents --segment 1s --model tiny --num-frames 2 --batch 6 --steps 2 --device cpu"
    for task, more in (("dual-encoder", "--towers.temporal random"), ("mae", "--mask-ratio 0.5")):
        assert train(task, "--shards", data, "--out", run / task, *flags.split(), *more.split()) == 0
    assert train("export", run / "mae", "--format", "videomae", "--out", out) == 0
    for weights in (run / "dual-encoder", run / "mae", out):
        model = load_model(weights)
        side, channels = model.opened.shape.image_px, model.opened.shape.size.video.num_channels
        assert model.encode_video(torch.randn(3, channels, 2, side, side)).shape == (3, 128)
        with pytest.raises(UserError, match=r"the model takes \[B, "):
            model.encode_video(torch.randn(3, channels + 1, 2, side, side))
        with pytest.raises(UserError, match="takes latents"):
            model.encode_video(np.zeros((1, 2, side, side, 3), np.uint8))
    assert load_model(out).identity == load_model(run / "mae").identity
    probe = ("probe", run / "mae", "--label", "verb", "--neighbours", "5")
    assert same(score(capsys, *probe)) == same(score(capsys, "probe", out, "--shards", data, *probe[2:]))
    assert "T = 4 frames" in score(capsys, "retrieval", run / "dual-encoder", "--num-frames", 4)["clip"]
    assert train("eval", "retrieval", run / "dual-encoder", "--size-px", 48) == 2
    assert "--size-px 48 applies to pixels" in capsys.readouterr().err


def test_results_of_other_weights_are_written_where_the_user_says(
    exports: dict[tuple[str, str], Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = exports["dual-encoder", "hf"], tmp_path / "scores"
    printed = score(capsys, "retrieval", folder, "--shards", moving, "--out", out)
    assert json.loads((out / "retrieval-val.json").read_text()).items() >= printed.items()
    score(capsys, "retrieval", folder, "--shards", moving, "--out", out)
    other = exports["dual-encoder", "open_clip"]
    assert train("eval", "retrieval", other, "--shards", moving, "--out", out) == 2
    assert "contains a result for other weights, data or flags" in capsys.readouterr().err
    score(capsys, "caption", exports["caption", "hf"], "--shards", moving, "--out", out)
    assert {path.name for path in out.iterdir()} >= {"captions-val.json", "captions-val.coco.json", "captions-val.html"}


def foreign(exports: dict[tuple[str, str], Path], task: str, form: str, folder: Path) -> Path:
    """Copy an export without the record of its run and without the extra weights of an image tower.

    A different program would have saved such a folder.
    """
    shutil.copytree(exports[task, form], folder)
    shutil.rmtree(folder / "clipmill")
    (folder / "video_extras.safetensors").unlink(missing_ok=True)
    return folder


def test_folders_of_other_programs_are_read_by_their_configuration(
    exports: dict[tuple[str, str], Path], moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, ((task, form), path) in enumerate(exports.items()):
        if form == "videomae":
            continue
        folder = foreign(exports, task, form, tmp_path / str(number))
        kind, *flags = EVALUATIONS[task][0]
        if task == "classify":
            # config.json lists the classes but no label, so the clips have a `class`.
            assert train("eval", kind, folder, "--shards", moving, *flags) == 2
            assert "class" in capsys.readouterr().err
            kind, *flags = EVALUATIONS[task][1]
        result = score(capsys, kind, folder, "--shards", moving, *flags)
        assert "32 px" in result["clip"] and f"T = {4} frames" in result["clip"], path
        model = load_model(folder)
        assert normalisation_of(model.settings)[0] == (0.42, 0.46, 0.41) and "1e-4" not in model.description


AVION = {"video.proj": "visual.image_projection", "video": "visual", "text": "textual"}
LAVILA = {
    "video.proj": "image_projection",
    "video.class_embedding": "visual.cls_token",
    "video.positional_embedding": "visual.pos_embed",
    "video.temporal_embedding": "visual.temporal_embed",
    "video.conv1": "visual.patch_embed.proj",
    "video.ln_post": "visual.norm",
    "video.transformer.resblocks": "visual.blocks",
    "video": "visual",
    "text": "",
}
LAVILA_PARTS = {
    "temporal_attn.in_proj_": "timeattn.qkv.",
    "temporal_attn.out_proj": "timeattn.proj",
    "attn.in_proj_": "attn.qkv.",
    "attn.out_proj": "attn.proj",
    "c_fc": "fc1",
    "c_proj": "fc2",
    "ln_temporal": "norm3",
    "ln_1": "norm1",
    "ln_2": "norm2",
}


def rename_tensors(model: nn.Module, roots: dict[str, str], parts: dict[str, str]) -> dict[str, torch.Tensor]:
    """Rename the tensors of a model to the names of a different project."""
    state = {}
    for name, tensor in model.state_dict().items():
        root = next(root for root in roots if name == root or name.startswith(f"{root}."))
        name = f"{roots[root]}{name.removeprefix(root)}".removeprefix(".")
        if name.startswith("visual.blocks."):
            for ours, theirs in parts.items():
                name = name.replace(ours, theirs)
        state[f"module.{name}"] = tensor[None] if name.endswith(("pos_embed", "temporal_embed")) else tensor
    return state


@pytest.mark.usefixtures("complete_tiny")
@pytest.mark.parametrize(
    ("project", "roots", "is_divided"),
    [pytest.param("AVION", AVION, False, marks=pytest.mark.nightly), ("LaViLa", LAVILA, True)],
)
def test_a_file_of_avion_or_lavila_is_scored_and_embedded_as_its_model(
    moving: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    project: str,
    roots: dict[str, str],
    is_divided: bool,
) -> None:
    size = size_of("tiny", Towers())
    size = replace(
        size,
        # The models of these projects have heads of width 64, which cannot be read from the tensors.
        video=replace(size.video, is_divided=is_divided, trunk=replace(size.video.trunk, num_heads=2)),
        text=replace(size.text, trunk=replace(size.text.trunk, num_heads=2)),
    )
    activation: Any = "quick_gelu" if is_divided else "gelu"
    ours = our_model(num_frames=4, size=size, activation=activation, video_eps=1e-6)
    file = tmp_path / "checkpoint_best.pt"
    torch.save({"state_dict": rename_tensors(ours, roots, LAVILA_PARTS), "epoch": 3, "args": Namespace(lr=3e-5)}, file)

    model = load_model(file)
    assert model.settings.num_frames == 4 and model.settings.init.pixel_mean == MISTYPED_MEAN
    clips = torch.randn(2, 3, 4, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_video(clips), ours.embed_video(clips))
        tokens = torch.from_numpy(load_tokenizer()("a dog catches a frisbee"))[None]
        torch.testing.assert_close(model.encode_text(["a dog catches a frisbee"]), ours.embed_text(tokens))
    result = score(capsys, "retrieval", file, "--shards", moving, "--num-frames", 16)
    assert project in result["weights"] and "T = 16 frames" in result["clip"] and result["overrides"]
    assert score(capsys, "zero-shot", file, "--shards", moving, "--label", "noun")["num_clips"] == 12
    if is_divided:
        assert train("export", file, "--format", "hf", "--out", tmp_path / "out") == 2
        assert "LaViLa's divided attention" in capsys.readouterr().err


def test_a_tag_of_open_clip_is_its_model(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is read from open_clip's cache, in the layout of that cache."""
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
    vision = {"image_size": 48, "layers": 2, "width": 96, "head_width": 24, "patch_size": 24}
    theirs = open_clip_model("small-clip", tmp_path, text_cfg=text, vision_cfg=vision, quick_gelu=True)
    cache = tmp_path / ".cache" / "clip"
    cache.mkdir(parents=True)
    torch.save(theirs.state_dict(), cache / "small-clip.pt")
    monkeypatch.setenv("HOME", str(tmp_path))
    entry = {"url": "https://nowhere.invalid/small-clip.pt", "quick_gelu": True, "mean": MISTYPED_MEAN}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small-clip", {"here": entry})

    model = load_model("small-clip:here", num_frames=1)
    assert (model.settings.size_px, model.settings.init.pixel_mean) == (48, MISTYPED_MEAN)
    pictures = torch.randn(3, 3, 48, 48)
    texts = ["a square", "it moves to the left"]
    with torch.no_grad():
        expected = theirs.encode_image(pictures, normalize=True)
        torch.testing.assert_close(model.encode_video(pictures[:, :, None]), expected, atol=1e-5, rtol=0)
        expected = theirs.encode_text(open_clip.get_tokenizer("ViT-B-16")(texts), normalize=True)
        torch.testing.assert_close(model.encode_text(texts), expected, atol=1e-5, rtol=0)
    result = score(capsys, "retrieval", "small-clip:here", "--shards", moving)
    assert result["source"] == "small-clip:here" and "T = 4 frames" in result["clip"] and "48 px" in result["clip"]
    out = tmp_path / "exported"
    assert train("export", "small-clip:here", "--format", "hf", "--out", out) == 0
    assert load_model(out, num_frames=1).identity == model.identity
    (cache / "small-clip.pt").unlink()
    capsys.readouterr()
    assert train("eval", "retrieval", "small-clip:here", "--shards", moving) == 2
    assert "small-clip:here is not in the cache and cannot be downloaded" in capsys.readouterr().err

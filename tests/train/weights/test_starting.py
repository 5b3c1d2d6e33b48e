"""Training runs that start from weights, by command line: what is copied, reported, stored and rejected."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from clipmill.manifests.errors import UserError
from clipmill.train.augment import model_input
from clipmill.train.config.files import load_settings
from clipmill.train.config.model import DualEncoderInit, Towers
from clipmill.train.losses.settings import Loss
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import DualEncoder, size_of
from clipmill.train.run.checkpoint import latest_checkpoint, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import effective_settings
from clipmill.train.weights.conversion import LOGIT_SCALE, TEMPORAL_EMBEDDING
from clipmill.train.weights.loading import fit_to
from clipmill.train.weights.open_clip import MISTYPED_MEAN, to_open_clip
from clipmill.train.weights.sources import complete_weights, open_weights
from tests.train.running import facts, steps, train
from tests.train.weights.test_avion import lavila_state

SMALL = ["--model", "tiny", "--num-frames", "2", "--size-px", "32", "--batch", "4", "--lr", "1e-9", "--steps", "1"]
TEMPERATURE, WIDTH = 0.025, 48  # not the width of --model tiny


def tiny_weights() -> dict[str, torch.Tensor]:
    """Make the tiny model's weights under our names, with a temperature and projections of a different width."""
    torch.manual_seed(99)
    size = size_of("tiny", Towers(temporal="random", embedding_width=WIDTH))
    model = DualEncoder(size, image_px=32, num_frames=2, attend=attend_with_sdpa)
    return {**model.state_dict(), LOGIT_SCALE: -torch.tensor(TEMPERATURE).log()}


def write_open_clip(path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in to_open_clip(tiny_weights()).items()}, path)
    return path


def write_avion(path: Path) -> Path:
    weights = tiny_weights()
    state = {name.replace("video.", "visual.").replace("text.", "textual."): tensor for name, tensor in weights.items()}
    state["visual.image_projection"] = state.pop("visual.proj")
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    return path


def test_a_run_starts_from_weights_says_so_and_goes_on_without_them(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    means: list[Any] = []
    whole = model_input.to_model_input

    def spy(*arguments: Any, mean: Any, **options: Any) -> Any:
        means.append(mean)
        return whole(*arguments, mean=mean, **options)

    monkeypatch.setattr("clipmill.train.engine.task.to_model_input", spy)
    weights = write_avion(tmp_path / "avion.pt")
    out = tmp_path / "run"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *SMALL, "--init.weights", weights) == 0
    assert set(means) == {MISTYPED_MEAN}
    printed = capsys.readouterr().out
    assert "avion.pt (AVION)" in printed and "tensors of the model copied unchanged" in printed
    assert "108.33 / 255" in printed and "initial temperature 0.025" in printed
    settings = load_settings(out / "settings.yaml", DualEncoderSettings)
    assert (settings.towers.activation, settings.towers.video_norm_eps) == ("gelu", 1e-6)
    assert settings.towers.embedding_width == WIDTH
    assert settings.init.pixel_mean == MISTYPED_MEAN and settings.loss.temperature == pytest.approx(TEMPERATURE)
    run = RunFolder(out)
    weights_fact = json.loads(run.facts.read_text())["weights"]
    assert weights_fact["source"].endswith("(AVION)") and weights_fact["changes"] == []
    # The step is so small that the weights are still the initial ones.
    assert read_lines(run.metrics)[0]["temperature"] == pytest.approx(TEMPERATURE)
    path = latest_checkpoint(run.checkpoints)
    assert path is not None
    trained, first = read_weights(path), tiny_weights()
    assert all(torch.allclose(tensor, first[name], atol=1e-7) for name, tensor in trained.items())
    weights.unlink()
    assert train("dual-encoder", "--out", out, "--resume") == 0
    assert json.loads(run.facts.read_text())["weights"] == weights_fact


def test_the_text_tower_starts_from_a_source_of_its_own(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of adapters reads both sources again."""
    video, text, tower = write_avion(tmp_path / "avion.pt"), tmp_path / "text.safetensors", tmp_path / "tower.pt"
    others = {name: tensor + 0.5 for name, tensor in tiny_weights().items()}
    save_file({name: tensor.contiguous() for name, tensor in to_open_clip(others).items()}, text)
    torch.save({name: tensor for name, tensor in torch.load(video)["state_dict"].items() if "visual" in name}, tower)
    words = ["dual-encoder", "--shards", data_dir, *SMALL, "--lora.rank", "2", "--out"]
    assert train(*words, tmp_path / "run", "--init.weights", video, "--init.text", text) == 0
    assert "avion.pt (AVION), with the text tower of" in capsys.readouterr().out
    after, first = complete_weights(RunFolder(tmp_path / "run").require_checkpoint()), tiny_weights()
    for name, weight in after.items():
        expected = others[name] if name.startswith("text.") else first[name]
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    for flags, problem in (
        (("--init.text", text), f"--init.text is {text}, but the video tower has no weights"),
        (("--init.weights", text, "--init.text", tower), "has no text tower"),
        (("--init.weights", text, "--init.text", "nowhere"), "cannot read the weights nowhere"),
        (
            ("--init.weights", text, "--init.text", text, "--text-tower", "frozen"),
            "but --text-tower frozen uses stored embeddings",
        ),
    ):
        assert train(*words, tmp_path / "none", *flags) == 2
        assert problem in capsys.readouterr().err and not (tmp_path / "none").exists()
    text.unlink()
    assert train("eval", "retrieval", tmp_path / "run") == 2
    assert f"hint: restore the weights that the run started from: {video}, {text}" in capsys.readouterr().err


def test_the_user_names_what_may_differ_in_one_flag(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {**tiny_weights(), "head.weight": torch.ones(2, 3)}
    del weights["video.ln_post.bias"]
    save_file({name: tensor.contiguous() for name, tensor in to_open_clip(weights).items()}, tmp_path / "w.safetensors")
    arguments = ["--shards", data_dir, "--out", tmp_path / "run", *SMALL, "--init.weights", tmp_path / "w.safetensors"]
    assert train("dual-encoder", *arguments) == 2
    assert "1 missing (video.ln_post.bias); 1 unexpected (head.weight)" in capsys.readouterr().err
    assert train("dual-encoder", *arguments, "--init.allow", "head.*", "video.ln_post.bias") == 0
    printed = capsys.readouterr().out
    assert (
        "\n  new, not in the weights  video.ln_post.bias" in printed
        and "\n  not used                 head.weight" in printed
    )
    settings = load_settings(tmp_path / "run" / "settings.yaml", DualEncoderSettings)
    assert settings.init.allow == ("head.*", "video.ln_post.bias")
    changes = json.loads((tmp_path / "run" / "run.json").read_text())["weights"]["changes"]
    whys = {change["name"]: change["why"] for change in changes}
    assert whys["video.ln_post.bias"] == "allowed by --init.allow video.ln_post.bias"


def test_what_does_not_fit_leaves_no_run_behind(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_open_clip(tmp_path / "w.safetensors")
    arguments = ["--shards", data_dir, "--out", tmp_path / "run", *SMALL[2:], "--model", "s16"]
    assert train("dual-encoder", *arguments, "--init.weights", weights) == 2
    printed = capsys.readouterr()
    error, hint = printed.err.splitlines()
    assert (
        "does not fit the model (weights: video with width 128 and 2 blocks" in error
        and "width 384 and 12 blocks" in error
    )
    assert "--model" in hint and "DIFFERENT SHAPE" in printed.out
    assert train("dual-encoder", *arguments, "--init.weights", tmp_path / "none.pt") == 2
    assert "cannot read the weights" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def settings_from(path: Path, say: Callable[[str], None] = lambda line: None, **changes: Any) -> DualEncoderSettings:
    settings = DualEncoderSettings(init=DualEncoderInit(weights=str(path)), model="tiny", **changes)
    return effective_settings(settings, open_weights(settings.init), say=say)


def test_what_the_user_said_goes_before_the_weights_and_is_said(tmp_path: Path) -> None:
    messages: list[str] = []
    path = write_avion(tmp_path / "avion.pt")
    settings = settings_from(path, messages.append, towers=Towers(activation="quick_gelu"))
    assert (settings.towers.activation, settings.towers.video_norm_eps) == ("quick_gelu", 1e-6)
    assert (
        "weights: they were trained with gelu, but --towers.activation is quick_gelu; the flag takes precedence"
        in messages
    )


def test_weights_that_say_no_activation_are_remarked_on(tmp_path: Path) -> None:
    messages: list[str] = []
    settings = settings_from(write_open_clip(tmp_path / "w.safetensors"), messages.append)
    assert settings.towers.activation is None
    assert any("the activation is not recorded" in line for line in messages)


def write_hugging_face(path: Path, *, max_shard_size: str = "1GB") -> Path:
    """Write a folder as transformers does, for a CLIPModel with the tiny model's towers."""
    from transformers import CLIPConfig, CLIPModel

    size = size_of("tiny", Towers())
    video, text = (
        {
            "hidden_size": trunk.width,
            "intermediate_size": 4 * trunk.width,
            "num_attention_heads": trunk.num_heads,
            "num_hidden_layers": trunk.depth,
            "hidden_act": "gelu",
        }
        for trunk in (size.video.trunk, size.text.trunk)
    )
    config = CLIPConfig(
        text_config={**text, "eos_token_id": 49407},
        vision_config={**video, "image_size": 32, "patch_size": 16},
        projection_dim=WIDTH,
        logit_scale_init_value=-math.log(TEMPERATURE),
    )
    CLIPModel(config).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def write_shards(path: Path) -> Path:
    """Write the same model in several files."""
    assert not (write_hugging_face(path, max_shard_size="1MB") / "model.safetensors").exists()
    return path


def write_lavila(path: Path) -> Path:
    """Write a complete CLIP under LaViLa's names; its towers are smaller."""
    state = {**lavila_state(), "image_projection": torch.ones(64, WIDTH), "text_projection": torch.ones(48, WIDTH)}
    state[LOGIT_SCALE] = -torch.tensor(TEMPERATURE).log()
    torch.save({"epoch": 5, "state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    return path


@pytest.mark.parametrize("write", [write_open_clip, write_avion, write_hugging_face, write_shards, write_lavila])
def test_projections_and_temperature_are_those_of_the_weights_whatever_the_model_is_called(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    messages: list[str] = []
    settings = settings_from(write(tmp_path / "weights"), messages.append)
    assert settings.towers.embedding_width == WIDTH
    assert settings.loss.temperature == pytest.approx(TEMPERATURE)
    source = open_weights(settings.init)
    assert source is not None
    if write is not write_lavila:
        size = size_of(settings.model, settings.towers)
        model = DualEncoder(size, image_px=32, num_frames=2, attend=attend_with_sdpa, towers=settings.towers)
        changes = fit_to(model, source, say=messages.append).fitted.changes
        assert [change.name for change in changes if change.name != TEMPORAL_EMBEDDING] == []
    assert not any("new projection" in line or "not used" in line for line in messages), messages


def test_a_run_of_another_embedding_width_is_gone_on_from_as_it_is(data_dir: Path, tmp_path: Path) -> None:
    flags = ("--shards", data_dir, *SMALL, "--loss.temperature", TEMPERATURE)
    first, second = tmp_path / "first", tmp_path / "second"
    assert train("dual-encoder", *flags, "--out", first, "--towers.embedding-width", WIDTH) == 0
    assert train("dual-encoder", *flags[:-2], "--out", second, "--init.weights", first) == 0
    weights = facts(second)["weights"]
    assert weights["changes"] == [] and weights["logit_scale"] == pytest.approx(-math.log(TEMPERATURE), rel=1e-5)
    assert steps(second)[0]["temperature"] == pytest.approx(TEMPERATURE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": Loss(temperature=0.5)}, "--loss.temperature is 0.5"),
        ({"loss": Loss(kind="fastclip-v3")}, "--loss.kind fastclip-v3 does not start from this temperature"),
        ({"towers": Towers(embedding_width=64)}, "the projections are new"),
        ({"text_tower": "frozen"}, "stored text embeddings replace the text tower"),
    ],
)
def test_a_temperature_that_is_not_used_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    messages: list[str] = []
    settings = settings_from(write_open_clip(tmp_path / "w.safetensors"), messages.append, **changes)
    assert settings.loss.temperature == changes.get("loss", Loss()).temperature
    assert f"weights: temperature 0.025 is not used: {reason}" in messages
    if "towers" in changes:
        assert (
            "weights: they were trained with 48, but --towers.embedding-width is 64; the flag takes precedence"
            in messages
        )


def test_text_norms_of_another_eps_are_refused(tmp_path: Path) -> None:
    source = open_weights(DualEncoderInit(weights=str(write_open_clip(tmp_path / "w.safetensors"))))
    assert source is not None
    odd = replace(source, facts=replace(source.facts, text_eps=1e-12))
    with pytest.raises(UserError, match="layer norms have eps 1e-12"):
        effective_settings(DualEncoderSettings(), odd, say=lambda line: None)

"""Settings of `train mae`: defaults that other flags do not change, and mistakes that are reported at the start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.files import load_settings, preset_path, save_settings
from clipmill.train.config.training import OptimizerSettings
from clipmill.train.tasks.mae.spec import (
    MaeOptimizer,
    MaeSettings,
    check_mask,
    flags_without_effect,
    num_masked_patches,
)
from tests.train.running import train


@pytest.fixture
def chosen_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[MaeSettings]:
    """Return the settings that the command would train with."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    given: list[MaeSettings] = []
    monkeypatch.setattr(
        "clipmill.train.commands.launch.launch", lambda spec, settings, resume, provenance: given.append(settings)
    )
    return given


def test_a_flag_leaves_the_defaults_beside_it_as_they_are(chosen_settings: list[MaeSettings], tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("optimizer: {schedule: linear}\ntowers: {drop_path: 0.1}\n")
    nested = ("--optimizer.schedule", "linear", "--towers.drop-path", 0.1)
    assert train("mae", *nested) == 0 and train("mae", "--config", tmp_path / "some.yaml") == 0
    assert train("mae") == 0
    for settings in chosen_settings[:2]:
        assert settings == replace(
            MaeSettings(),
            optimizer=MaeOptimizer(schedule="linear"),
            towers=replace(MaeSettings().towers, drop_path=0.1),
        )
        assert settings.optimizer.number("beta2") == 0.95 and settings.optimizer.lr_batch == 256
        assert settings.towers.kind == "videomae"
    assert chosen_settings[2] == MaeSettings()
    save_settings(chosen_settings[0], tmp_path / "settings.yaml")
    assert load_settings(tmp_path / "settings.yaml", MaeSettings) == chosen_settings[0]


def test_the_learning_rate_grows_with_the_batch() -> None:
    assert MaeOptimizer().lr_scale(1024) == 4 and MaeOptimizer(lr_batch=64).lr_scale(16) == 0.25
    assert OptimizerSettings().lr_scale(1024) == 1
    # Each optimizer accepts requests for its own hyperparameters.
    assert MaeOptimizer(name="sgd").number("momentum") == 0.9 and MaeOptimizer(name="lion").number("beta2") == 0.99
    assert MaeOptimizer(beta2=0.999).number("beta2") == 0.999


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (("--mask-ratio", 1), "--mask-ratio is 1.0", "some are visible"),
        (("--mask-ratio", "nan"), "--mask-ratio is nan", "below 1"),
        (("--mask-ratio", 0.004), "masks 0 of the 196 cubes in a time step", "use 0.0052 or more"),
        (("--size-px", 16), "masks 0 of the 1 cube in a time step", "larger frames"),
        (("--size-px", 100), "--size-px 100 is not a multiple of 16", "a multiple of 16"),
        (("--num-frames", 15), "--num-frames 15 is not a multiple of 2", "multiple of 2"),
        (("--towers.tubelet", 3), "--num-frames 16 is not a multiple of 3", "multiple of 3"),
        (("--towers.kind", "clip"), "--towers.kind is clip", "omit it"),
        (("--towers.patch-dropout", 0.5), "does not apply to a videomae tower", "omit it: train mae supports only"),
        (("--towers.temporal", "random"), "does not apply to a videomae tower", "omit it: train mae supports only"),
        (("--repeat", "masks"), "--samples-per-chunk is 1", "--samples-per-chunk 2"),
        (("--decoder-mask", "running-cell", "--decoder-mask-ratio", 0.3), "--decoder-mask-ratio is 0.3", "0.25, 0.5"),
        (("--decoder-mask", "random", "--decoder-mask-ratio", 0), "--decoder-mask-ratio is 0", "above 0"),
        (("--augment.erase", 0.25), "noise in erased boxes cannot be reconstructed", "omit it"),
        (("--decoder-depth", 0), "--decoder-depth is 0", "from 1 to"),
        (("--optimizer.lr-batch", 0), "--optimizer.lr-batch is 0", "from 1 to"),
        (("--best", "val/x", "--evaluate.every", 1, "--evaluate.labels", "shape"), "--best val/x", "shape_knn_top1"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], flags: tuple[Any, ...], message: str, hint: str
) -> None:
    assert train("mae", *flags) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and message in first and second.startswith("hint: ") and hint in second


def test_the_help_names_no_flag_that_is_always_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("mae", "--help-all") == 0
    printed = capsys.readouterr().out
    assert "--towers.drop-path " in printed
    for name in ("kind", "temporal", "embedding-width", "packed-text", "patch-dropout"):
        assert f"--towers.{name}" not in printed


def test_masks_of_every_grid_hide_something_and_leave_something_with_the_ratio_of_the_hint() -> None:
    assert num_masked_patches(0.9, num_patches=196) == 176
    for num_patches in range(2, 400):
        with pytest.raises(UserError) as caught:
            check_mask(1e-9, num_patches=num_patches)
        least = float((caught.value.hint or "").split()[1])
        check_mask(least, num_patches=num_patches)
        check_mask(0.9999999, num_patches=num_patches)


def test_flags_that_the_other_input_is_about_are_said() -> None:
    latents = MaeSettings(input="latents", segment="2s", crop="centre", samples_per_chunk=2, repeat="masks")
    assert flags_without_effect(latents) == ["--crop", "--samples-per-chunk", "--repeat"]
    assert flags_without_effect(MaeSettings(segment="2s", crop="centre")) == ["--segment"]
    assert flags_without_effect(MaeSettings()) == [] == flags_without_effect(MaeSettings(input="latents"))


def test_a_preset_may_be_one_command_s_own() -> None:
    assert preset_path("tiny", "mae").stem == "tiny-mae" and preset_path("tiny", "classify").stem == "tiny"
    assert preset_path("mae-latents", "mae").stem == "mae-latents"

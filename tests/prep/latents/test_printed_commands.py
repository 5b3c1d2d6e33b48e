"""Tests that printed commands contain valid paths of weights, and that settings differ only if their values differ."""

import shlex
from pathlib import Path

import pytest

from clipmill.prep.core.column import recipe_differences
from clipmill.shards.reader import Variant
from tests.prep.latents.video_vaes import save_model
from tests.prep.running import prep_here
from tests.prep.sets import ShardSet, flip


def test_the_next_command_finds_the_folder_and_equal_statistics_are_no_change(
    shard_set: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, elsewhere = save_model("AutoencoderKLWan", tmp_path / "my models" / "vae's"), tmp_path / "work"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    flags = ("--size", 32, "--fps", 8, "--segment", "1s", "--data", shard_set.data)
    engine = ("--engine", "processes", "--workers", 1)
    planned = prep_here("plan", "latents", "--vae", "../my models/vae's", *flags, "--json").summary
    command = shlex.split(planned["next"])
    assert command[:2] == ["prep", "latents"] and Path(command[command.index("--vae") + 1]) == vae
    prep_here(*command[1:], *engine)
    made = Variant.open(shard_set.data, column="latents").directory
    assert made.name == planned["variant"]
    settings = prep_here("plan", "latents", "--vae", vae, *flags, "--seed", 1, "--crop", "random").stdout
    assert "crop: centre → random" in settings and "latents_mean" not in settings
    flip(next(made.glob("000000-*.tar")), 600)
    repair = prep_here("verify", "--data", shard_set.data, status=1).stderr.partition("run: ")[2].splitlines()[0]
    (elsewhere / "deeper").mkdir()
    monkeypatch.chdir(elsewhere / "deeper")
    prep_here(*shlex.split(repair)[1:], *engine)
    prep_here("verify", "--data", shard_set.data)
    prep_here("retry", "--column", "latents", "--data", shard_set.data, "--engine", "processes")


def test_differences_are_those_of_the_stored_form() -> None:
    assert recipe_differences({"mean": [0.5, 1.0], "a": 1}, {"mean": (0.5, 1.0), "a": 2}) == ["a: 1 → 2"]

"""A data folder made before records had checksums still opens, is planned, verified, extended and trained on.

`old_data_folder.tar.xz` was made at commit 893498c: two videos of 2 and 1.5 s in two splits, three
captions, chunks of 1 s at 32 pixels, latents of the tiny VAE, and embeddings of a small random text tower.
"""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from manifests.store import captions_path, read_captions, read_manifest, read_rejected, read_videos
from prep.core.layout import read_layout
from prep.core.run import Job, execute
from prep.latents.plan import make_latents_plan
from prep.latents.recipe import latents_recipe_from_dict
from prep.sources.table import read_probes
from prep.text.plan import make_text_plan
from prep.text.recipe import ResolvedTextRecipe
from prep.video.column import COLUMN
from prep.video.planning import Planned, make_plan
from prep.video.recipe import ResolvedRecipe, recipe_from_dict
from shards.contents import read_contents
from shards.dataset import current_variant
from shards.reader import Variant
from tests.conftest import ROOT
from tests.prep.running import contents, prep_here
from train.cli import main

COLUMNS = ("video", "latents", "text")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "old_data_folder.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "data"


def planned(data: Path) -> Planned:
    """The plan of its own recipe, whatever ffmpeg there is."""
    stored = Variant.open(data).recipe
    return make_plan(data, ResolvedRecipe(settings=recipe_from_dict(stored).settings(), ffmpeg=stored["ffmpeg"]))


def nothing_to_do(data: Path) -> "Job[Any]":
    plan = planned(data)
    return Job(
        column=COLUMN,
        data_dir=data,
        variant_dir=plan.variant_dir,
        recipe=plan.plan.recipe.as_dict(),
        shards=plan.plan.shards,
        make=lambda work: pytest.fail("nothing is to be made"),
        task=lambda shard: pytest.fail("nothing is to be made"),
        video_ids=lambda shard: (),
        failed_before=[],
        chunk_s=1.0,
    )


def test_it_opens(data: Path) -> None:
    assert read_manifest(data)["next_caption_id"] == 3 and captions_path(data).is_file()
    assert read_captions(data)["text"].to_pylist() == ["first words", "last words", "other words"]
    assert (read_videos(data).num_rows, read_rejected(data).num_rows, read_probes(data).num_rows) == (2, 0, 2)
    assert [read_layout(path).num_rows for path in sorted((data / "layout").iterdir())] == [2, 2]
    for column in COLUMNS:
        variant = Variant.open(data, column=column).whole()
        assert len(list(variant.iterate())) == (2 if column == "text" else 4)
        assert variant.recipe and read_contents(variant.directory) is None


def test_it_is_whole_for_every_command_that_looks_after_it(data: Path) -> None:
    assert prep_here("verify", "--deep", "--data", data).stdout.count(": OK") == 3
    assert "4 chunks in 2 shards" in prep_here("status", "--data", data).stdout
    assert "nothing to remove" in prep_here("gc", "--data", data).stdout


def test_nothing_of_it_is_made_again(data: Path) -> None:
    """Its sources are long gone."""
    states = [shard.state for shard in planned(data).plan.shards]
    recipes = {column: Variant.open(data, column=column).recipe for column in COLUMNS}
    states += [shard.state for shard in make_latents_plan(data, latents_recipe_from_dict(recipes["latents"])).shards]
    text = recipes["text"]
    resolved = ResolvedTextRecipe(clip=text["clip"], clip_sha256=text["clip_sha256"], width=text["width"])
    states += [shard.state for shard in make_text_plan(data, resolved).shards]
    assert states == ["current"] * 6


def test_the_next_run_gives_it_a_list_of_its_commits(data: Path) -> None:
    before = contents(data)
    planned(data)  # records that the sources are away
    execute(nothing_to_do(data), pytest.fail)  # type: ignore[arg-type]
    after = contents(data)
    folder = f"video/{current_variant(data, 'video')}"
    assert after.keys() - before.keys() == {f"{folder}/contents.json", f"{folder}/chunks.arrow"}
    assert {name for name in before if before[name] != after[name]} == {"probes.parquet"}
    shutil.rmtree(data / folder / "commits")
    assert len(Variant.open(data).damaged) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-frames", "2", "--size-px", "32"),
        ("--input", "latents", "--text-tower", "frozen", "--segment", "1s", "--num-frames", "2"),
    ],
    ids=["chunks", "latents"],
)
def test_it_is_trained_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    steps = ("--model", "tiny", "--batch", "2", "--steps", "1", "--warmup-steps", "1")
    command = ["train", "dual-encoder", "--shards", data, "--out", tmp_path / "run", *steps, *flags]
    monkeypatch.setattr("sys.argv", list(map(str, command)))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code

"""Tests of `prep advise` on an index: the cost of clips from unchanged sources and from each recipe."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import pytest

from clipmill.prep.video.plan_report import Estimate
from clipmill.prep.video.reencoding import Advice, ClipCost, RecipeCost
from clipmill.shards.reader import Variant
from tests.prep.running import Ran, prep_here

Prep = Callable[..., Ran]
SOURCES = ClipCost(num_clips=100, num_videos=5, cpu_s=10.0, read_bytes=100_000)  # 0.1 s each
FAST = ClipCost(num_clips=50, num_videos=4, cpu_s=1.0, read_bytes=5_000)  # 0.02 s each
ENCODING = Estimate(core_hours=2.0, size_bytes=5e6, video_hours=1.0, num_trials=4)
ADVICE = Advice(SOURCES, 10**7, 3_000, "caption", {"balanced": RecipeCost(FAST, ENCODING)})


def words(advice: Advice) -> str:
    return "\n".join(advice.lines())


def test_reencoding_pays_when_the_saved_time_is_the_encoding_time() -> None:
    assert ADVICE.visits("balanced") == pytest.approx(7200 / (3_000 * (0.1 - 0.02)))
    assert "pays after 30 visits to each clip, with --recipe balanced and 0.5 times the bytes" in words(ADVICE)
    assert "one visit to each clip reads 3,000 clips, one for each caption" in words(ADVICE)
    assert "100 clips of 5 videos in 10.0 s of CPU time" in words(ADVICE)
    assert "cores for 20 clips/s" in words(replace(ADVICE, clips_per_s=20))
    line = next(line for line in words(replace(ADVICE, clips_per_s=20)).splitlines() if line.startswith("as they are"))
    assert line.split()[-1] == "2"  # cores: 20 clips of 0.1 s


def test_a_recipe_that_saves_nothing_never_pays() -> None:
    slow = replace(FAST, cpu_s=5.0)  # as slow as the sources
    advice = replace(ADVICE, recipes={"balanced": RecipeCost(slow, ENCODING)})
    assert advice.visits("balanced") is None and advice.values()["ways"]["balanced"]["pays_after"] is None
    assert "re-encoding never pays in CPU time" in words(advice) and "next" not in words(advice)
    assert "no section of a video could be encoded" in words(replace(ADVICE, recipes={}))


@pytest.fixture(scope="module")
def index_folder(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    """A folder with a video of 2 s and the data folder of its index."""
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "videos").mkdir()
    write_video(folder / "videos" / "a.mp4", seconds=2)
    prep_here("index", folder / "videos", "--data", folder / "data", "--len", "1s", "--engine", "processes")
    return folder


def test_the_figures_are_of_the_sources_and_of_trial_encodes(prep: Prep, index_folder: Path) -> None:
    values = prep("advise", "--data", index_folder / "data", "--batch", 8, "--step-time", 0.5, "--json").summary
    video = index_folder / "videos" / "a.mp4"
    assert (values["num_clips"], values["clips_of"], values["clips_per_s"]) == (2, "chunk", 16.0)
    sources, recipes = values["ways"].pop("as_they_are"), values["ways"]
    assert sources["size_bytes"] == video.stat().st_size
    assert (sources["num_clips"], sources["num_videos"]) == (8, 1)
    # A clip has at least the packets of 4 frames, and at most the packets of the complete video.
    with av.open(str(video)) as container:
        sizes = [packet.size for packet in container.demux(video=0) if packet.size]
    clip_bytes = sources["read_bytes"] / sources["num_clips"]
    assert 4 * min(sizes) <= clip_bytes <= sum(sizes)
    assert set(recipes) == {"balanced", "small", "fast"}
    for recipe in recipes.values():
        assert (recipe["num_trials"], recipe["num_videos"], recipe["num_clips"]) == (1, 1, 16)
        saved_s = 1 / sources["clips_per_cpu_s"] - 1 / recipe["clips_per_cpu_s"]
        pays_after = recipe["encoding_cpu_s"] / (2 * saved_s) if saved_s > 0 else None
        assert recipe["pays_after"] == (None if pays_after is None else pytest.approx(pays_after))
    variants = Variant.open(index_folder / "data").directory.parent.iterdir()
    assert [path.name for path in variants if path.is_dir()] == [Variant.open(index_folder / "data").directory.name]


def test_flags_of_disks_are_refused_and_a_changed_source_is_named(prep: Prep, index_folder: Path) -> None:
    data = index_folder / "data"
    assert "--read-speed has no effect on" in prep("advise", "--data", data, "--read-speed", 50, status=2).error
    video = index_folder / "videos" / "a.mp4"
    content = video.read_bytes()
    video.write_bytes(b"\0" * len(content))
    error = prep("advise", "--data", data, status=2).error
    assert "a clip of video a cannot be read" in error and "a.mp4" in error
    video.write_bytes(content)
    video.rename(video.with_name("c.mp4"))
    prep("manifest", "folder", video.parent, "--data", data, "--yes")
    assert "video a is not in the manifest" in prep("advise", "--data", data, status=2).error

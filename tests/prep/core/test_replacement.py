"""Tests of replacement: only a complete variant replaces the current one, and `prep gc` keeps the last complete one."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.sources import remote
from clipmill.shards.dataset import current_variant, list_variants, unfinished_variant
from clipmill.shards.reader import Variant
from tests.object_storage.faults import Fault, Faults
from tests.prep.running import Ran, manifest, prep_here

LEN = ("--len", "1s", "--preset", "ultrafast", "--short-side", "32")
OTHER = (*LEN, "--crf", "40")
THIRD = (*LEN, "--crf", "45")
NUM_CHUNKS = 6


def run(data: Path, *settings: object, command: str = "chunk", status: int = 0) -> Ran:
    return prep_here(command, "--data", data, "--engine", "processes", "--workers", 2, *settings, status=status)


def variants(data: Path) -> tuple[str | None, str | None]:
    """Return the current variant, and the unfinished variant next to it."""
    return current_variant(data, "video"), unfinished_variant(data, "video")


def num_samples(data: Path, variant: str | None, *, column: str = "video") -> int:
    return Variant.open(data, column=column, variant=variant).num_samples


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    """Create `made/videos` with three videos of two chunks and a truncated one; `made/data` has chunks and scores."""
    root = tmp_path_factory.mktemp("replaced")
    for number, name in enumerate("abc"):
        write_video(root / "videos" / f"{name}.mp4", seconds=2, first_number=1000 * number)
    content = (root / "videos" / "a.mp4").read_bytes()
    (root / "videos" / "short.mp4").write_bytes(content[: len(content) // 2])
    manifest(root / "data", root / "videos")
    run(root / "data", *LEN, status=1)
    run(root / "data", command="scores")
    return root


@pytest.fixture
def root(finished_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the data folder next to the videos, which a test may move."""
    shutil.copytree(finished_folder / "data", tmp_path / "data")
    yield tmp_path
    for path in tmp_path.glob("*.mp4"):
        path.rename(finished_folder / "videos" / path.name)


def test_a_variant_that_lacks_samples_for_a_while_does_not_take_the_place_of_a_complete_one(
    finished_folder: Path, root: Path
) -> None:
    data = root / "data"
    first = current_variant(data, "video")
    (finished_folder / "videos" / "b.mp4").rename(root / "b.mp4")
    ran = run(data, *OTHER, status=1)
    other = variants(data)[1]
    assert variants(data) == (first, other) and other is not None and other != first
    assert (num_samples(data, first), num_samples(data, other)) == (NUM_CHUNKS, NUM_CHUNKS - 2)
    assert f"{first} stays the current variant: it has samples that {other} lacks (1 x source_missing)" in ran.stdout
    assert ran.stdout.splitlines()[-1] == f"next     prep retry --data {data}"
    assert "quickstart" not in ran.stdout

    shown = prep_here("status", "--data", data)
    assert f"{first} (current)" in shown.stdout and f"{other}\n" in shown.stdout
    assert f"not current: {first} has samples that this variant lacks (1 x source_missing)" in shown.stdout
    assert shown.stdout.splitlines()[-1] == f"next      prep retry --data {data}"
    assert "nothing to do" in run_plan(data, "scores").stdout, "the scores of the current chunks are not usable"

    kept = prep_here("gc", "--data", data).stdout
    assert set(list_variants(data, "video")) == {first, other} and "nothing to remove" in kept
    # A second attempt with the same settings changes nothing while the source is missing, nor do third settings.
    run(data, *OTHER, status=1)
    assert variants(data) == (first, other)
    run(data, *THIRD, status=1)
    prep_here("gc", "--data", data)
    assert first in list_variants(data, "video") and current_variant(data, "video") == first
    run(data, *OTHER, status=1)

    (root / "b.mp4").rename(finished_folder / "videos" / "b.mp4")
    retried = prep_here("retry", "--data", data, "--engine", "processes", status=1)  # the truncated video still fails
    assert variants(data) == (other, None) and num_samples(data, other) == NUM_CHUNKS
    assert "stays the current" not in retried.stdout
    prep_here("gc", "--data", data)
    assert list_variants(data, "video") == [other]


def run_plan(data: Path, column: str) -> Ran:
    return prep_here("plan", column, "--data", data)


def test_a_source_that_is_damaged_for_good_blocks_no_variant(root: Path) -> None:
    data = root / "data"
    first = current_variant(data, "video")
    run(data, *OTHER, status=1)
    assert variants(data)[0] != first and variants(data)[1] is None
    prep_here("gc", "--data", data)
    assert first not in list_variants(data, "video")


def test_the_first_variant_is_current_although_it_is_incomplete(finished_folder: Path, tmp_path: Path) -> None:
    (videos := tmp_path / "videos").mkdir()
    for path in (finished_folder / "videos").iterdir():
        shutil.copyfile(path, videos / path.name)
    manifest(data := tmp_path / "data", videos)
    prep_here("plan", *LEN, "--data", data)
    (videos / "b.mp4").unlink()
    run(data, *LEN, status=1)
    first = current_variant(data, "video")
    assert first is not None and num_samples(data, first) == NUM_CHUNKS - 2
    # Both variants are incomplete: the second one lacks samples of the first one, but the first one lacks none of the
    # second.
    (videos / "c.mp4").rename(tmp_path / "c.mp4")
    run(data, *OTHER, status=1)
    assert current_variant(data, "video") == first
    (tmp_path / "c.mp4").rename(videos / "c.mp4")
    run(data, *OTHER, status=1)
    other = current_variant(data, "video")
    assert other != first and num_samples(data, other) == NUM_CHUNKS - 2


def test_gc_keeps_a_variant_with_samples_that_the_current_one_has_lost(finished_folder: Path, root: Path) -> None:
    data = root / "data"
    first = current_variant(data, "video")
    run(data, *OTHER, status=1)
    other = current_variant(data, "video")
    (finished_folder / "videos" / "b.mp4").rename(root / "b.mp4")
    for tar in (data / "video" / str(other)).glob("*.tar"):
        tar.unlink()
    run(data, *OTHER, status=1)
    assert current_variant(data, "video") == other and num_samples(data, other) == NUM_CHUNKS - 2
    stdout = prep_here("gc", "--data", data).stdout
    assert f"video/{first}: it has samples that the current variant lacks (1 x source_missing)" in stdout
    assert first in list_variants(data, "video")
    (root / "b.mp4").rename(finished_folder / "videos" / "b.mp4")
    prep_here("retry", "--data", data, "--engine", "processes", status=1)
    prep_here("gc", "--data", data)
    assert list_variants(data, "video") == [other]


def test_undetected_shots_of_a_source_that_is_away_block_a_variant(finished_folder: Path, root: Path) -> None:
    data = root / "data"
    first = current_variant(data, "video")
    (finished_folder / "videos" / "b.mp4").rename(root / "b.mp4")
    run(data, *LEN, "--cut", "shots", status=1)
    assert current_variant(data, "video") == first
    (root / "b.mp4").rename(finished_folder / "videos" / "b.mp4")
    prep_here("retry", "--data", data, "--engine", "processes", status=1)
    assert current_variant(data, "video") != first


@pytest.mark.usefixtures("few_retries")
def test_refused_credentials_do_not_replace_a_complete_variant(
    finished_folder: Path, tmp_path: Path, bucket: str, faults: Faults
) -> None:
    remote._open_bucket.cache_clear()
    objects = open_objects(bucket)
    for name in "abc":
        objects.write(f"videos/{name}.mp4", (finished_folder / "videos" / f"{name}.mp4").read_bytes())
    prep_here("manifest", "folder", f"{bucket}/videos", "--data", data := tmp_path / "data")
    run(data, *LEN)
    first = current_variant(data, "video")
    faults.set(Fault("error", path=r"videos/[bc]\.mp4", status=403, code="AccessDenied"))
    ran = run(data, *OTHER, status=1)
    other = variants(data)[1]
    assert current_variant(data, "video") == first and num_samples(data, other) == 2
    assert f"{first} stays the current variant: it has samples that {other} lacks" in ran.stdout
    prep_here("gc", "--data", data)
    assert set(list_variants(data, "video")) == {first, other}
    faults.set()
    prep_here("retry", "--data", data, "--engine", "processes")
    assert variants(data) == (other, None) and num_samples(data, other) == NUM_CHUNKS

"""Assembling the kit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.environment import commit
from manifests.errors import UserError
from scripts.gpu_kit.build import CONTENTS, add_data, build, copy_checkout, finish
from scripts.gpu_kit.data import DataSize, natural_videos, piece_begins_s


def test_the_checkout_has_what_git_tracks_and_tells_its_commit(repository: Path, tmp_path: Path) -> None:
    remark = copy_checkout(tmp_path)
    assert remark.startswith(f"commit {commit()}")
    checkout = tmp_path / "checkout"
    assert (checkout / "train/presets").is_dir()
    assert not (checkout / ".git").exists()
    program = "from benchmarks.environment import commit; print(commit())"
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, env=environment, check=True, capture_output=True, text=True
    )
    assert told.stdout.strip() == commit()
    assert os.access(tmp_path / "run.sh", os.X_OK)


def test_the_summary_gives_sizes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/chunks.tar").write_bytes(bytes(1_500_000))
    finish(tmp_path, {"data": "10 made videos"})
    assert "data          1.5  10 made videos\n" in (tmp_path / CONTENTS).read_text()


def test_a_kit_over_the_limit_is_refused_with_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/av.whl").write_bytes(bytes(2_100_000))
    with pytest.raises(UserError, match=r"has 2\.1 MB, but the limit is 2 MB(.|\n)*wheels +2\.1"):
        finish(tmp_path, {"wheels": ""}, max_bytes=2_000_000)
    assert not (tmp_path / CONTENTS).exists()


def test_a_folder_that_is_no_kit_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not a GPU kit"):
        build(tmp_path, videos=None, size=DataSize())
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_without_videos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="no videos in"):
        natural_videos(tmp_path)


@pytest.mark.parametrize(("videos", "num_pieces"), [("nowhere", 3), ("file", 3), ("empty", 3), ("videos", 0)])
def test_a_wrong_request_is_refused_before_anything_is_made(tmp_path: Path, videos: str, num_pieces: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/one.mp4").touch()
    with pytest.raises(UserError):
        build(tmp_path / "build/kit", videos=tmp_path / videos, size=DataSize(num_pieces=num_pieces))
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(("may_take_fewer", "num_pieces"), [(True, 2), (False, 4)])
def test_a_kit_has_as_many_pieces_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_take_fewer: bool, num_pieces: int
) -> None:
    def make(data: Path, *, natural: list[Path], size: DataSize, scratch: Path) -> int:
        data.mkdir()
        taken = min(4, size.num_pieces)
        (data / "chunks.tar").write_bytes(bytes(1000 * taken))
        return taken

    monkeypatch.setattr("scripts.gpu_kit.build.make_data", make)
    (tmp_path / "run.sh").write_bytes(bytes(500))
    found = add_data(
        tmp_path, natural=[], size=DataSize(), scratch=tmp_path, may_take_fewer=may_take_fewer, max_bytes=2500
    )
    assert found == num_pieces
    assert (tmp_path / "data/chunks.tar").stat().st_size == 1000 * num_pieces


@pytest.mark.parametrize(
    ("length_s", "begins_s"),
    [(4, [0]), (44, [0]), (45, [15, 30]), (90, [30, 45, 60, 75]), (100, [100 / 3 + 15 * n for n in range(4)])],
)
def test_pieces_lie_within_their_video(length_s: float, begins_s: list[float]) -> None:
    found = piece_begins_s(length_s, piece_s=15)
    assert found == pytest.approx(begins_s)
    assert length_s < 45 or found[-1] + 15 <= length_s

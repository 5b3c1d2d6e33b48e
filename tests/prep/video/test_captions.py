"""Tests that the captions of a shard are read only from the row groups that contain them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.manifests import caption_table
from clipmill.manifests.caption_table import CaptionChange, write_caption_table
from clipmill.prep.video import plan_inputs
from clipmill.prep.video.plan_inputs import CaptionGroups, caption_groups
from clipmill.prep.video.worker import captions_of

VIDEOS = [f"v{number}" for number in range(20)]


@pytest.fixture(params=["by video", "mixed", "none"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(caption_table, "ROWS_PER_GROUP", 8)
    rng = np.random.default_rng(0)
    of_rows = {"by video": np.repeat(np.arange(1, 19), 5), "mixed": rng.integers(0, 20, 90), "none": np.zeros(0, int)}
    videos = of_rows[request.param]
    begins = rng.integers(0, 5, len(videos)).astype(float)
    content = pa.table(
        {
            "video_id": pa.array([VIDEOS[video] for video in videos], pa.string()),
            "begin_s": begins,
            "end_s": np.where(begins == 3, np.inf, begins + 1),
            "text": pa.array([f"text {number}" for number in range(len(videos))], pa.string()),
            "source": pa.array(["a"] * len(videos), pa.string()),
        }
    )
    path, ids = tmp_path / "captions.parquet", np.arange(len(videos))
    change = CaptionChange(content, ids, next_id=len(ids), keep=None, keep_labels=False)
    write_caption_table(path, change, old_path=None, metadata={})
    return path


@pytest.mark.parametrize("ids_at_once", [3, 1 << 20])
def test_the_row_groups_of_a_video_hold_all_of_its_captions(
    table: Path, ids_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_inputs, "_IDS_AT_ONCE", ids_at_once)
    order = [*VIDEOS[::-1][:15], "a video without captions"]
    groups = caption_groups(table, pa.array(order))
    everything = range(pq.ParquetFile(table).num_row_groups)
    rows = pq.read_table(table).to_pylist()
    for needed_rows in ([0], [3, 4, 5], [15], [], list(range(16))):
        needed = groups.of_videos(np.array(needed_rows, np.int64))
        video_ids = [order[row] for row in needed_rows]
        captions_by_video = captions_of(table, video_ids, row_groups=needed)
        assert captions_by_video == captions_of(table, video_ids, row_groups=everything)
        mine = [(row["caption_id"], row["text"]) for row in rows if row["video_id"] in video_ids]
        assert sorted((caption.caption_id, caption.text) for of in captions_by_video.values() for caption in of) == mine
        assert all(
            of == sorted(of, key=lambda caption: (caption.begin_s, caption.caption_id))
            for of in captions_by_video.values()
        )
        holding = {row["caption_id"] // 8 for row in rows if row["video_id"] in video_ids}
        assert set(needed) == holding and list(needed) == sorted(needed)


def test_no_videos_need_no_row_groups() -> None:
    assert CaptionGroups(np.zeros(1, np.int64), np.zeros(0, np.int32)).of_videos(np.zeros(0, np.int64)) == ()

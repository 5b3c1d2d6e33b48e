"""Tests of the videos of a manifest, which a plan reads a few at a time."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.prep.video.plan import Videos

TABLE = pa.table(
    {
        "video_id": [f"v{number}" for number in range(10)],
        "path": [f"/{number}.mp4" for number in range(10)],
        "split": ["train", "val"] * 5,
    }
)


@pytest.fixture
def videos() -> Videos:
    file = io.BytesIO()
    pq.write_table(TABLE, file, row_group_size=4)
    return Videos(pq.ParquetFile(file), path=Path("videos.parquet"))


@pytest.mark.parametrize("rows", [[], [5], [0, 3, 4, 9], [9, 0, 4, 4, 8, 1], list(range(10))])
def test_videos_are_read_in_the_order_asked_for(videos: Videos, rows: list[int]) -> None:
    taken = videos.take(np.array(rows, np.int64), "path", "video_id")
    assert taken.to_pylist() == [{"path": f"/{row}.mp4", "video_id": f"v{row}"} for row in rows]


def test_ids_and_splits_are_those_of_all_videos(videos: Videos) -> None:
    assert (videos.ids.to_pylist(), videos.splits.to_pylist()) == (
        TABLE["video_id"].to_pylist(),
        TABLE["split"].to_pylist(),
    )
    assert len(videos) == 10 and videos.column("path").equals(TABLE["path"])

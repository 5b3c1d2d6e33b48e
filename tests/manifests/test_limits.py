"""Tests of the sizes beyond which tables are divided, or rejected by name."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.caption_table import captions_sha256
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import MAX_ROWS, MAX_TEXT_BYTES, check_table_size


def _digests(*, num_before: int) -> list[str]:
    """Return the digests of six videos.

    The first video has `num_before` captions, and the fourth has more captions than are read at a time.
    """
    count = 131_073
    video_rows = np.r_[np.zeros(num_before, np.int64), np.full(count, 3), 4]
    times = pa.array(np.r_[np.zeros(num_before), np.arange(count + 1.0)])
    text, video_id = (pa.array([what] * len(video_rows)).dictionary_encode() for what in ("text", "video"))
    captions = pa.table({"video_id": video_id, "begin_s": times, "end_s": times, "text": text, "source": text})
    ids = np.r_[np.arange(num_before) + count + 1, np.arange(count + 1)]
    return captions_sha256(captions, caption_ids=ids, video_rows=video_rows, num_videos=6)


def test_a_video_of_many_captions_has_its_own_digest_whatever_is_before_it() -> None:
    without, with_one = _digests(num_before=0), _digests(num_before=1)
    assert without[1:] == with_one[1:] and without[0] != with_one[0]
    assert without[0] == without[1] == without[2] == without[5] and len(set(without)) == 3


def test_more_rows_or_text_than_32_bits_can_number_are_refused_by_name() -> None:
    path, text = Path("videos.parquet"), pa.array(["x" * 1000] * 1000)
    check_table_size(path, num_rows=MAX_ROWS)
    with pytest.raises(UserError, match=r"videos\.parquet would have 2,147,483,648 rows"):
        check_table_size(path, num_rows=MAX_ROWS + 1)
    for count in (2147, 2148):  # the same megabyte repeated
        table = pa.table({"path": pa.chunked_array([text] * count)})
        if count * 1_000_000 <= MAX_TEXT_BYTES:
            check_table_size(path, num_rows=len(table), videos=table)
            continue
        with pytest.raises(UserError, match=r"the column path of .* has 2,148,000,000 bytes for 2,148,000 videos"):
            check_table_size(path, num_rows=len(table), videos=table)

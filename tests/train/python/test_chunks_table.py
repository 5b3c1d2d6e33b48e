"""`chunks_table`: every chunk with its captions, labels and scores."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from clipmill import UserError, chunks_table
from tests.shards.made_scores import write_scores
from tests.train.data.http_folder import HttpFolder
from tests.train.tiny_data import Caption, write_captions


def test_chunks_have_the_captions_on_show_and_their_labels(data_dir: Path, tmp_path: Path) -> None:
    data_copy, videos = tmp_path / "data", {"a": "train", "b": "train", "c": "train", "d": "val"}
    shutil.copytree(data_dir, data_copy)
    captions = [
        Caption("d", 1.0, 2.0, "ends with the first chunk", labels={"label_verb": "end"}),
        Caption("a", 1.5, 4.5, "touches all three"),
        Caption("d", 2.0, float("inf"), "the rest"),
        Caption("d", 5.5, 7.0, "after the end"),
        Caption("d", 3.999, 4.0, "the last moment of the second"),
    ]
    write_captions(data_copy, videos, captions)
    table = chunks_table(data_copy)
    assert table.column_names == [
        "key", "video_id", "split", "begin_s", "end_s", "captions", "caption_id", "label_verb",
    ]  # fmt: skip
    of_d = table.slice(9)
    assert of_d["key"].to_pylist() == ["d_000000000", "d_000002000", "d_000004000"]
    assert of_d["split"].to_pylist() == ["val"] * 3 and set(table["split"].to_pylist()) == {"train", "val"}
    assert of_d["begin_s"].to_pylist() == [0, 2, 4] and of_d["end_s"].to_pylist() == [2, 4, 5.5]
    assert of_d["captions"].to_pylist() == [
        ["ends with the first chunk"],
        ["the rest", "the last moment of the second"],
        ["the rest"],
    ]
    assert of_d["label_verb"].to_pylist() == [["end"], [None, None], [None]]
    assert table.slice(0, 3)["captions"].to_pylist() == [["touches all three"]] * 3
    assert table.slice(3, 6)["captions"].to_pylist() == [[]] * 6


def test_scores_are_columns_and_unknown_where_a_chunk_has_none(data_dir: Path, tmp_path: Path) -> None:
    data_copy = tmp_path / "data"
    shutil.copytree(data_dir, data_copy)
    write_scores(data_copy, {"d_000000000": {"motion": 0.5}, "a_000002000": {"motion": 0.25}}, failed=["b_000000000"])
    table = chunks_table(data_copy)
    motion = dict(zip(table["key"].to_pylist(), table["motion"].to_pylist(), strict=True))
    assert {key: value for key, value in motion.items() if value is not None} == {
        "d_000000000": 0.5,
        "a_000002000": 0.25,
    }
    assert table["duplicate"].to_pylist().count(False) == 3 and table["duplicate"].null_count == len(table) - 3


def test_what_has_no_chunks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        chunks_table(tmp_path / "nothing")
    assert caught.value.hint


def test_the_table_of_a_remote_folder_is_that_of_the_folder(data_dir: Path, tmp_path: Path) -> None:
    data_copy = tmp_path / "data"
    shutil.copytree(data_dir, data_copy)
    with closing(HttpFolder(data_copy)) as server:
        assert chunks_table(server.address, cache=tmp_path / "without").equals(chunks_table(data_copy))
        write_scores(data_copy, {"d_000000000": {"motion": 0.5}})
        assert chunks_table(server.address, cache=tmp_path / "with").equals(chunks_table(data_copy))

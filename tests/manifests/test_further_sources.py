"""Tests of captions from tables as additional sources: what they replace, what they keep, and the final result."""

import itertools
import json
import os
import shutil
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.adapters.further import FurtherReading, read_caption_tables
from clipmill.manifests.errors import UserError
from clipmill.manifests.schema import CAPTIONS, VIDEOS
from clipmill.manifests.store import read_captions, read_manifest, read_videos
from clipmill.manifests.write import FURTHER, FurtherResult, write_further_captions, write_manifest
from tests.manifests.test_interrupted_writes import Killed, stop_at
from tests.manifests.test_store import digests, file_hashes, ids_by_text, reading_of, write

OWN = [("v", 0.0, 1.0, "one"), ("w", 0.0, inf, "two")]
FIRST, SECOND = "aaaaaaaa11111111", "bbbbbbbb22222222"
Row = dict[str, Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create a manifest of two datasets, one with labels."""
    write(tmp_path / "data", reading_of(tmp_path, ["v", "w"], OWN))
    labelled = reading_of(tmp_path, ["x"], [("x", 0.0, 1.0, "three")], dataset="b", labels={"label_class": "cat"})
    write(tmp_path / "data", labelled, dataset="b")
    return tmp_path / "data"


def pseudo(path: Path, rows: list[Row], *, weights: str = FIRST, name: str = "narrator", **metadata: Any) -> Path:
    """Write a table as `train caption-chunks` does."""
    source = f"{name}@{weights[:8]}"
    schema = pa.schema(
        [
            *(("video", pa.string()), ("begin_s", pa.float64()), ("end_s", pa.float64()), ("text", pa.string())),
            *(("source", pa.string()), ("likelihood", pa.float32()), ("sample", pa.int16())),
        ]
    )
    values = [{"begin_s": 0.0, "end_s": 1.0, "source": source, "likelihood": -1.0, "sample": 0, **row} for row in rows]
    model = {"kind": "pseudo-captions", "weights": name, "weights_sha256": weights, "video_variant": "v1"}
    content = {**model, "settings": {"top_p": 0.9}, **metadata}
    table = pa.Table.from_pylist(values, schema=schema).replace_schema_metadata({"clipmill": json.dumps(content)})
    pq.write_table(table, path)
    return path


def read(data: Path, *tables: Path, source: str | None = None) -> FurtherReading:
    return read_caption_tables(tables, videos=read_videos(data), dataset=FURTHER, source=source)


def add(data: Path, *tables: Path, source: str | None = None) -> FurtherResult:
    result = read(data, *tables, source=source)
    return write_further_captions(data, result.reading.captions, result.reading.rejected, records=result.records)


def test_captions_are_added_and_nothing_else_changes(data: Path, tmp_path: Path) -> None:
    before, old_digests = read_captions(data).to_pylist(), digests(data)
    rows: list[Row] = [{"video": "x", "text": "a cat"}, {"video": "v", "text": " a door ", "likelihood": None}]
    written = add(data, pseudo(tmp_path / "p.parquet", rows))
    assert (written.num_captions, written.num_added) == ({"narrator@aaaaaaaa": 2}, {"narrator@aaaaaaaa": 2})
    after = read_captions(data).to_pylist()
    for row in before:
        row["likelihood"] = None
    assert [{**row, "label_class": row.get("label_class")} for row in before] == after[:3]
    common = {"begin_s": 0.0, "end_s": 1.0, "source": "narrator@aaaaaaaa", "label_class": None}
    assert after[3:] == [
        {"caption_id": 3, "video_id": "x", "text": "a cat", "likelihood": -1.0, **common},
        {"caption_id": 4, "video_id": "v", "text": "a door", "likelihood": None, **common},
    ]
    assert read_videos(data).schema.equals(VIDEOS)
    assert read_videos(data)["num_captions"].to_pylist() == [2, 1, 2]
    assert {video for video, digest in digests(data).items() if digest != old_digests[video]} == {"v", "x"}
    assert read_manifest(data)["further_sources"]["narrator@aaaaaaaa"] == {
        "kind": "pseudo-captions",
        "models": [{"weights": "narrator", "weights_sha256": FIRST, "video_variant": "v1", "settings": {"top_p": 0.9}}],
        "num_captions": 2,
    }


def test_digests_of_manifests_without_them_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Otherwise every chunk would be written again."""
    captions = [("v", 0.0, 1.0, "one"), ("w", 0.0, inf, "zwei é"), ("v", 0.5, 2.0, "three")]
    write(tmp_path, reading_of(tmp_path, ["v", "w", "u"], captions, labels={"label_class": "cat"}))
    assert digests(tmp_path) == {
        "v": "3afb20ba439327d64fa384238cd43ee1772211f9aa35f9d3977e18cd7a7e92d0",
        "w": "f50854a4fab40e61c1208c846ea396e2596c747ca753c7b41a0a0c46b50a2a82",
        "u": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    assert pq.read_schema(tmp_path / "manifest" / "videos.parquet").names == VIDEOS.names


def test_the_same_table_again_changes_no_byte(data: Path, tmp_path: Path) -> None:
    table = pseudo(tmp_path / "p.parquet", [{"video": "v", "text": text} for text in ("a", "b", "a")])
    add(data, table)
    before = file_hashes(data)
    written = add(data, table)
    assert (written.num_added, written.num_removed) == ({"narrator@aaaaaaaa": 0}, {"narrator@aaaaaaaa": 0})
    assert file_hashes(data) == before


def test_a_new_version_of_a_model_replaces_the_old_one_and_no_other(data: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("video,text,source,likelihood\nv,by hand,narrator,-2\nw,also,others,\n")
    add(data, plain)
    rows = [{"video": "v", "text": "same"}, {"video": "w", "text": "gone"}]
    add(data, pseudo(tmp_path / "p.parquet", rows))
    add(data, pseudo(tmp_path / "q.parquet", rows[:1], name="teller"))
    ids = ids_by_text(data)
    written = add(data, pseudo(tmp_path / "r.parquet", [*rows[:1], {"video": "x", "text": "new"}], weights=SECOND))
    assert written.num_stale == {"narrator@aaaaaaaa": 2}
    ids_by_caption = {(row["text"], row["source"]): row["caption_id"] for row in read_captions(data).to_pylist()[3:]}
    assert ids_by_caption == {
        ("by hand", "narrator"): 3,  # a different kind of table
        ("also", "others"): 4,
        ("same", "teller@aaaaaaaa"): 7,
        ("same", "narrator@bbbbbbbb"): 8,
        ("new", "narrator@bbbbbbbb"): 9,
    }
    assert {text: ids_by_text(data)[text] for text in ("one", "two", "three")} == {
        text: ids[text] for text in ("one", "two", "three")
    }
    assert set(read_manifest(data)["further_sources"]) == {"narrator", "others", "teller@aaaaaaaa", "narrator@bbbbbbbb"}


def test_a_dataset_that_is_read_again_keeps_them_as_long_as_their_videos(data: Path, tmp_path: Path) -> None:
    add(data, pseudo(tmp_path / "p.parquet", [{"video": video, "text": f"of {video}"} for video in "vwx"]))
    before = file_hashes(data)
    written = write(data, reading_of(tmp_path, ["v", "w"], OWN))
    assert (written.num_further_kept, written.num_further_removed, written.num_captions) == (3, 0, 2)
    assert file_hashes(data) == before

    changed = write(data, reading_of(tmp_path, ["w"], [("w", 5.0, 6.0, "other")]))
    assert (changed.num_further_kept, changed.num_further_removed) == (2, 1)
    assert ids_by_text(data) == {"other": 6, "three": 2, "of w": 4, "of x": 5}
    assert read_manifest(data)["further_sources"]["narrator@aaaaaaaa"]["num_captions"] == 2
    assert read_videos(data)["num_captions"].to_pylist() == [2, 2]
    write(data, reading_of(tmp_path, [], []))
    write(data, reading_of(tmp_path, [], [], dataset="b"), dataset="b")
    assert "further_sources" not in read_manifest(data)
    assert read_captions(data).schema.equals(CAPTIONS)


def test_digests_do_not_depend_on_the_order_of_the_commands(data: Path, tmp_path: Path) -> None:
    """Otherwise chunks would be written again without a reason."""
    digests_by_video = {**digests(data)}
    table = pseudo(tmp_path / "p.parquet", [{"video": "x", "text": "a cat"}])
    add(data, table)
    with_further = digests(data)
    write(data, reading_of(tmp_path, ["v", "w"], OWN))
    labelled = reading_of(tmp_path, ["x"], [("x", 0.0, 1.0, "three")], dataset="b", labels={"label_class": "cat"})
    write(data, labelled, dataset="b")
    assert digests(data) == with_further
    assert {video for video in digests_by_video if digests_by_video[video] != with_further[video]} == {"x"}
    other = tmp_path / "other.csv"
    other.write_text("video,text,source\nx,z,others\n")
    add(data, other)
    assert digests(data)["x"] not in (digests_by_video["x"], with_further["x"])


def test_a_likelihood_that_changes_keeps_the_id_and_changes_the_digest(data: Path, tmp_path: Path) -> None:
    add(data, pseudo(tmp_path / "p.parquet", [{"video": "v", "text": "a", "likelihood": -1.0}]))
    before, fingerprint = digests(data), read_manifest(data)["fingerprint"]
    add(data, pseudo(tmp_path / "p.parquet", [{"video": "v", "text": "a", "likelihood": -2.0}]))
    last = read_captions(data).to_pylist()[-1]
    assert (last["caption_id"], last["likelihood"]) == (3, -2.0)
    assert digests(data)["v"] != before["v"] and read_manifest(data)["fingerprint"] != fingerprint


def test_the_column_is_gone_when_no_caption_has_a_likelihood(data: Path, tmp_path: Path) -> None:
    rows = [{"video": "v", "text": "a"}]
    add(data, pseudo(tmp_path / "p.parquet", rows))
    assert "likelihood" in read_captions(data).column_names
    add(data, pseudo(tmp_path / "p.parquet", [{**rows[0], "likelihood": None}], weights=SECOND))
    assert "likelihood" not in read_captions(data).column_names
    assert list(pq.read_schema(data / "manifest" / "videos.parquet").names)[-1] == "own_captions_sha256"


def test_names_of_sources_that_are_taken_are_refused(data: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("video,text,source\nv,a,human\n")
    table = pseudo(tmp_path / "p.parquet", [{"video": "v", "text": "a"}])
    add(data, table)
    before = file_hashes(data)
    with pytest.raises(UserError, match=r"has 3 captions with the source 'human'"):
        add(data, plain)
    with pytest.raises(UserError, match="captions of a different kind"):
        add(data, plain, source="narrator@aaaaaaaa")
    with pytest.raises(UserError, match="captions from a different model under this name"):
        add(data, table, pseudo(tmp_path / "q.parquet", [{"video": "v", "text": "b"}], weights=SECOND), source="mine")
    with pytest.raises(UserError, match="two versions of a model: narrator@aaaaaaaa and narrator@bbbbbbbb"):
        add(data, table, tmp_path / "q.parquet")
    taken = reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one")])
    source = pa.array(["narrator@aaaaaaaa"]).dictionary_encode()
    with pytest.raises(UserError, match="`prep manifest captions` has already added captions with this source"):
        write_manifest_with_source(data, taken, source)
    assert file_hashes(data) == before


def write_manifest_with_source(data: Path, reading: Any, source: pa.Array) -> None:
    captions = reading.captions.set_column(reading.captions.column_names.index("source"), "source", source)
    write_manifest(data, "a", reading.videos, captions)


def test_tables_of_one_model_are_one_source(data: Path, tmp_path: Path) -> None:
    parts = [
        pseudo(tmp_path / f"{n}.parquet", [{"video": "v", "text": f"{n}"}], settings={"seed": n // 2}) for n in range(3)
    ]
    written = add(data, *parts)
    assert written.num_captions == {"narrator@aaaaaaaa": 3}
    models = read_manifest(data)["further_sources"]["narrator@aaaaaaaa"]["models"]
    assert [model["settings"] for model in models] == [{"seed": 0}, {"seed": 1}]
    assert add(data, *parts, source="mine").num_captions == {"mine": 3}


def test_a_table_that_is_given_twice_is_refused(data: Path, tmp_path: Path) -> None:
    table = pseudo(tmp_path / "p.parquet", [{"video": "v", "text": "a"}])
    shutil.copy(table, copy := tmp_path / "copy.parquet")
    (link := tmp_path / "link.parquet").symlink_to(table)
    before = file_hashes(data)
    for other in (copy, link, table):
        with pytest.raises(UserError, match=f"^{table} and {other} have the same content") as caught:
            add(data, table, other)
        assert caught.value.hint == "pass each table only once"
    with pytest.raises(UserError, match=r"cannot read .*none\.csv: No such file"):
        add(data, table, tmp_path / "none.csv")
    os.mkfifo(pipe := tmp_path / "pipe.csv")
    with pytest.raises(UserError, match="it is a pipe, not a file"):
        read(data, pipe, pipe)
    assert file_hashes(data) == before


def test_paths_that_do_not_exist_are_matched_by_file_name_where_it_is_clear(data: Path, tmp_path: Path) -> None:
    def table(*videos: object) -> Path:
        rows = [{"video": str(video), "text": "a", "source": "s"} for video in videos]
        (path := tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    paths = [Path(path) for path in read_videos(data)["path"].to_pylist()]
    (here := tmp_path / "here").mkdir()
    (here / paths[0].name).write_bytes(b"another video")
    elsewhere = [f"/elsewhere/{path.name}" for path in paths]
    others = ("/elsewhere/none.mp4", here / paths[0].name, f"elsewhere/{paths[0].name}")
    result = read(data, table(*elsewhere[:2], *others))
    assert result.reading.captions["video_id"].to_pylist() == ["v", "w"]
    assert result.reading.rejected["reason"].to_pylist() == ["missing_file"] * 3
    assert result.reading.notes == (
        f"matched 2 paths in the tables by file name, because they do not exist: {elsewhere[0]} is {paths[0]}",
    )
    for name in (f"/{'a' * 5000}.mp4", "/a\0.mp4"):
        assert read(data, table(name)).reading.rejected["reason"].to_pylist() == ["missing_file"]
    of_one_name = read_videos(data).drop_columns("path").append_column("path", [[f"/{n}/a.mp4" for n in range(3)]])
    result = read_caption_tables([table("/elsewhere/a.mp4", "a.mp4")], videos=of_one_name, dataset=FURTHER)
    assert result.reading.rejected["reason"].to_pylist() == ["ambiguous_video"] * 2
    for place, other in ((elsewhere[0], f"/other/{paths[0].name}"), (str(paths[0]), elsewhere[0])):
        for names in ((place, other), (other, place)):
            with pytest.raises(UserError, match=f"^{names[0]} and {names[1]} both have the file name of {paths[0]}"):
                read(data, table(*names))


def test_a_damaged_manifest_is_not_built_upon(data: Path, tmp_path: Path) -> None:
    table = pseudo(tmp_path / "p.parquet", [{"video": "v", "text": "a"}])
    add(data, table)
    result = read(data, table)
    (data / "manifest" / "captions.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="is damaged"):
        write_further_captions(data, result.reading.captions, result.reading.rejected, records=result.records)
    with pytest.raises(UserError, match="caption IDs would change") as caught:
        write(data, reading_of(tmp_path, ["v", "w"], OWN))
    assert "prep manifest captions` for the added sources (narrator@aaaaaaaa)" in str(caught.value.hint)


def test_a_write_that_is_killed_anywhere_leaves_the_old_manifest_or_the_new_one(data: Path, tmp_path: Path) -> None:
    first, second = (
        pseudo(tmp_path / f"{weights}.parquet", [{"video": "v", "text": text}], weights=weights)
        for weights, text in ((FIRST, "a"), (SECOND, "b"))
    )
    add(data, first)
    done = tmp_path / "done"
    shutil.copytree(data, done)
    add(done, second)
    result, seen = read(data, second), set()
    for point in itertools.count():
        copy = tmp_path / str(point)
        shutil.copytree(data, copy)
        with pytest.MonkeyPatch.context() as patch:
            stop_at(point, patch, Killed())
            with suppress(Killed):
                write_further_captions(copy, result.reading.captions, result.reading.rejected, records=result.records)
                break
        texts = read_captions(copy)["text"].to_pylist()[3:]
        assert texts == [{"narrator@aaaaaaaa": "a", "narrator@bbbbbbbb": "b"}[name] for name in further_names(copy)]
        assert read_videos(copy)["num_captions"].to_pylist() == [2, 1, 1]
        seen.update(texts)
        if point % 4 == 0:
            add(copy, second)
            assert file_hashes(copy) == file_hashes(done)
    assert seen == {"a", "b"}


def further_names(data: Path) -> list[str]:
    return list(read_manifest(data)["further_sources"])

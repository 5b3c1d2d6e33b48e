"""Tests of `prep manifest captions` and `prep manifest folder --subtitles` on a data folder with chunks."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.store import read_captions, read_manifest, read_videos
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.dataset import current_variant
from tests.manifests.test_further_sources import FIRST, SECOND, pseudo
from tests.prep.running import Ran, chunk, contents, manifest, prep_here

VIDEOS = ("first", "other")


@pytest.fixture(scope="module")
def finished_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two videos of 2 and 1.5 s in two splits, three captions, and chunks of 1 s."""
    folder = tmp_path_factory.mktemp("made")
    videos, data = folder / "videos", folder / "data"
    videos.mkdir()
    for name, num_frames in zip(VIDEOS, (20, 15), strict=True):
        FrameNumberVideo(num_frames=num_frames, fps=Fraction(10), width=64, height=64).write(videos / f"{name}.mp4")
    table = folder / "captions.csv"
    table.write_text(
        "video,text,begin_s,end_s,split\nfirst,first words,0,1,train\nfirst,last words,1,2,train\n"
        "other,other words,0,1.5,val\n"
    )
    manifest(data, videos, "--captions", table)
    chunk(data, "--len", "1s", "--preset", "ultrafast", "--short-side", "32")
    return data


@pytest.fixture
def data(finished_data: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder for one test."""
    return Path(shutil.copytree(finished_data, tmp_path / "data"))


def captions(data: Path, *arguments: object, status: int = 0) -> Ran:
    return prep_here("manifest", "captions", *arguments, "--data", data, status=status)


def of_chunks(data: Path, path: Path, **metadata: Any) -> Path:
    """Write a table of model captions: two samples for each of two chunks of the first video."""
    first = read_videos(data)["video_id"][0].as_py()
    rows = [
        {"video": first, "begin_s": begin_s, "end_s": begin_s + 1, "text": text, "likelihood": likelihood, "sample": n}
        for begin_s in (0.0, 1.0)
        for n, (text, likelihood) in enumerate([("a square", -0.5), ("A  square", -0.25), ("a circle", -3.0)])
    ]
    return pseudo(path, rows, video_variant=current_variant(data, "video"), **metadata)


def test_a_manifest_takes_captions_and_keeps_its_own(data: Path, tmp_path: Path) -> None:
    before = read_captions(data)
    ran = captions(data, of_chunks(data, tmp_path / "p.parquet"))
    assert ran.stdout.splitlines()[0] == "narrator@aaaaaaaa: 6 captions (6 new)"
    assert read_captions(data).drop_columns(["likelihood"]).slice(0, 3).to_pylist() == before.to_pylist()
    status = prep_here("status", "--data", data).stdout
    assert "captions  9\n" in status
    assert "narrator@aaaaaaaa: 6, by narrator (SHA-256 aaaaaaaa)\n" in status and "stale" not in status
    assert prep_here("verify", "--data", data).stdout.count(": OK") == 1


def test_captions_by_span_are_written_with_the_manifest(data: Path, tmp_path: Path) -> None:
    captions(data, of_chunks(data, tmp_path / "p.parquet"))
    captions_file = open_stored_captions(data)
    captions_file.verify()
    assert captions_file.texts.to_pylist() == read_captions(data)["text"].to_pylist()
    assert len(captions_file.texts) == 9 and "narrator@aaaaaaaa" in captions_file.sources


def test_a_table_of_another_machine_is_matched_by_file_name_with_a_note(data: Path, tmp_path: Path) -> None:
    path = Path(read_videos(data)["path"][0].as_py())
    (table := tmp_path / "t.csv").write_text(f"video,text,source\n/elsewhere/{path.name},a,s\n")
    note = f"matched 1 path in the tables by file name, because it does not exist: /elsewhere/{path.name} is {path}"
    assert f"note: {note}\n" in captions(data, table).stdout
    assert captions(data, table, "--json").summary["notes"] == [note]


def test_what_is_dropped_is_counted_and_written_down(data: Path, tmp_path: Path) -> None:
    table = of_chunks(data, tmp_path / "p.parquet")
    ran = captions(data, table, "--min-likelihood", "-1", "--drop-duplicates")
    assert "dropped: 2 unlikely, 2 duplicate\n" in ran.stdout
    assert read_captions(data)["text"].to_pylist()[3:] == ["A  square", "A  square"]
    record = read_manifest(data)["further_sources"]["narrator@aaaaaaaa"]
    assert (record["min_likelihood"], record["drop_duplicates"], record["num_captions"]) == (-1, True, 2)
    summary = captions(data, table, "--drop-duplicates", "--json").summary
    assert summary["num_dropped"] == {"duplicate": 2}
    assert summary["sources"] == {
        "narrator@aaaaaaaa": {"num_captions": 4, "num_captions_added": 2, "num_captions_removed": 0}
    }


def test_earlier_captions_of_a_model_that_changed_are_stale(data: Path, tmp_path: Path) -> None:
    captions(data, of_chunks(data, tmp_path / "p.parquet"))
    ran = captions(data, of_chunks(data, tmp_path / "p.parquet", weights=SECOND))
    assert "stale: 6 captions of the earlier version narrator@aaaaaaaa replaced\n" in ran.stdout
    assert captions(data, tmp_path / "p.parquet", "--json").summary["stale"] == {}


def test_a_source_is_removed_by_name_and_everything_follows(data: Path, tmp_path: Path) -> None:
    manifest_before, variant = contents(data / "manifest"), data / "video" / str(current_variant(data, "video"))
    tars = {path.name for path in variant.glob("*.tar")}
    plain = tmp_path / "plain.csv"
    plain.write_text("video,text,begin_s,end_s\nfirst,by a table,0,1\n")
    captions(data, plain, "--source", "asr")
    added = captions(data, of_chunks(data, tmp_path / "p.parquet")).stdout
    assert "only if --captions.sources lists them, such as human=1,narrator@*=1\n" in added
    text = ("text", "--data", data, "--clip", "tiny", "--engine", "processes")
    prep_here(*text)
    assert chunk(data, "--len", "1s", "--preset", "ultrafast", "--short-side", "32")["num_encoded"] == 0
    before = contents(data / "manifest")
    for wrong, why in (("human", "belongs to a dataset"), ("narrator@bbbbbbbb", "does not exist")):
        ran = captions(data, "--remove", wrong, status=2)
        assert why in ran.error and "asr, narrator@aaaaaaaa" in ran.stderr
    assert (
        "--remove and --source cannot be used together"
        in captions(data, "--remove", "asr", "--source", "x", status=2).error
    )
    assert "no caption tables were passed" in captions(data, status=2).error
    assert contents(data / "manifest") == before
    ran = captions(data, "--remove", "narrator", "--remove", "asr")
    assert ran.stdout.startswith("asr: 1 caption removed\nnarrator@aaaaaaaa: 6 captions removed\n")
    assert [row["text"] for row in read_captions(data).to_pylist()] == ["first words", "last words", "other words"]
    after = contents(data / "manifest")
    changed = {name for name in after.keys() | manifest_before.keys() if after.get(name) != manifest_before.get(name)}
    assert changed <= {"manifest.json"}, "only the next ID in the manifest may change"
    assert "narrator" not in prep_here("status", "--data", data).stdout
    ended = chunk(data, "--len", "1s", "--preset", "ultrafast", "--short-side", "32")
    assert ended["num_encoded"] == 0 and {path.name for path in variant.glob("*.tar")} >= tars
    prep_here(*text)
    bank = prep_here("status", "--data", data, "--json").summary
    assert bank["videos"]["num_captions"] == 3
    assert captions(data, plain, "--source", "asr", "--json").summary["sources"]["asr"]["num_captions_added"] == 1


def test_captions_of_another_variant_of_chunks_are_stale(data: Path, tmp_path: Path) -> None:
    table = of_chunks(data, tmp_path / "p.parquet")
    text = pseudo(tmp_path / "q.parquet", [{"video": read_videos(data)["video_id"][0].as_py(), "text": "a"}], name="b")
    ran = captions(data, table, text)
    assert "note: the captions of b@aaaaaaaa describe chunks of v1, not of the current variant\n" in ran.stdout
    status = prep_here("status", "--data", data).stdout
    assert status.count("stale: the captions describe chunks of v1, not of the current variant\n") == 1
    sources = prep_here("status", "--data", data, "--json").summary["videos"]["caption_sources"]
    assert {source["name"]: source["stale_because"] for source in sources if source["is_further"]} == {
        "b@aaaaaaaa": "the captions describe chunks of v1, not of the current variant",
        "narrator@aaaaaaaa": None,
    }


def test_captions_of_chunks_and_videos_that_are_gone_are_listed(data: Path, tmp_path: Path) -> None:
    first, second = read_videos(data)["video_id"].to_pylist()
    rows = [
        {"video": first, "begin_s": 0.0, "end_s": 1.0, "text": "good"},
        {"video": first, "begin_s": 2.0, "end_s": 3.0, "text": "after the end"},
        {"video": "gone", "text": "gone"},
    ]
    table = pseudo(tmp_path / "p.parquet", rows, video_variant=current_variant(data, "video"))
    ran = captions(data, table)
    assert "bad_time: 1\n" in ran.stdout and "missing_file: 1\n" in ran.stdout
    assert (
        f"p.parquet, entry 2: {first}: bad_time: begins at 2.0 s, after the end of the video at 2.0 s\n" in ran.stdout
    )
    assert "p.parquet: gone: missing_file: no such video in the manifest; captions lost: 1\n" in ran.stdout
    # Without the commit of its shard, the second video has no chunks.
    sorted((data / "video").glob("*/commits/*.json"))[1].unlink()
    rows = [{"video": video, "begin_s": 0.0, "end_s": 1.0, "text": "a"} for video in (first, second)]
    ran = captions(data, pseudo(tmp_path / "p.parquet", rows))
    assert (
        f"p.parquet, entry 2: {second}: missing_chunk: the video has no chunk between 0.0 s and 1.0 s\n" in ran.stdout
    )
    hint = "  hint: if the videos have no chunks yet, for example because they were added again, first run `prep chunk`"
    assert hint in ran.stdout
    only = pseudo(tmp_path / "only.parquet", rows[1:])
    assert hint in captions(data, only, status=1).stderr
    plain = tmp_path / "plain.csv"
    plain.write_text(f"video,text,begin_s,end_s\n{second},anything,0,1\n")
    assert "by-hand: 1 caption (1 new)\n" in captions(data, plain, "--source", "by-hand").stdout


def test_captions_without_a_source_have_the_name_of_their_file(data: Path, tmp_path: Path) -> None:
    for source, header in (("own captions.csv", "video,text"), ("next.csv", "video,text,source")):
        (tmp_path / source).write_text(f"{header}\n" + "first,a" + "," * header.count(",source") + "\n")
    stdout = captions(data, tmp_path / "own captions.csv", tmp_path / "next.csv").stdout
    assert "own-captions: 1 caption (1 new)\n" in stdout and "next: 1 caption (1 new)\n" in stdout
    assert "captions without a source get the source own-captions; --source sets a different one" in stdout
    assert "next: 1 caption (0 new)" in captions(data, tmp_path / "next.csv").stdout


def test_tables_of_which_nothing_is_left_leave_the_manifest_as_it_is(data: Path, tmp_path: Path) -> None:
    table, gone = (
        of_chunks(data, tmp_path / "p.parquet"),
        pseudo(tmp_path / "gone.parquet", [{"video": "x", "text": "a"}]),
    )
    captions(data, table)
    before = contents(data / "manifest")
    lost = captions(data, table, gone, status=1).stderr
    assert "no valid rows in" in lost and "gone.parquet" in lost and "missing_file: 1" in lost
    assert "p.parquet" not in lost
    unlikely = captions(data, table, "--min-likelihood", "-0.1", status=1).stderr
    assert "no captions of narrator@aaaaaaaa are left: all are below --min-likelihood -0.1" in unlikely
    unnamed = tmp_path / "--.csv"
    unnamed.write_text("video,text\nfirst,a\n")
    assert "its name is not valid as a source" in captions(data, unnamed, status=2).stderr
    assert contents(data / "manifest") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min-likelihood", "0.5"), "--min-likelihood is 0.5"),
        (("--min-likelihood", "nan"), "--min-likelihood is nan"),
        (("--source", " "), "--source ' ' is not a valid name"),
        (("--source", "a=b,c"), "--source 'a=b,c' is not a valid name"),
        (("--source", "x@y"), "--source 'x@y' is not a valid name"),
        (("--source", "x@1f2e3d4c"), "--source 'x@1f2e3d4c' is not a valid name"),
        (("--source", "mine", "--min-likelihood", "-1"), "no caption in the tables has a likelihood"),
    ],
)
def test_flags_that_make_no_sense_are_refused(data: Path, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text(f"video,text\n{read_videos(data)['video_id'][0].as_py()},a\n")
    assert message in captions(data, plain, *flags, status=2).error


def test_a_folder_without_a_manifest_is_an_error(tmp_path: Path) -> None:
    table = pseudo(tmp_path / "p.parquet", [{"video": "v", "text": "a"}])
    assert "does not exist" in captions(tmp_path / "none", table, status=2).error
    (tmp_path / "empty").mkdir()
    assert "no manifest in" in captions(tmp_path / "empty", table, status=2).error
    assert not (tmp_path / "empty" / "manifest").exists()


def test_subtitles_are_read_on_request_and_further_sources_stay(tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    videos.mkdir()
    (videos / "a.mp4").write_bytes(b"x")
    (videos / "a.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nhello\n")
    folder = ("manifest", "folder", videos, "--data", data)
    assert "note: ignored 1 subtitle file (.srt, .vtt); --subtitles reads such files\n" in prep_here(*folder).stdout
    table = pseudo(tmp_path / "p.parquet", [{"video": "a", "text": "a"}], weights=FIRST)
    captions(data, table)
    ran = prep_here(*folder, "--subtitles")
    assert "folder: 1 video (0 new), 1 caption (1 new)\n" in ran.stdout
    assert "added sources: 1 caption kept\n" in ran.stdout
    assert read_captions(data)["source"].to_pylist() == ["narrator@aaaaaaaa", "subtitles"]
    before = contents(data / "manifest")
    (videos / "a.srt").write_text("1\n00:00:02,000 --> 00:00:01,000\nhello\n")
    ran = prep_here(*folder, "--subtitles", status=1)
    assert f"no valid rows in {videos}" in ran.stderr and "a.srt, cue 1: a: bad_time: end_s is 1.0" in ran.stderr
    (videos / "a.srt").unlink()
    assert "no subtitles next to the videos" in prep_here(*folder, "--subtitles", status=2).error
    assert contents(data / "manifest") == before

"""Tests of `prep manifest` from the command line: exit statuses, messages, summaries."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipmill.manifests.errors import run_command
from clipmill.manifests.store import read_captions, read_rejected_rows, read_videos
from clipmill.prep.commands.manifest import app
from tests.prep.running import contents


def run(*arguments: object) -> int:
    """Return the exit status of `prep manifest ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        run_command(lambda: app([str(argument) for argument in arguments], result_action="return_value"))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for name in ("a.mp4", "b.mp4"):
        (folder / name).write_bytes(b"video")
    return folder


def test_a_folder_becomes_a_manifest(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "captions.csv"
    table.write_text("video,text\na,one\ngone,two\n")
    assert run("folder", videos, "--captions", table, "--data", tmp_path / "data") == 0
    output = capsys.readouterr().out
    assert "folder: 2 videos (2 new), 1 caption (1 new)" in output
    assert "missing_file: 1" in output
    assert "rejected.csv" in output
    assert read_videos(tmp_path / "data")["source_id"].to_pylist() == ["a", "b"]
    assert read_captions(tmp_path / "data")["text"].to_pylist() == ["one"]
    assert read_rejected_rows(tmp_path / "data")["source_id"].to_pylist() == ["gone"]
    [row] = csv.DictReader((tmp_path / "data" / "manifest" / "rejected.csv").open())
    assert (row["source_id"], row["reason"], row["file"]) == ("gone", "missing_file", str(table))
    assert row["entry"] == "2" and "row" not in row, "entry 2 is the second row below the header"


def test_videos_and_captions_are_counted_by_split(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "captions.csv"
    table.write_text("video,text,split\na,one,val\na,two,\nb,three,\n")
    assert run("folder", videos, "--captions", table, "--data", tmp_path / "data") == 0
    assert "splits: val 1 video with 2 captions, train 1 video with 1 caption" in capsys.readouterr().out
    assert run("folder", videos, "--captions", table, "--data", tmp_path / "data", "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert splits == {"train": {"num_videos": 1, "num_captions": 1}, "val": {"num_videos": 1, "num_captions": 2}}


def test_a_changed_split_is_counted(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "captions.csv"
    arguments = ("folder", videos, "--captions", table, "--data", tmp_path / "data")
    for split, counts in (
        ("train", "(2 new)"),
        ("val", "(0 new, 1 in a different split than before)"),
        ("val", "(0 new)"),
    ):
        table.write_text(f"video,text,split\na,one,{split}\n")
        assert run(*arguments) == 0
        output = capsys.readouterr().out
        assert f"folder: 2 videos {counts}, " in output and "\nsplits: " in output


def test_other_splits_of_the_same_videos_need_another_data_folder(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = [tmp_path / name for name in ("val.csv", "test.csv")]
    for path in lists:
        path.write_text("a.mp4 1\n")
    assert run("kinetics", *lists, "--videos", videos, "--data", tmp_path / "data") == 1
    assert "a different data folder (--data)" in capsys.readouterr().err


def test_rejected_files_and_rows_are_counted_apart(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("c.mp4", "d.mp4"):
        (videos / name).touch()
    assert run("folder", videos, "--data", tmp_path / "data") == 0
    assert "rejected: 2 files\n" in capsys.readouterr().out
    table = tmp_path / "captions.csv"
    table.write_text("video,text,begin_s,end_s\na.mp4,one,0,1\na.mp4,two,5,1\n")
    assert run("folder", videos, "--captions", table, "--data", tmp_path / "data") == 0
    assert "rejected: 2 files and 1 row\n" in capsys.readouterr().out


def test_json_is_all_that_a_script_sees(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("folder", videos, "--data", tmp_path / "data", "--dataset", "mine", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["dataset"], summary["num_videos"], summary["num_rejected"]) == ("mine", 2, {})


def test_the_data_folder_comes_from_the_environment(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPMILL_DATA", str(tmp_path / "elsewhere"))
    assert run("folder", videos) == 0
    assert read_videos(tmp_path / "elsewhere").num_rows == 2


def test_a_data_folder_inside_the_videos_is_not_scanned(videos: Path) -> None:
    (videos / "data").mkdir()
    (videos / "data" / "made.mp4").write_bytes(b"video")
    assert run("folder", videos, "--data", videos / "data") == 0
    assert read_videos(videos / "data")["source_id"].to_pylist() == ["a", "b"]


def test_a_folder_without_most_of_the_videos_needs_a_yes(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, table = tmp_path / "data", tmp_path / "captions.csv"
    for name in ("c.mp4", "d.mp4"):
        (videos / name).write_bytes(b"video")
    table.write_text("video,text\na,one\nc,two\nd,three\n")
    assert run("folder", videos, "--data", data) == 0
    assert run("captions", table, "--source", "more", "--data", data) == 0
    (videos / "d.mp4").unlink()
    assert run("folder", videos, "--data", data) == 0, "a quarter of the videos may be unusable"
    before = contents(data)
    (videos / "c.mp4").rename(videos / "z.mp4")
    (videos / "b.mp4").unlink()
    capsys.readouterr()
    for json_flag in ((), ("--json",)):
        assert run("folder", videos, "--data", data, *json_flag) == 2
        output = capsys.readouterr()
        assert output.out == "" and "2 of 3 videos of dataset folder would be removed" in output.err
        assert "(b, c), and with them 1 caption from added sources\n" in output.err and "--yes" in output.err
    assert contents(data) == before
    assert run("folder", videos, "--data", data, "--yes") == 0
    assert read_videos(data)["video_id"].to_pylist() == ["a", "z"]


def test_nothing_usable_is_an_error_and_the_manifest_stays(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, annotations = tmp_path / "data", tmp_path / "vatex.json"
    assert run("folder", videos, "--data", data) == 0
    annotations.write_text('[{"videoID": "gone", "enCap": ["x"]}]')
    assert run("vatex", videos, "--annotations", annotations, "--data", data) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no usable videos in dataset vatex; missing_file: 1\nhint: ")
    assert read_videos(data).num_rows == 2


WRONG_TABLES = {
    "a wrong prefix": ("video,text\nold/a.mp4,one\nold/b.mp4,two\n", "missing_file: 2"),
    "commas without quotes": ("video,text\na,one, two\nb,three, four\n", "malformed_row: 2"),
    "times backwards": ("video,text,begin_s,end_s\na,one,5,4\n", "bad_time: 1"),
    "no rows": ("video,text\n", "no rows in"),
}


@pytest.mark.parametrize("table", WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_captions_that_are_all_lost_fail_and_the_manifest_stays(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], table: tuple[str, str]
) -> None:
    data, good, wrong = tmp_path / "data", tmp_path / "good.csv", tmp_path / "wrong.csv"
    good.write_text("video,text\na,one\nb,two\n")
    assert run("folder", videos, "--captions", good, "--data", data) == 0
    before = contents(data)
    content, reason = table
    wrong.write_text(content)
    capsys.readouterr()
    assert run("folder", videos, "--captions", wrong, "--data", data) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("failed: ") and str(wrong) in output.err and reason in output.err
    assert contents(data) == before


def test_lost_captions_are_named_with_what_to_do(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "captions.csv"
    table.write_text("video,text\n" + "".join(f"old/{n}.mp4,text\n" for n in range(40)) + "a,one, two\n")
    assert run("folder", videos, "--captions", table, "--data", tmp_path / "data") == 1
    error = capsys.readouterr().err
    assert "captions.csv, line 2: old/0.mp4: missing_file: no matching video file" in error
    assert "captions.csv, line 42: malformed_row: 3 cells, expected 2" in error
    assert "and 36 more" in error
    assert "the video files have names such as a.mp4" in error and "in double quotes" in error
    assert not (tmp_path / "data").exists()


def test_all_rejected_rows_of_a_table_without_a_usable_one_can_be_seen(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest stays, and with it its list of rejected rows; --json prints the list of the failed command."""
    (table := tmp_path / "t.csv").write_text("video,text\n" + "".join(f"x{number},text\n" for number in range(9)))
    command = ("folder", videos, "--captions", table, "--data", tmp_path / "data")
    assert run(*command) == 1
    assert "  and 4 more; run the same command with --json for all of them\n" in capsys.readouterr().err
    assert run(*command, "--json") == 1
    entries = json.loads(capsys.readouterr().out)["rejected"]
    assert [(entry["entry"], entry["source_id"]) for entry in entries] == [(n + 1, f"x{n}") for n in range(9)]
    assert not (tmp_path / "data").exists()


def test_equal_captions_are_kept_and_noted(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table := tmp_path / "t.csv").write_text("video,text,begin_s,end_s\na,dup,0,1\na,dup,0,1\na,dup,1,2\na,dup,0,1\n")
    command = ("folder", videos, "--captions", table, "--data", tmp_path / "data")
    assert run(*command) == 0
    text = capsys.readouterr().out
    assert "4 captions (4 new)" in text
    assert "note: 2 captions equal earlier captions in video, times, source and text; all are kept\n" in text
    table.write_text("video,text\na,dup\na,other\n")
    assert run(*command) == 0 and "all are kept" not in capsys.readouterr().out


def test_one_of_several_annotation_files_that_brings_nothing_fails(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = [tmp_path / name for name in ("train.csv", "val.csv")]
    lists[0].write_text("a.mp4 1\n")
    lists[1].write_text("old/b.mp4 1\n")
    assert run("kinetics", *lists, "--videos", videos, "--data", tmp_path / "data") == 1
    error = capsys.readouterr().err
    assert f"no valid rows in {lists[1]}" in error and "omit annotation files" in error


def test_composed_names_find_files_with_decomposed_ones(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    folder, table = tmp_path / "videos", tmp_path / "captions.csv"
    folder.mkdir()
    (folder / f"{decomposed}.mp4").write_bytes(b"video")
    table.write_text(f"video,text\n{composed}.mp4,one\n{composed},two\n{decomposed},three\n")
    assert run("folder", folder, "--captions", table, "--data", tmp_path / "data") == 0
    assert read_captions(tmp_path / "data")["text"].to_pylist() == ["one", "two", "three"]
    # The manifest stores paths unchanged.
    assert Path(read_videos(tmp_path / "data")["path"][0].as_py()).is_file()
    assert read_videos(tmp_path / "data")["source_id"].to_pylist() == [decomposed]


def test_a_file_with_another_ending_joins_without_changing_ids(videos: Path, tmp_path: Path) -> None:
    arguments = ("folder", videos, "--data", tmp_path / "data")
    assert run(*arguments) == 0
    before = read_videos(tmp_path / "data").to_pylist()
    (videos / "a.mkv").write_bytes(b"video")
    for _ in range(2):
        assert run(*arguments) == 0
        after = read_videos(tmp_path / "data").to_pylist()
        assert after[: len(before)] == before
        assert [row["source_id"] for row in after] == ["a", "b", "a.mkv"]


def test_rejected_rows_are_named_without_control_characters(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (videos / "evil\x1b[31m\nname.mp4").touch()
    table = tmp_path / "captions.csv"
    table.write_text('video,text\na,one\n"b\x1b[2J\u202e",two\na,\n')
    arguments = ("folder", videos, "--captions", table, "--data", tmp_path / "data")
    assert run(*arguments) == 0
    output = capsys.readouterr().out
    assert "evil\\x1b[31m name.mp4: empty_file: the file is empty" in output
    assert "captions.csv, line 3: b\\x1b[2J\\u202e: missing_file" in output
    assert "captions.csv, line 4: a: empty_caption" in output
    assert "\x1b" not in output and "\u202e" not in output
    assert run(*arguments, "--json") == 0
    first = json.loads(capsys.readouterr().out)["first_rejected"]
    assert sorted(row["code"] for row in first) == ["empty_caption", "empty_file", "missing_file"]


@pytest.mark.timeout(60)
def test_pipes_are_refused_before_they_block(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("c.csv", "n.json", "l.pkl"):
        os.mkfifo(tmp_path / name)
    data = ("--data", tmp_path / "data")
    assert run("folder", videos, "--captions", tmp_path / "c.csv", *data) == 2
    assert run("kinetics", tmp_path / "c.csv", "--videos", videos, *data) == 2
    for name in ("n.json", "l.pkl"):
        assert run("ego4d", videos, "--annotations", tmp_path / name, *data) == 2
    assert capsys.readouterr().err.count("it is a pipe, not a file") == 4


def test_every_kind_has_a_command(videos: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    vatex, ego4d, kinetics = tmp_path / "v.json", tmp_path / "n.json", tmp_path / "train.csv"
    vatex.write_text('[{"videoID": "a", "enCap": ["x", "y"]}]')
    points = [{"narration_text": "#C C x", "timestamp_sec": time_s} for time_s in (1, 2)]
    ego4d.write_text(json.dumps({"videos": {"a": {"narration_pass_1": {"narrations": points}}}}))
    kinetics.write_text("a 1\nb 2\n")
    epic = [tmp_path / "EPIC_100_train.csv", tmp_path / "EPIC_100_validation.csv"]
    for path, video in zip(epic, "ab", strict=True):
        path.write_text(
            "video_id,start_timestamp,stop_timestamp,narration,verb_class,noun_class\n"
            f"{video},00:00:01,00:00:02,open,1,2\n"
        )
    assert run("vatex", videos, "--annotations", vatex, "--data", data / "v") == 0
    assert run("ego4d", videos, "--annotations", ego4d, "--data", data / "e") == 0
    assert run("epic-kitchens", videos, "--annotations", *epic, "--data", data / "k") == 0
    assert run("kinetics", kinetics, "--videos", videos, "--data", data / "l") == 0
    assert run("synthetic", "--videos", 1, "--minutes", 0.05, "--data", data / "s") == 0
    assert [read_captions(data / name).num_rows for name in "vekls"] == [2, 2, 2, 2, 1]
    assert read_videos(data / "k")["split"].to_pylist() == ["train", "val"]
    assert Path(read_videos(data / "s")["path"][0].as_py()).parent == data / "s" / "synthetic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["folder", "{tmp}/nowhere"], "no such folder"),
        (["folder", "{tmp}/videos/a.mp4"], "is a file"),
        (["folder", "{tmp}/videos", "--data", "{tmp}/videos"], "both the data folder"),
        (["folder", "{tmp}/videos", "--data", "{root}"], "source code of clipmill"),
        (["folder", "{tmp}/videos", "--data", "{root}/shards"], "source code of clipmill"),
        (["folder", "{tmp}/videos", "--data", "{tmp}/videos/a.mp4"], "is a file"),
        (["ego4d", "{tmp}/videos", "--annotations", "{tmp}/gone.json"], "cannot read"),
        (["ego4d", "{tmp}/videos", "--annotations", "{tmp}/x.doc"], "is not a .json, .pkl, .csv or .txt file"),
        (["kinetics", "{tmp}/gone.txt", "--videos", "{tmp}/videos"], "cannot read"),
        (["folder", "{tmp}/videos", "--captions", "{tmp}/folder.csv"], "it is a folder"),
        (["vatex", "{tmp}/videos", "--annotations", "{tmp}/folder.csv"], "it is a folder"),
        (["folder", "{tmp}/loop"], "loop"),
        (["folder", "{tmp}/videos", "--data", "{tmp}/loop"], "loop"),
        (["folder", "{tmp}/videos", "--data", "{tmp}/videos/a.mp4/data"], "a.mp4"),
        (["folder", "{tmp}/videos", "--data", "{tmp}/" + "x" * 300], "File name too long"),
        (["synthetic", "--videos", "0"], "--videos is 0"),
        (["synthetic", "--minutes", "nan"], "--minutes is nan"),
    ],
)
def test_a_users_mistake_is_two_lines_and_status_2(
    videos: Path,
    tmp_path: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    filled = [argument.format(tmp=tmp_path, root=repository) for argument in arguments]
    if "--data" not in filled:
        filled += ["--data", str(tmp_path / "data")]
    assert run(*filled) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]
    assert message in lines[0]
    assert not (tmp_path / "data").exists()


def test_help_loads_nothing_heavy(repository: Path) -> None:
    program = (
        "import sys; from clipmill.prep.commands.manifest import app; app(['--help'], result_action='return_value');"
        "print([name for name in ('torch', 'ray', 'av', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

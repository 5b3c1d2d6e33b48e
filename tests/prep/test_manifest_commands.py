"""`prep manifest` as a user meets it: exit statuses, messages, summaries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manifests.errors import run_command
from manifests.store import read_captions, read_rejected, read_videos
from prep.manifest_commands import app


def run(*arguments: object) -> int:
    """Exit status of `prep manifest ARGUMENTS`."""
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
    assert "folder: 2 videos (2 new), 1 captions (1 new)" in output
    assert "missing_file: 1" in output
    assert "rejected.parquet" in output
    assert read_videos(tmp_path / "data")["source_id"].to_pylist() == ["a", "b"]
    assert read_captions(tmp_path / "data")["text"].to_pylist() == ["one"]
    assert read_rejected(tmp_path / "data")["source_id"].to_pylist() == ["gone"]


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


def test_nothing_usable_is_an_error_and_the_manifest_stays(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, annotations = tmp_path / "data", tmp_path / "vatex.json"
    assert run("folder", videos, "--data", data) == 0
    annotations.write_text('[{"videoID": "gone", "enCap": ["x"]}]')
    assert run("vatex", videos, "--annotations", annotations, "--data", data) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no usable video for the data set vatex; missing_file: 1\nhint: ")
    assert read_videos(data).num_rows == 2


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
        (["folder", "{tmp}/videos", "--data", "{root}"], "own source"),
        (["folder", "{tmp}/videos", "--data", "{root}/shards"], "own source"),
        (["folder", "{tmp}/videos", "--data", "{tmp}/videos/a.mp4"], "is a file"),
        (["ego4d", "{tmp}/videos", "--annotations", "{tmp}/gone.json"], "cannot read"),
        (["ego4d", "{tmp}/videos", "--annotations", "{tmp}/x.txt"], "neither .json nor .pkl"),
        (["kinetics", "{tmp}/gone.txt", "--videos", "{tmp}/videos"], "cannot read"),
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
        "import sys; from prep.manifest_commands import app; app(['--help'], result_action='return_value');"
        "print([name for name in ('torch', 'ray', 'av', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

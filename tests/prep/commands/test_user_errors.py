"""Tests of user errors: exit status 2, one line that states the problem, and one line that states the next action."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prep.running import contents, manifest, prep, prep_here


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("errors")
    write_video(root / "videos/v.mp4", seconds=2)
    manifest(root / "data", root / "videos")
    return root / "data"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--len", "15"], '"15"'),
        (["--len", "15sec"], '"15sec"'),
        (["--len", "-1s"], '"-1s"'),
        (["--len", "0s"], '"0s"'),
        (["--len", "0.1ms"], '"0.1ms"'),
        (["--len", "1.01s"], "30.3 frames"),
        (["--len", "2h"], '"2h"'),
        (["--codec", "divx"], '"divx"'),
        (["--codec", "h264_nvenc"], "h264_nvenc"),
        (["--crf", "20", "--bitrate", "800k"], "--crf and --bitrate"),
        (["--crf", "99"], "--crf is 99"),
        (["--bitrate", "800kbps"], '"800kbps"'),
        (["--bitrate", "0"], '"0"'),
        (["--bitrate", "800"], '"800" has no unit'),
        (["--gop", "star", "--codec", "av1"], "--gop star"),
        (["--gop", "star", "--keyint", "60"], "--keyint 60"),
        (["--gop", "intra", "--keyint", "60"], "--keyint 60"),
        (["--gop", "comb", "--keyint", "2"], "--keyint 2"),
        (["--recipe", "fast", "--gop", "star"], "mjpeg does not support --gop star"),
        (["--recipe", "small", "--preset", "veryfast"], 'av1 has no preset "veryfast"'),
        (["--recipe", "large"], "large"),
        (["--preset", "warp"], '"warp"'),
        (["--short-side", "287"], "--short-side 287 is not an even number"),
        (["--fps", "0"], "--fps is 0"),
        (["--fps", "thirty"], '"thirty"'),
        (["--tail", "wag"], "wag"),
        (["--workers", "0"], "--workers is 0"),
        (["--max-failures", "some"], '"some"'),
        (["--max-failures", "101%"], '"101%"'),
        (["--address", "nonsense"], '--address "nonsense"'),
        (["--address", "nowhere:1", "--engine", "processes"], "--address nowhere:1"),
        (["--engine", "ray", "--task-cpus", "0"], "--task-cpus is 0.0"),
        (["--engine", "ray", "--task-memory", "-1"], "--task-memory is -1.0"),
        (["--engine", "ray", "--task-retries", "-1"], "--task-retries is -1"),
        (["--engine", "ray", "--wait-for-nodes", "nan"], "--wait-for-nodes is nan"),
        (["--task-cpus", "2", "--engine", "processes"], "--task-cpus requires --engine ray"),
        (["--engine", "slurm"], "slurm"),
        (["--lenn", "15s"], "--lenn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_named_and_nothing_is_done(arguments: list[str], named: str, data: Path) -> None:
    before = contents(data)
    engine = [] if "--engine" in arguments else ["--engine", "processes"]
    assert named in prep_here("chunk", "--data", data, *engine, *arguments, status=2).error
    assert contents(data) == before


def test_a_plan_warns_of_an_encoder_that_this_machine_lacks(data: Path) -> None:
    """The warning is the error of the run, with the line of ffmpeg that names the cause."""
    ran = prep_here("plan", "--codec", "h264_nvenc", "--data", data)
    error = prep_here("chunk", "--codec", "h264_nvenc", "--data", data, status=2).error
    assert error.endswith("does not work on this machine: h264_nvenc: Cannot load libcuda.so.1")
    assert f"warning: `prep chunk` cannot start on this machine: {error}\nhint: use --codec h264, or" in ran.stderr
    assert "warning" not in prep_here("plan", "--data", data).stderr


def test_several_wrong_settings_are_named_at_once(data: Path) -> None:
    words = ("--crf", 99, "--short-side", 15, "--gop", "star", "--keyint", 601, "--threshold", 3)
    ran = prep_here("chunk", "--data", data, *words, status=2)
    assert [line for line in ran.stderr.splitlines() if line.startswith("error: ")] == [
        "error: --keyint is 601, which is out of range",
        "error: --short-side is 15, which is out of range",
        "error: --threshold 3.0 has no effect with --cut even",
        "error: --crf is 99, which is out of range",
    ]
    ran = prep_here("scores", "--data", data, "--workers", 0, "--address", "nonsense", status=2)
    assert "--workers must be 1 or more" in ran.stderr and 'error: --address "nonsense" is not' in ran.stderr


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("inspect -rf_0", "unknown option: -rf_0", "after all flags and --, as in prep inspect ... -- -rf_0; "),
        (
            "inspect -- -rf_0 --data x",
            "unknown option: --data.",
            "put the flags before --, because all arguments after",
        ),
        ("inspect --data x -- -rf_0", "the data folder x does not exist", "create a data folder"),
        ("plan --explain -rf", "--explain requires an argument", "as in --explain=-rf; see prep plan"),
        ("latents --crop random", "--vae is required", "see prep latents --help"),
        ("plan --explain=-rf --data x", "the data folder x does not exist", "create a data folder"),
        ("inspect --data y --data x", "the data folder x does not exist", "create a data folder"),
        ("chunk extra", "unexpected argument: extra", "see prep chunk --help"),
        ("chunk a/0.tar a/1.tar", "unexpected arguments: a/0.tar, a/1.tar", "quote it, because the shell expands"),
        ("plan score", "unexpected argument: score. Did you mean scores?", "see prep plan --help"),
        (
            "chnk",
            'unknown command "chnk". Did you mean "chunk"? Available commands: manifest, chunk, latents, text, scores, '
            "captions, index, plan, ...",
            "see prep --help",
        ),
        ("chunk --resolution 224", "unknown option: --resolution. Did you mean --short-side?", "see prep chunk --help"),
        ("manifest folder --jsn", "unknown option: --jsn. Did you mean --json?", "see prep manifest folder --help"),
    ],
)
def test_words_that_no_command_takes_are_named_with_what_to_do(words: str, message: str, hint: str) -> None:
    ran = prep_here(*words.split(), status=2)
    assert message in ran.error and hint in ran.stderr
    assert ran.error.count("Did you mean") <= 1


def test_a_folder_without_manifest_or_shards(data: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in prep_here("chunk", "--data", tmp_path / "none", status=2).error
    assert "manifest" in prep_here("chunk", "--data", tmp_path, "--engine", "processes", status=2).error
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"] or not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert "not a folder" in prep_here("chunk", "--data", tmp_path / "file", status=2).error
    assert "has no video shards" in prep_here("retry", "--data", data, status=2).error
    assert "pest" in prep_here("retry", "--data", data, "--only", "pest", status=2).error
    assert '"nobody"' in prep_here("plan", "--data", data, "--explain", "nobody", status=2).error


def test_a_video_is_explained_by_the_name_that_captions_and_messages_have(
    tmp_path: Path, write_video: Callable[..., Path]
) -> None:
    write_video(tmp_path / "videos/kitchen/v.mp4", seconds=2)
    manifest(tmp_path / "data", tmp_path / "videos")
    for name in ("kitchen/v", "kitchen/v.mp4"):
        ran = prep_here("plan", "--data", tmp_path / "data", "--explain", name)
        assert ran.stdout.startswith(f"{name}: video kitchen_v-")


@pytest.mark.parametrize(
    "address", ["localhost:1", pytest.param("no-such-host.invalid:6379", marks=pytest.mark.nightly)]
)
def test_no_cluster_at_the_address(data: Path, address: str) -> None:
    assert f'"{address}"' in prep("chunk", "--data", data, "--address", address, status=2).error


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("#!/bin/sh\necho 'ffmpeg version 5.1 Copyright'\n", "has version 5.1"),
        pytest.param("#!/bin/sh\nexit 3\n", "does not run", marks=pytest.mark.nightly),
        (None, "does not run"),
    ],
)
def test_an_ffmpeg_that_will_not_do(script: str | None, named: str, data: Path, tmp_path: Path) -> None:
    program = tmp_path / "ffmpeg"
    if script is not None:
        program.write_text(script)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    error = prep("chunk", "--data", data, status=2, CLIPMILL_FFMPEG=str(program)).error
    assert str(program) in error and named in error and "$CLIPMILL_FFMPEG" in error

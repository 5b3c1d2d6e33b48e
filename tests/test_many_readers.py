"""A training reads its variant to the end, while a colleague makes another one and removes what is not in use."""

import os
import signal
import sys
from fractions import Fraction
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.train.cli import main
from clipmill.train.run.checkpoint import read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests import workers
from tests.prep.running import prep_here, wait_until
from tests.train.running import facts

CHUNKS = ("chunk", "--len", "1s", "--preset", "ultrafast", "--short-side", 64, "--engine", "processes", "--workers", 1)
STEPS = ("--preset", "tiny", "--num-frames", 2, "--size-px", 32, "--workers", 1, "--batch", 4, "--warmup-steps", 1)
_NUM_STEPS, _LIMIT_S = 40, 240


def train(*words: object) -> BaseProcess:
    """Start `train`, which continues its run if there is one."""
    flags = ("--steps", _NUM_STEPS, "--checkpoint-every", 4, "--device", "cpu", "--resume", "auto")
    process = workers.process(target=_train, args=([*map(str, ("dual-encoder", *STEPS, *flags, *words))],))
    process.start()
    return process


def _train(words: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = ["train", *words]
    main()


def make_data(data: object, videos: Path) -> None:
    videos.mkdir()
    captions = ["video,text,begin_s,end_s"]
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        FrameNumberVideo(num_frames=40, fps=Fraction(10), width=96, height=64).write(videos / name)
        captions += [f"{name},second {second} of {name},{second},{second + 1}" for second in range(4)]
    (videos / "captions.csv").write_text("\n".join(captions))
    prep_here("manifest", "folder", videos, "--captions", videos / "captions.csv", "--data", data)
    prep_here(*CHUNKS, "--data", data)


def variants(data: object) -> set[str]:
    """The variants of `video` that are complete enough to have tars."""
    if isinstance(data, Path):
        return {path.parent.name for path in data.glob("video/*/*.tar")}
    keys = [info.key for info in open_objects(str(data)).list("video")]
    return {key.split("/")[1] for key in keys if key.endswith(".tar")}


@pytest.mark.parametrize("place", ["local", pytest.param("bucket", marks=pytest.mark.nightly)])
def test_a_new_variant_and_gc_change_nothing_for_a_training_that_is_stopped_killed_and_continued(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data = tmp_path / "data" if place == "local" else f"{request.getfixturevalue('bucket')}/data"
    make_data(data, tmp_path / "videos")
    (first,) = variants(data)
    run = RunFolder(tmp_path / "run")
    line = ("--shards", data, "--out", run.path, *(("--cache", tmp_path / "cache") if place == "bucket" else ()))
    training = train(*line)
    wait_until(lambda: run.latest_checkpoint() is not None or not training.is_alive(), seconds=_LIMIT_S)
    assert training.pid is not None and training.is_alive()
    os.kill(training.pid, signal.SIGSTOP)

    prep_here(*CHUNKS, "--crf", 40, "--data", data)
    assert len(both := variants(data)) == 2
    reader = f"read by process {training.pid} on "
    status = prep_here("status", "--data", data).stdout
    assert reader in status and f"read by unfinished run {run.path} (" in status
    kept = f"kept       video/{first}: {reader}"
    for flags in (("--dry-run",), ()):
        assert kept in prep_here("gc", *flags, "--data", data).stdout
    assert variants(data) == both

    # What has been trained so far is lost, and the process with it, but not the variant.
    training.kill()
    training.join(_LIMIT_S)
    ran = prep_here("gc", "--data", data)
    assert f"kept       video/{first}: read by unfinished run {run.path} (" in ran.stdout
    assert "mark of a reader that has ended" in ran.stdout and variants(data) == both
    training = train(*line)
    training.join(_LIMIT_S)
    assert training.exitcode == 0
    assert facts(run.path)["variant"] == first and read_lines(run.failures) == []

    assert "kept" not in prep_here("gc", "--data", data).stdout
    assert variants(data) == both - {first}
    if place == "local":
        reference = RunFolder(tmp_path / "reference")
        make_data(tmp_path / "again", tmp_path / "videos-again")
        training = train("--shards", tmp_path / "again", "--out", reference.path)
        training.join(_LIMIT_S)
        expected = read_weights(reference.require_checkpoint())
        weights = read_weights(run.require_checkpoint())
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())

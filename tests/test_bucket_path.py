"""The whole way through a bucket: source videos by address, columns that `prep` makes there, and training from it.

Commands are processes. Some are killed and go on with another machine's disk, and the server fails now and then.
"""

import secrets
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.train.cli import main
from clipmill.train.run.checkpoint import all_checkpoints, read_weights
from clipmill.train.run.folder import RunFolder
from tests import workers
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.folders import contents_of, upload
from tests.prep.running import MARK, contents, prep_here, processes, start, wait_until

VIDEOS = {"a.mp4": 6, "b.mp4": 5, "val/c.mp4": 4}  # seconds of each
CHUNKS = ("chunk", "--len", "1s", "--preset", "ultrafast", "--short-side", 64, "--engine", "processes", "--workers", 1)
ON_CPU = ("--engine", "processes", "--workers", 1, "--num-gpus", 0)
LATENTS = ("latents", "--vae", "tiny", "--size", 64, "--fps", 4, *ON_CPU)
TEXT = ("text", "--clip", "tiny", *ON_CPU)
PIXELS = ("--preset", "tiny", "--num-frames", 2, "--size-px", 32, "--workers", 1)
STORED = ("--input", "latents", "--text-tower", "frozen", "--model", "tiny", "--segment", "1s", "--num-frames", "2")
STEPS = ("--batch", 4, "--steps", 6, "--warmup-steps", 1, "--checkpoint-every", 2, "--evaluate.every", 3)
# Some of everything, all the time.
BAD_DAY = (
    Fault("error", every=5),
    Fault("cut", method="GET", every=6, skip=2),
    Fault("lost", method="PUT", every=7, skip=3),
    Fault("delay", every=3, delay_s=0.02),
)
# The evaluation after step 3 does not end, so that a run is killed between two checkpoints.
NO_END = Fault("hang", method="GET", path=r"/(video|latents)/.*/000001-\w+\.tar")
_LIMIT_S = 120


def train(*words: object, killed_when: Callable[[], object] | None = None) -> None:
    """Run `train` to its end, or kill it when something is the case."""
    process = workers.process(target=_train, args=([*map(str, words)],))
    process.start()
    if killed_when is not None:
        wait_until(killed_when, seconds=_LIMIT_S)
        process.kill()
    process.join(_LIMIT_S)
    assert process.exitcode == (0 if killed_when is None else -signal.SIGKILL)


def _train(words: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = ["train", *words]
    main()


def write_videos(folder: Path) -> Path:
    """Videos, and a table with a caption for each second of them."""
    captions = ["video,text,begin_s,end_s"]
    for name, num_seconds in VIDEOS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        FrameNumberVideo(num_frames=10 * num_seconds, fps=Fraction(10), width=96, height=64).write(folder / name)
        captions += [f"{name},second {second} of {name},{second},{second + 1}" for second in range(num_seconds)]
    (folder / "captions.csv").write_text("\n".join(captions))
    return folder


def manifest(videos: object) -> tuple[object, ...]:
    """Arguments of `prep manifest`."""
    return ("manifest", "folder", videos, "--captions", f"{videos}/captions.csv")


def columns(checksums: dict[str, str]) -> dict[str, str]:
    """Those of a data folder but for the paths of its videos."""
    return {name: checksum for name, checksum in checksums.items() if not name.startswith(("manifest/", "probes."))}


def is_stuck(run: RunFolder, faults: Faults) -> bool:
    """Whether a run has a checkpoint, and waits for an answer."""
    return run.latest_checkpoint() is not None and faults.seen().num_faults > 0


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    path = run.require_checkpoint()
    assert path.name == "step_000006"
    return read_weights(path)


def test_videos_in_a_bucket_become_the_weights_of_a_local_folder(
    bucket: str, faults: Faults, other_machine: Callable[[], Path], tmp_path: Path
) -> None:
    local, data, mark = tmp_path / "local", f"{bucket}/some/data", secrets.token_hex(8)
    videos = write_videos(tmp_path / "videos")
    for command in (manifest(videos), CHUNKS, LATENTS, TEXT):
        prep_here(*command, "--data", local)

    other_machine()
    upload(videos, f"{bucket}/videos")
    prep_here(*manifest(f"{bucket}/videos"), "--data", data)
    faults.set(Fault("hang", method="PUT", path="/commits/", skip=1))
    killed = start(*CHUNKS, "--data", data, **{MARK: mark})
    wait_until(lambda: faults.seen().num_faults)
    status = prep_here("status", "--data", data).stdout
    assert f"in progress: written by process {killed.pid} on " in status and "1 shard" in status
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    wait_until(lambda: not list(processes(mark)))
    keys = [info.key for info in open_objects(data).list()]
    assert sum("/commits/" in key for key in keys) == 1 and sum(key.endswith(".tar") for key in keys) == 2

    other_machine()
    faults.set(*BAD_DAY)
    for command in (CHUNKS, LATENTS, TEXT, ("gc",), ("verify",)):
        prep_here(*command, "--data", data)
    assert faults.seen().num_faults > 20
    faults.set()
    prep_here("status", "--data", data)
    assert columns(contents_of(data)) == columns(contents(local))
    assert "nothing to remove" in prep_here("gc", "--data", data).stdout

    for name, flags in (("pixels", PIXELS), ("latents", STORED)):
        run, reference = RunFolder(tmp_path / name), RunFolder(tmp_path / f"local-{name}")
        line = ("dual-encoder", *flags, *STEPS, "--device", "cpu", "--resume", "auto")
        remote = (*line, "--shards", data, "--out", run.path, "--cache", tmp_path / "cache")
        faults.set(NO_END)
        train(*remote, killed_when=partial(is_stuck, run, faults))
        assert [*all_checkpoints(run.checkpoints)] == [2]
        faults.set(*BAD_DAY)
        train(*remote)
        train(*line, "--shards", local, "--out", reference.path)
        expected = weights(reference)
        assert all(torch.equal(value, expected[key]) for key, value in weights(run).items())
    train("eval", "retrieval", tmp_path / "pixels", "--json")
    assert faults.seen().num_faults

"""Steps of `train mae` on data folders with the same pieces of video, as several kinds of chunks and as latents."""

import shutil
import time
from collections.abc import Generator, Iterator
from fractions import Fraction
from pathlib import Path

import torch

from benchmarks.decode_peers.chunk_sets import OWN, X264_DEFAULT, make_set, write_captions
from benchmarks.decode_peers.clip_set import FPS, chunk_path, data_folder
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.measure import prep_command, run_measured
from benchmarks.vit_steps import wait_for
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.store import read_videos
from clipmill.prep.video.span_task import read_chunk
from clipmill.shards.commits import Commit, write_commit
from clipmill.shards.dataset import set_current_variant
from clipmill.shards.format import VIDEO_FIELDS
from clipmill.shards.writer import Sample, ShardWriter
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.prefetch import prefetch
from clipmill.train.device.precision import open_precision
from clipmill.train.distributed.world import Step, World
from clipmill.train.models.attention import open_attention
from clipmill.train.optim.optimizer import make_optimizer
from clipmill.train.tasks.mae.spec import MaeSettings
from clipmill.train.tasks.mae.task import MaeTask

LATENT_PX, LATENT_SEGMENT = 224, "5s"
_VARIANT, _FINGERPRINT = "h264-x264-default-00000000", "00" * 32


def make_folders(folder: Path, *, videos: Path | None, num_pieces: int, program: str, has_latents: bool) -> list[str]:
    """Create a data folder of each kind, and return the names of the pieces. `data_folder` returns the paths."""
    pieces, captions = folder / "pieces", folder / "captions.csv"
    pieces.mkdir()
    names = pieces_of(videos, pieces, num_pieces=num_pieces, program=program)
    write_captions(captions, [(number, 0.0, 1.0) for number in range(len(names))])
    for name in (OWN, X264_DEFAULT):
        make_set(name, pieces=pieces, captions=captions, folder=folder, program=program)
    make_data_folder(folder)
    if has_latents:
        words = ("--vae", "tiny", "--size", str(LATENT_PX), "--segment", LATENT_SEGMENT)
        run_measured(prep_command("latents", *words, "--data", data_folder(folder, OWN), "--engine", "processes"))
    return names


def make_data_folder(folder: Path) -> None:
    """Move the files from plain ffmpeg calls to a data folder with the manifest of the folder of `prep chunk`."""
    data = data_folder(folder, X264_DEFAULT)
    shutil.copytree(data_folder(folder, OWN) / "manifest", data / "manifest")
    videos = read_videos(data)
    directory, split = data / "video" / _VARIANT, videos["split"][0].as_py()
    directory.mkdir(parents=True, exist_ok=True)
    with ShardWriter(directory, shard_id=0, extensions=("mp4",), fields=VIDEO_FIELDS) as writer:
        for video_id in sorted(videos["video_id"].to_pylist()):
            content = chunk_path(folder, X264_DEFAULT, int(video_id)).read_bytes()
            facts = vars(read_chunk(content, fps=Fraction(FPS)))
            fields = {
                **{"video_id": video_id, "start_ms": 0, "fps_num": FPS, "fps_den": 1, "span_fingerprint": "00"},
                **{"num_frames": len(facts["packet_frame"]), **facts},
            }
            writer.add(Sample(key=chunk_key(video_id, 0), members={"mp4": content}, fields=fields))
        files = writer.publish(_FINGERPRINT)
    write_commit(directory, Commit("video", 0, split, _FINGERPRINT, files, ()))
    set_current_variant(data, "video", _VARIANT)


class DataSteps:
    """Training steps (forward, backward, optimizer) on batches from the loader, or on one batch in memory."""

    def __init__(self, settings: MaeSettings, *, device: torch.device) -> None:
        self._settings, self._device = settings, device
        attention = open_attention(settings.attention, device_type=device.type)
        task = MaeTask(settings, attention=attention, device=device)
        self._samples = task.training_set(World())
        self._precision = open_precision(settings.precision, device_type=device.type)
        torch.manual_seed(0)
        self._model = task.build_model(self._samples).to(device).train()
        self._objective = task.build_objective(self._samples, World()).to(device)
        self._optimizer = make_optimizer(self._model, self._objective, settings)
        self._number = 0

    def from_memory(self, count: int) -> tuple[float, float]:
        """Return the wall and CPU seconds of a step on a batch in memory."""
        batches = self._samples.batches(position=0, max_failures=0)
        batch = to_device(next(batches).batch, self._device)
        batches.close()
        self._take(batch)

        def again() -> Iterator[Batch]:
            while True:
                yield batch

        wall_s, cpu_s, _ = self._time_steps(again(), count)
        return wall_s, cpu_s

    def from_loader(self, count: int) -> tuple[float, float, float]:
        """Return the wall and CPU seconds of a step, and the wall seconds that the step waits for its batch."""
        batches = prefetch(self._samples.batches(position=0, max_failures=0), self._device)
        try:
            # Use up the batches that were loaded before the timing.
            for _ in range(self._settings.batches_ahead + 2):
                self._take(next(batches).batch)
            return self._time_steps(_only_batches(batches), count)
        finally:
            batches.close()

    def _time_steps(self, batches: Iterator[Batch], count: int) -> tuple[float, float, float]:
        waited_s = 0.0
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            began_s = time.perf_counter()
            batch = next(batches)
            waited_s += time.perf_counter() - began_s
            self._take(batch)
        return (time.perf_counter() - wall_s) / count, (time.process_time() - cpu_s) / count, waited_s / count

    def _take(self, batch: Batch) -> None:
        self._number += 1
        self._optimizer.zero_grad(set_to_none=True)
        self._objective.backward(self._model, batch, Step(number=self._number, autocast=self._precision.autocast))
        self._optimizer.step()
        wait_for(self._device)


def _only_batches(loaded: Generator[LoadedBatch, None, None]) -> Iterator[Batch]:
    for one in loaded:
        yield one.batch

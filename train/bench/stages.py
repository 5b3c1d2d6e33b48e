"""Rates of the stages of a step: those of the loader's threads, the copy to the device, and the model's.

Nothing is built for measuring: loader and steps are those of a run, and a stopwatch around their methods adds up the
time that each stage takes. A loader thread runs its stages in sequence, so the rate of a stage is that of all threads
if they did nothing else.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from clipmill.manifests.progress import Activity
from clipmill.train.bench.steps import Opened, Steps, enough_samples
from clipmill.train.data.batch import to_device
from clipmill.train.data.chunks import ClipReader
from clipmill.train.data.decoders import ChunkBytes

READ, DECODE, CROP, TOKENS, AUGMENT = "read", "decode", "crop", "tokens", "augment"
LOADING = (READ, DECODE, CROP, TOKENS)


class Stopwatch:
    """Seconds of each call by stage while `is_running`; a stage within another one counts only as itself.

    Args:
        wait: waits for what a stage has queued on the device.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.is_running = False
        self._wait, self._local = wait, threading.local()

    def timed(self, stage: str, work: Callable[..., Any], *, is_on_device: bool = False) -> Callable[..., Any]:
        """Return `work`, whose calls count as `stage`."""

        def call(*arguments: Any, **named: Any) -> Any:
            if not self.is_running:
                return work(*arguments, **named)
            outside_s, self._local.inside_s = getattr(self._local, "inside_s", 0.0), 0.0
            if is_on_device:
                self._wait()
            began_s = time.perf_counter()
            try:
                done = work(*arguments, **named)
                if is_on_device:
                    self._wait()
                return done
            finally:
                took_s = time.perf_counter() - began_s
                self.times_s[stage].append(took_s - self._local.inside_s)
                self._local.inside_s = outside_s + took_s

        return call

    def watch(self, owner: object, method: str, stage: str, *, is_on_device: bool = False) -> None:
        """Count the calls of an object's method as `stage` from now on, if it has that method."""
        if (work := getattr(owner, method, None)) is not None:
            setattr(owner, method, self.timed(stage, work, is_on_device=is_on_device))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Items per second.

    Attributes:
        stages: by stage; None for one that is not needed here. Those of loading are known of clips of pixels alone.
        loader, compute: of the loader alone, from disk to batches, and of steps whose batch is on the device.
        read_bytes_per_item: read from the disk; None where the stages of loading are not known.
        failed: details of samples that could not be loaded, by key.
    """

    stages: dict[str, float | None]
    loader: float
    compute: float
    read_bytes_per_item: float | None
    failed: dict[str, str]


def measure_stages(opened: Opened, *, seconds: float) -> tuple[Rates, Steps]:
    """Measure the loader, the copy to the device and steps for about `seconds` each; return the steps too.

    Raises:
        FailedWork: too many samples could not be loaded.
    """
    settings, batch = opened.settings, opened.settings.batch
    watch, sizes, failed = Stopwatch(opened.wait), list[int](), dict[str, str]()
    reader = getattr(opened.samples, "reader", None)
    if isinstance(reader, ClipReader):  # latents and streams have no such stages
        _watch_loading(reader, watch, sizes)
    # However many may fail, a set of which each sample has failed a hundred times has no rate.
    max_failures = min(settings.max_failures, 100 * (opened.samples.num_samples or 1000))
    batches = opened.samples.batches(position=0, max_failures=max_failures)
    watch.is_running, waits_s = True, list[float]()
    with Activity("measuring the loader"), enough_samples(settings), closing(batches):
        while sum(waits_s[1:]) < seconds:  # the first one starts the threads
            began_s = time.perf_counter()
            loaded = next(batches)
            waits_s.append(time.perf_counter() - began_s)
            failed |= {one.key: one.detail for one in loaded.failed}
    watch.is_running = False
    # Threads have loaded more samples than were taken.
    num_loaded = len(watch.times_s[TOKENS])
    stages: dict[str, float | None] = {}
    if num_loaded:
        stages = {stage: settings.workers * num_loaded / sum(watch.times_s[stage]) for stage in LOADING}
    watch.watch(opened.task, "inputs", AUGMENT, is_on_device=True)
    with Activity("measuring the model"):
        steps = Steps(opened)
        on_device = loaded._replace(batch=to_device(loaded.batch, opened.device))

        def copy() -> None:
            to_device(loaded.batch, opened.device)
            opened.wait()

        is_copied = opened.device.type != "cpu"
        stages["transfer"] = batch / median(_times(copy, seconds=seconds)) if is_copied else None
        steps.take(on_device)
        watch.is_running = True
        steps_s = _times(lambda: steps.take(on_device), seconds=seconds)
        watch.is_running = False
    compute_s, augment_s = median(steps_s), 0.0
    if augmented_s := watch.times_s[AUGMENT]:  # once for each microbatch
        augment_s = median(augmented_s) * len(augmented_s) / len(steps_s)
        stages[AUGMENT] = batch / augment_s
    stages["model"] = batch / max(compute_s - augment_s, 1e-9)
    rates = Rates(
        stages=stages,
        loader=batch / fmean(waits_s[1:]),
        compute=batch / compute_s,
        read_bytes_per_item=sum(sizes) / num_loaded if num_loaded else None,
        failed=failed,
    )
    return rates, steps


def _watch_loading(reader: ClipReader, watch: Stopwatch, sizes: list[int]) -> None:
    """Measure the stages of loading clips, and collect the sizes of what is read of chunks."""
    chunks, decoder = reader.chunks, reader.decoder
    read_chunk, decode_each = chunks.read, decoder.decode_each

    def read(chunk: int, frames: Collection[int]) -> ChunkBytes:
        content = read_chunk(chunk, frames)
        sizes.append(content.size_bytes)
        return content

    def decode(content: ChunkBytes, use: Callable[..., None]) -> None:
        decode_each(content, watch.timed(CROP, use))  # each frame is cropped as the decoder outputs it

    watch.watch(reader, "plan", READ)
    setattr(chunks, "read", watch.timed(READ, read))  # noqa: B010 - an attribute of this object alone
    setattr(decoder, "decode_each", watch.timed(DECODE, decode))  # noqa: B010
    watch.watch(reader, "_make", CROP)
    watch.watch(reader, "annotate", TOKENS)


def _times(work: Callable[[], object], *, seconds: float) -> list[float]:
    """Seconds of each call of `work`, which is called until `seconds` have passed."""
    taken = list[float]()
    while sum(taken) < seconds:
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return taken

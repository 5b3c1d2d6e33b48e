"""The pinned ring and the prefetch stream never hand out a batch that is being overwritten: races made likely."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill import open_clips
from clipmill.train.data import prefetch as prefetch_module
from clipmill.train.data.batch import Batch, BatchRing, Sample, to_device
from clipmill.train.data.latents.segments import SegmentQuery
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.prefetch import prefetch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_BATCHES = 24
BATCH = 32
CLIP_BYTES = 1 << 20  # 32 MiB a batch: half a millisecond of copying from pinned memory
SLOW_CYCLES = 20_000_000  # of the GPU, some 10 ms


def ring_batches(is_dry_run: bool) -> Iterator[LoadedBatch]:
    """Batches of a ring of two buffers; every byte of one is its number."""
    size = 1 << 10 if is_dry_run else CLIP_BYTES
    ring = BatchRing(BATCH, pin=not is_dry_run)
    for number in range(NUM_BATCHES):
        video = np.full(size, number, np.uint8)
        samples = [
            Sample(position=BATCH * number + row, key=f"{number}/{row}", caption_id=row, video=video)
            for row in range(BATCH)
        ]
        yield LoadedBatch(ring.collate(samples), (), Cursor(number + 1))


def consume(batches: Iterator[LoadedBatch], device: torch.device, *, pause_cycles: int) -> list[list[int]]:
    """Least and largest byte of each batch as the model's stream sees it, `pause_cycles` after it was handed out.

    The host runs ahead: nothing waits for the device before all batches are consumed.
    """
    seen = []
    for loaded in prefetch(batches, device):
        if device.type == "cuda":
            torch.cuda._sleep(pause_cycles)
        video = loaded.batch["video"]
        assert video.device.type == device.type
        seen.append(torch.stack([video.min(), video.max()]))
    return torch.stack(seen).cpu().tolist()


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the copying stream work on something else before each copy."""

    def slowly(batch: Batch, device: torch.device, **options: Any) -> Batch:
        torch.cuda._sleep(SLOW_CYCLES)
        return to_device(batch, device, **options)

    monkeypatch.setattr(prefetch_module, "to_device", slowly)


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes out whatever makes a stream, or the host, wait for a stream."""
    for kind, names in (
        (torch.cuda.Stream, ("synchronize", "wait_stream", "wait_event")),
        (torch.cuda.Event, ("synchronize", "wait")),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, lambda self, *arguments: None)


def without_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes out what keeps the allocator from giving memory away that another stream still reads."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


EXPECTED = [[number, number] for number in range(NUM_BATCHES)]


def test_a_batch_is_whole_while_the_model_is_slower_than_the_loader(device: torch.device, is_dry_run: bool) -> None:
    assert consume(ring_batches(is_dry_run), device, pause_cycles=SLOW_CYCLES) == EXPECTED


def test_a_batch_is_whole_while_copies_are_slower_than_the_loader(
    device: torch.device, is_dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_dry_run:
        slow_copies(monkeypatch)
    assert consume(ring_batches(is_dry_run), device, pause_cycles=0) == EXPECTED


def test_without_waiting_for_copies_batches_are_broken(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race above is one: what keeps it away is no accident."""
    with monkeypatch.context() as patch:
        slow_copies(patch)
        without_waiting(patch)
        extremes = consume(ring_batches(False), cuda, pause_cycles=0)
    torch.cuda.synchronize(cuda)
    assert extremes != EXPECTED


def test_without_records_of_streams_batches_are_broken(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the one of a model that is slower than the loader."""
    with monkeypatch.context() as patch:
        without_records(patch)
        extremes = consume(ring_batches(False), cuda, pause_cycles=SLOW_CYCLES)
    torch.cuda.synchronize(cuda)
    assert extremes != EXPECTED


@pytest.mark.parametrize("slow", ["model", "copies"])
def test_latents_are_those_that_a_cpu_reads(
    slow: str, latents_dir: Path, device: torch.device, is_dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring of the latents, which are gathered from mapped tars into pinned buffers."""

    def loader() -> Samples[Any]:
        loading = LoaderSettings(batch=16, seed=3)
        return open_latent_segments(SegmentQuery(latents_dir, split="train", segment="2s", loading=loading))

    expected = []
    for number, loaded in enumerate(loader().batches(max_failures=0)):
        expected.append(
            (loaded.batch["position"].tolist(), loaded.batch["latents"].clone(), loaded.batch["text"].clone())
        )
        if number == NUM_BATCHES:
            break
    if slow == "copies" and not is_dry_run:
        slow_copies(monkeypatch)
    batches = prefetch(loader().batches(max_failures=0), device)
    pairs = []
    for number, loaded in enumerate(batches):
        if slow == "model" and not is_dry_run:
            torch.cuda._sleep(SLOW_CYCLES)
        # Kept by copies on the device, so that memory of batches goes round.
        batch = loaded.batch
        pairs.append((batch["position"].tolist(), batch["latents"].clone(), batch["text"].clone()))
        if number == NUM_BATCHES:
            break
    batches.close()
    for (positions, latents, text), (own_positions, own_latents, own_text) in zip(pairs, expected, strict=True):
        assert positions == own_positions
        assert torch.equal(latents.cpu(), own_latents) and torch.equal(text.cpu(), own_text)


@pytest.mark.parametrize("rgb", [True, False])
def test_batches_of_a_loop_of_ones_own_can_be_kept(rgb: bool, clips_dir: Path, device: torch.device) -> None:
    shape: dict[str, Any] = {"batch": 4, "num_frames": 2, "size_px": 64, "rgb": rgb, "workers": 2}
    with open_clips(clips_dir, device=device, **shape) as on_device, open_clips(clips_dir, **shape) as on_cpu:
        kept = list(on_device)
        for batch, other in zip(kept, on_cpu, strict=True):
            assert batch["video"].device.type == device.type and batch["clip_id"].device.type == "cpu"
            assert torch.equal(batch["video"].cpu(), other["video"]) and batch["caption"] == other["caption"]

"""Mixtures of clips: contents of batches, resuming on other ranks, failures, and losses with per-sample state."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill import open_clips
from clipmill.manifests.errors import UserError
from clipmill.shards.reader import Variant
from clipmill.train.data.batch import Batch, BatchRing, to_device
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.mixed_samples import MixedSamples
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.samples import Samples
from clipmill.train.device.precision import open_precision
from clipmill.train.device.transfer import StepGuard
from clipmill.train.distributed.world import World
from clipmill.train.engine.loop import next_step, run_step
from clipmill.train.engine.metrics import Throughput
from clipmill.train.engine.state import State, new_state
from clipmill.train.losses.global_losses import GlobalContrast
from clipmill.train.losses.settings import Loss
from clipmill.train.models.attention import open_attention
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation, DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from tests.train.plane import ONE

CPU = torch.device("cpu")
SETTINGS = DualEncoderSettings(
    model="tiny", num_frames=2, size_px=32, batch=4, steps=6, warmup_steps=1, lr=1e-3, workers=1, seed=5, mix="2,1"
)


def task_on(*folders: Path, **more: Any) -> DualEncoderTask:
    shards: Any = tuple(map(str, folders)) if len(folders) > 1 else str(folders[0])
    settings = replace(SETTINGS, shards=shards, **more)
    return DualEncoderTask(settings, attention=open_attention("sdpa", device_type="cpu"), device=CPU)


def mixture(*folders: Path, world: World = ONE, **more: Any) -> MixedSamples:
    samples = task_on(*folders, **more).training_set(world)
    assert isinstance(samples, MixedSamples)
    return samples


def rows(loaded: list[LoadedBatch]) -> list[tuple[int, ...]]:
    """Return position, clip and caption of each sample, ordered by position."""
    names = ("position", "clip_id", "caption_id")
    each = [[loaded_batch.batch[name].tolist() for name in names] for loaded_batch in loaded]  # type: ignore[literal-required]
    return sorted(row for entry in each for row in zip(*entry, strict=True))


def test_each_sample_is_that_of_its_own_folder(near: Path, far: Path) -> None:
    """Folders may differ in frame size and rate. Ids and classes are numbered across both folders."""
    mixed = mixture(near, far)
    alone = [task_on(folder).training_set(ONE) for folder in (near, far)]
    assert (mixed.num_samples, mixed.num_clips, mixed.num_caption_ids) == (10, 10, 10)
    order, seen = mixed.folders.order, set()
    for loaded in islice(mixed.batches(max_failures=0), 9):
        batch: dict[str, Any] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in loaded.batch.items()
        }
        for row, position in enumerate(batch["position"].tolist()):
            sample = int(order.at(np.array([position]))[0])
            folder = int(order.folder_of(np.array([sample]))[0])
            folder_samples = alone[folder]
            assert isinstance(folder_samples, Samples)
            request = SampleRequest(sample - int(order.offsets[folder]), position, SETTINGS.seed)
            (expected,) = folder_samples.reader.load([request])
            assert isinstance(expected, dict)
            assert np.array_equal(batch["video"][row].numpy(), expected["video"])
            assert batch["tokens"][row].tolist() == expected["tokens"].tolist()
            assert batch["key"][row] == expected["key"]
            assert int(batch["clip_id"][row]) == expected["clip_id"] + (0, 6)[folder]
            assert int(batch["caption_id"][row]) == expected["caption_id"] + (0, 6)[folder]
            seen.add(sample)
    assert seen == set(range(10))
    assert sum(mixed.folders.counts(36).values()) == 36 and mixed.folders.counts(36)["near"] == 24


@pytest.mark.parametrize("group", [1, 3])
def test_a_run_goes_on_with_the_same_samples_on_other_ranks(near: Path, far: Path, group: int) -> None:
    """One process reads two batches, then two processes read more. Groups of three are resumed within a group."""
    more: dict[str, Any] = {"samples_per_chunk": group, "size_px": 16}
    whole = rows(list(islice(mixture(near, far, **more).batches(max_failures=0), 9)))
    begun = mixture(near, far, **more)
    first = list(islice(begun.batches(max_failures=0), 2))
    assert group == 1 or begun.cursor.position % group
    later: list[LoadedBatch] = []
    for rank in range(2):
        mixed = mixture(near, far, world=World(rank=rank, size=2), **more)
        mixed.load_state_dict(begun.state_dict())
        later += islice(mixed.batches(max_failures=0), 4)
    resumed = rows([*first, *later])
    if group == 1:
        assert resumed == whole[: len(resumed)]
    else:  # a group of three does not divide a rank's part of the batch, so the same samples are in different batches
        assert len(set(resumed)) == len(resumed) and set(resumed) <= set(whole)


def damage_copy(folder: Path, to: Path) -> Path:
    """Copy a folder, and damage the first chunk of the first video so that its checksum does not match."""
    shutil.copytree(folder, to)
    shard = Variant.open(to).shards()[0]
    content = bytearray(shard.tar_path.read_bytes())
    offset, size = (shard.index[f"mp4_{what}"][0].as_py() for what in ("offset", "size"))
    for at in range(offset + 64, offset + size, 64):
        content[at] ^= 0xFF
    shard.tar_path.write_bytes(content)
    return to


def test_failures_name_their_folder_and_a_run_goes_on_after_them(near: Path, far: Path, tmp_path: Path) -> None:
    broken = damage_copy(far, tmp_path / "broken")
    loaded_batches = list(islice(mixture(near, broken).batches(max_failures=100), 8))
    failed = [failure for loaded_batch in loaded_batches for failure in loaded_batch.failed]
    assert failed and all(
        failure.key.startswith("a_") and f"(data folder {broken})" in failure.detail for failure in failed
    )
    resumed = mixture(near, broken)
    resumed.cursor = loaded_batches[3].cursor
    state = resumed.state_dict()
    again = mixture(near, broken)
    again.load_state_dict(state)
    assert rows(list(islice(again.batches(max_failures=100), 4))) == rows(loaded_batches[4:])


def take_step(state: State, batch: Batch, task: DualEncoderTask, samples: MixedSamples | Samples[Any]) -> None:
    """Take one optimizer step on a batch."""
    settings = task._settings
    step = next_step(state, samples, settings, world=ONE)
    loaded = LoadedBatch(to_device(batch, CPU), (), Cursor(state.cursor.position + settings.batch))
    precision = open_precision("fp32", device_type="cpu").name
    throughput, guard = Throughput(device=CPU, precision=precision), StepGuard(CPU)
    run_step(step, state, loaded, settings, world=ONE, throughput=throughput, guard=guard)


def test_state_per_sample_is_that_of_the_same_samples_in_one_folder(near: Path, far: Path, merged_data: Path) -> None:
    """u and the temperature of each clip and caption (iSogCLR), and therefore the weights, are bit-identical."""
    loss = Loss(kind="isogclr")
    mixed_task, merged_task = task_on(near, far, loss=loss), task_on(merged_data, loss=loss)
    mixed, whole = mixed_task.training_set(ONE), merged_task.training_set(ONE)
    assert isinstance(mixed, MixedSamples) and isinstance(whole, Samples)
    states = [
        new_state(task, samples, task._settings, world=ONE, device=CPU)
        for task, samples in ((mixed_task, mixed), (merged_task, whole))
    ]
    in_whole = {
        whole.text(clip): (clip, whole.captions.caption_id(whole.captions.first_entry(clip)))
        for clip in range(len(whole))
    }
    pairs: dict[str, set[tuple[int, int]]] = {"clips": set(), "captions": set()}
    ring = BatchRing(4, pin=False)
    for loaded in islice(mixed.batches(max_failures=0), 6):
        take_step(states[0], loaded.batch, mixed_task, mixed)
        expected = []
        for position, clip, caption in zip(
            *(loaded.batch[name].tolist() for name in ("position", "clip_id", "caption_id")),  # type: ignore[literal-required]
            strict=True,
        ):
            part = mixed.parts[0 if clip < 6 else 1]
            clip_there, caption_there = in_whole[part.text(clip - (0 if clip < 6 else 6))]
            pairs["clips"].add((clip, clip_there))
            pairs["captions"].add((caption, caption_there))
            expected.append(SampleRequest(clip_there, position, SETTINGS.seed))
        same = [sample for sample in whole.reader.load(expected) if not isinstance(sample, FailedSample)]
        take_step(states[1], ring.collate(same), merged_task, whole)
    objectives = [state.objective for state in states]
    for name, its in pairs.items():
        tables = [getattr(objective, name) for objective in objectives if isinstance(objective, GlobalContrast)]
        here, there_ids = (torch.tensor(ids) for ids in zip(*sorted(its), strict=True))
        assert len(its) > 6 and torch.equal(tables[0].read(here), tables[1].read(there_ids))
        assert tables[0].read(here).isfinite().all()
    for parameter, other in zip(states[0].parameters(), states[1].parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_mixtures_in_python(near: Path, far: Path) -> None:
    shown = open_clips([near, far], mix=[2, 1], batch=6, num_frames=2, size_px=32, workers=1)
    assert len(shown) == 1 and shown.num_samples == 10
    batches = [next(iter(shown)) for _ in range(4)]
    assert [int((batch["folder"] == 0).sum()) for batch in batches] == [4] * 4
    assert all((batch["end_s"] > batch["begin_s"]).all() for batch in batches)
    labelled = open_clips([near, far], label="motion", batch=4, num_frames=2, size_px=32, shuffle=False, workers=1)
    assert labelled.classes == ("down", "left", "up")
    in_order = list(labelled)
    assert torch.cat([batch["folder"] for batch in in_order]).tolist() == [0] * 6 + [1] * 4
    names = [labelled.classes[batch] for batch in torch.cat([label["label"] for label in in_order]).tolist()]
    assert names == ["up", "down"] * 3 + ["up", "left"] * 2


def test_where_selects_in_each_folder_and_not_in_their_evaluations(near: Path, far: Path) -> None:
    # The expression selects 2 captions of `near` and all 4 of `far`, whose chunks are longer.
    where = "begin_s == 0 and text != 'near a begins'"
    samples = mixture(near, far, where=where)
    assert samples.num_clips == 2 + 4
    task = task_on(near, far, where=where)
    for data in task._settings.evaluated_data():
        held_out = task.with_data(data.shards).samples(data.split, ONE)
        assert held_out.num_samples == 4


def test_a_folder_that_cannot_be_evaluated_is_named_without_a_flag_that_was_not_given(near: Path, far: Path) -> None:
    task = task_on(near, far, evaluate=DualEncoderEvaluation(every=1, split="dev"))
    with pytest.raises(UserError, match=f"^evaluation of {near}: .* has no videos of split 'dev'") as caught:
        task.training_set(ONE)
    assert "select the data to evaluate with --evaluate.shards" in (caught.value.hint or "")

from itertools import islice

import numpy as np
import torch

from clipmill.train.data.batch import to_device
from clipmill.train.data.producers.latent_segments import open_latent_segments
from tests.train.latents.querying import segments
from tests.train.latents.written import Written


def test_a_batch_is_valid_until_two_further_ones_were_taken(written_data: Written) -> None:
    kept = open_latent_segments(segments(written_data.data_dir, split="train", batch=2, can_keep=True))
    kept_batches = [loaded.batch for loaded in islice(kept.batches(), 20)]
    taken = []
    for number, loaded in enumerate(
        islice(open_latent_segments(segments(written_data.data_dir, split="train", batch=2)).batches(), 20)
    ):
        taken.append(loaded.batch)
        for valid, right in zip(taken[-2:], kept_batches[: number + 1][-2:], strict=True):
            assert torch.equal(valid["latents"], right["latents"]) and torch.equal(valid["text"], right["text"])
    assert len({batch["latents"].data_ptr() for batch in taken}) == 2
    # Only the tensors of the ring may be overwritten.
    for batch, right in zip(taken, kept_batches, strict=True):
        assert torch.equal(batch["position"], right["position"]) and batch["key"] == right["key"]
        assert torch.equal(batch["caption_id"], right["caption_id"])


def test_a_copied_batch_owns_its_memory(written_data: Written) -> None:
    loader = open_latent_segments(segments(written_data.data_dir, split="train", batch=2, can_keep=True)).batches()
    first = next(loader).batch
    latents, text = first["latents"].clone(), first["text"].clone()
    del loader
    others = list(
        islice(
            open_latent_segments(segments(written_data.data_dir, split="train", batch=2, can_keep=True)).batches(), 50
        )
    )
    assert len({loaded.batch["latents"].data_ptr() for loaded in others}) == 50
    assert torch.equal(first["latents"], latents) and torch.equal(first["text"], text)


def test_batches_outlive_their_loader(written_data: Written) -> None:
    batch = next(open_latent_segments(segments(written_data.data_dir, split="train", batch=2)).batches()).batch
    assert not torch.isnan(batch["latents"]).any()
    assert len(list(batch["key"])) == 2


def test_a_smaller_last_batch_keeps_its_ring(written_data: Written) -> None:
    loader = open_latent_segments(segments(written_data.data_dir, split="train", captions="none", batch=4))
    for _ in range(3):
        sizes = [len(loaded.batch["latents"]) for loaded in loader.evaluation_batches()]
        assert sum(sizes) == len(loader) and set(sizes[:-1]) == {4} and sizes[-1] == len(loader) % 4 > 0


def test_keys_are_a_sequence_of_strings(written_data: Written) -> None:
    batch = next(open_latent_segments(segments(written_data.data_dir, split="train", batch=4)).batches()).batch
    keys = batch["key"]
    assert list(keys) == [keys[number] for number in range(4)] == keys[:4] and keys[-1] == list(keys)[-1]
    assert keys == list(keys) and keys != list(keys)[:3]
    assert all(key in written_data.latents for key in keys)


def test_a_batch_goes_to_a_device_whole(written_data: Written) -> None:
    batch = next(
        open_latent_segments(segments(written_data.data_dir, split="train", tails="pad", batch=4)).batches()
    ).batch
    moved = to_device(batch, torch.device("meta"))
    for name in ("latents", "text", "num_frames"):
        assert moved[name].device.type == "meta"  # type: ignore[literal-required]
    assert moved["input"] == "latents" and np.array_equal(list(moved["key"]), list(batch["key"]))

"""`open_clips` with the command's settings: sources, relevancy, all captions, augmented model input, views."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill import UserError
from clipmill.train.config.clips import Augment, CaptionSettings
from clipmill.train.config.model import DualEncoderInit
from clipmill.train.distributed.world import World
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from tests.train.python.test_open_clips import copy_of, open_batches
from tests.train.tiny_data import Caption, write_captions

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


@pytest.fixture
def narrated_data(data_dir: Path, tmp_path: Path) -> Path:
    """Data with one human caption and two model captions for each clip, and labels."""
    copy, videos = copy_of(data_dir, tmp_path), {"a": "train", "b": "train", "c": "train", "d": "val"}
    sources = (("first", "human"), ("second", "model"), ("third", "model"))
    captions = [
        Caption(video, begin_s, begin_s + 1, f"{words} of {video}", source, {"label_verb": 3, "label_nouns": [noun]})
        for video in videos
        for begin_s, noun in ((0.0, 1), (2.0, 2))
        for words, source in sources
    ]
    write_captions(copy, videos, captions)
    return copy


def test_model_input_and_captions_are_those_of_the_training_command(narrated_data: Path) -> None:
    settings = DualEncoderSettings(
        shards=str(narrated_data),
        batch=4,
        num_frames=2,
        size_px=32,
        seed=7,
        model="tiny",
        init=DualEncoderInit(pixel_mean=MEAN, pixel_std=STD),
        augment=Augment(flip=0.5, contrast=0.4, erase=0.5, rand_ops=1),
        captions=CaptionSettings(sources="human=1,model=3", min_relevancy=0.4),
    )
    task = DualEncoderTask(settings, attention=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    command = task.training_set(World()).batches(max_failures=0)
    shown: dict[str, Any] = {"pixel_mean": MEAN, "pixel_std": STD, "sources": {"human": 1, "model": 3}}
    augment = {"flip": 0.5, "contrast": 0.4, "erase": 0.5, "rand_ops": 1}
    with open_batches(narrated_data, batch=4, seed=7, augment=augment, min_relevancy=0.4, **shown) as clips:
        for batch in clips:
            expected = next(command).batch
            assert torch.equal(batch["video"], task.clips(expected, is_training=True))
            assert batch["caption_id"].tolist() == expected["caption_id"].tolist()
            assert torch.equal(batch["relevancy"], expected["relevancy"]) and "colour" not in batch
    command.close()


def test_all_captions_of_a_clip_come_with_it(narrated_data: Path, data_dir: Path) -> None:
    expected: dict[str, Any] = {"captions": "all", "sources": {"model": 2}, "shuffle": False, "batch": 12}
    with open_batches(narrated_data, **expected) as clips:
        [batch] = clips
    assert batch["captions"][:2] == [["second of a", "third of a"]] * 2
    assert batch["caption"] == [texts[0] for texts in batch["captions"]]
    with open_batches([narrated_data, data_dir], captions="all", shuffle=False, batch=20) as clips:
        [batch] = clips
    of_folder = {0: ["first of a", "second of a", "third of a"], 1: ["it begins"]}
    # In reversed order, the first clip of each folder wins.
    captions_by_folder = dict(zip(batch["folder"].tolist()[::-1], batch["captions"][::-1], strict=True))
    assert captions_by_folder == of_folder


def test_views_are_a_dimension_of_their_own(data_dir: Path) -> None:
    views: dict[str, Any] = {"shuffle": False, "split": "val", "clips": 2, "crops": 3, "batch": 3}
    with (
        open_batches(data_dir, **views) as several,
        open_batches(data_dir, **views | {"clips": 1, "crops": 1}) as centres,
    ):
        [batch], [centre] = several, centres
    assert batch["video"].shape == (3, 6, 2, 32, 32, 3) and centre["video"].shape == (3, 2, 32, 32, 3)
    assert not torch.equal(batch["video"][:, 0], batch["video"][:, 3])  # different moments
    with open_batches(data_dir, **views, pixel_mean=MEAN, pixel_std=STD) as normalised:
        [batch_of_floats] = normalised
    # The tolerance allows for rounding to eight-bit RGB.
    pictures = batch_of_floats["video"].movedim(2, -1) * torch.tensor(STD) + torch.tensor(MEAN)
    assert pictures.shape == (3, 6, 2, 32, 32, 3)
    assert (pictures * 255 - batch["video"]).abs().max() <= 2


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        ({"sources": {"robot": 1}}, r"the source 'robot' \(requested by sources\)", "human"),
        ({"sources": {"human": -1}}, "sources has an invalid entry: 'human=-1'", "each source once"),
        ({"sources": "human=1"}, "sources is 'human=1'", "for each name"),
        ({"min_relevancy": 2.0}, "min_relevancy is 2.0", "min_relevancy must be"),
        ({"augment": {"flip": 2}, "pixel_mean": MEAN, "pixel_std": STD}, "augment.flip is 2", "augment.flip must be"),
        ({"augment": {"flap": 1}, "pixel_mean": MEAN, "pixel_std": STD}, "augment is {'flap': 1}", "brightness"),
        ({"augment": {"flip": 1}}, "pixel_mean is None", "augment needs both"),
        ({"pixel_mean": MEAN, "pixel_std": (0, 0, 0)}, "pixel_std is", "from 0.001 to 1"),
        ({"clips": 2}, "clips is 2", "shuffle=False"),
        ({"captions": "every"}, "captions is 'every'", "text, embedding, all"),
        ({"captions": "embedding"}, "has no text shards", "prep text"),
        ({"label": "verb", "captions": "all"}, "label is 'verb', which cannot be combined", "omit"),
        ({"label": "kind"}, "no column label_kind", "for example label "),
        ({"num_frames": 0}, "^num_frames is 0", "num_frames must be from 1"),
        ({"size_px": 32, "num_frames": 2, "stride": 0}, "^stride is 0", "stride must be from 1"),
        ({"where": "motion >"}, "where 'motion >': character 9", "write a condition such as"),
    ],
)
def test_errors_name_arguments_and_not_flags(
    narrated_data: Path, changes: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        open_batches(narrated_data, **changes)
    assert caught.value.hint is not None and hint in caught.value.hint
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]

"""The evaluation in the loop on a real data folder, with one rank and with two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.runner import sample_stride
from clipmill.train.models.attention import open_attention
from clipmill.train.tasks.dual_encoder.protocols import embed_all
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation, DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from tests.train.evaluation.threads import on_two_ranks
from tests.train.tiny_data import FPS, Caption, encode_chunk, video_sample, write_captions, write_shard

CPU = torch.device("cpu")


def settings(data_dir: Path, **evaluate: Any) -> DualEncoderSettings:
    evaluation = DualEncoderEvaluation(every=1, split="train", **evaluate)
    return DualEncoderSettings(
        shards=str(data_dir), model="tiny", num_frames=2, size_px=32, batch=4, workers=1, evaluate=evaluation
    )


def task_of(chosen: DualEncoderSettings) -> DualEncoderTask:
    return DualEncoderTask(chosen, attention=open_attention("sdpa", device_type="cpu"), device=CPU)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos for training and one held-out video, without equal frames.

    Among equal clips, rounding would decide the rank.
    """
    data_dir = tmp_path_factory.mktemp("unlike")
    splits = {"a": "train", "b": "train", "c": "train", "d": "val"}
    chunks = {
        name: [
            video_sample(name, 20 * number * 1000 // FPS, encode_chunk(60 * which + 20 * number, 20))
            for number in range(3)
        ]
        for which, name in enumerate(splits)
    }
    write_shard(data_dir, 0, [*chunks["a"], *chunks["b"], *chunks["c"]], split="train")
    write_shard(data_dir, 1, chunks["d"], split="val")
    spans = {"it begins": (0.0, 1.0), "the middle": (1.2, 2.8), "the end": (3.0, float("inf"))}
    captions = [
        Caption(name, begin_s, end_s, words if words == "it begins" else f"{words} of {name}")
        for name in splits
        for words, (begin_s, end_s) in spans.items()
    ]
    write_captions(data_dir, splits, captions)
    return data_dir


@pytest.fixture(scope="module")
def model(data_dir: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    task = task_of(settings(data_dir))
    return task.build_model(task.training_set(World())).eval()


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("classes")
    names = ["it begins", *(f"the {part} of {video}" for part in ("middle", "end") for video in "abc")]
    (folder / "classes.txt").write_text("\n".join(names))
    (folder / "templates.txt").write_text("{}\na video in which {}")
    return {name: folder / f"{name}.txt" for name in ("classes", "templates")}


@pytest.mark.parametrize("protocol", ["retrieval", "zero-shot"])
def test_two_ranks_find_the_numbers_of_one(
    data_dir: Path, model: torch.nn.Module, classes: dict[str, Path], protocol: str
) -> None:
    chosen = settings(data_dir, protocol=protocol, **(classes if protocol == "zero-shot" else {}))

    def work(world: World) -> dict[str, float]:
        task = task_of(chosen)
        task.training_set(world)
        return task.evaluate(model, world)

    alone = work(World())
    assert alone and all(name.startswith("train/") for name in alone)
    for numbers in on_two_ranks(work):
        assert numbers == pytest.approx(alone)


def test_samples_are_spread_over_the_split(data_dir: Path, model: torch.nn.Module) -> None:
    task = task_of(settings(data_dir))
    samples = task.samples("train", World())
    embeddings = embed_all(task, model, samples.evaluation_batches(stride=4), device=CPU)
    assert embeddings.samples.tolist() == [0, 4, 8]
    ranks = [task.samples("train", World(rank=rank, size=2)).evaluation_batches(stride=2) for rank in range(2)]
    parts = [embed_all(task, model, batches, device=CPU).samples.tolist() for batches in ranks]
    assert parts == [[0, 4, 8], [2, 6]]
    assert [sample_stride(9, at_most=most) for most in (2, 4, 8, 9, 100)] == [5, 3, 2, 1, 1]


def test_several_looks_at_a_clip_are_other_frames_of_it(data_dir: Path, model: torch.nn.Module) -> None:
    task = task_of(settings(data_dir))
    once = embed_all(task, model, task.samples("val", World()).evaluation_batches(), device=CPU)
    looks = task.samples("val", World(), num_clips=3)
    thrice = embed_all(task, model, looks.evaluation_batches(), device=CPU, num_clips=3)
    assert thrice.video.shape == once.video.shape and not np.allclose(thrice.video, once.video)
    assert np.allclose(np.linalg.norm(thrice.video, axis=1), 1) and np.array_equal(thrice.text, once.text)


def test_a_loop_without_evaluation_has_no_numbers(data_dir: Path, model: torch.nn.Module) -> None:
    chosen = replace(settings(data_dir), evaluate=DualEncoderEvaluation())
    task = task_of(chosen)
    task.training_set(World())
    assert task.evaluate(model, World()) == {}


@pytest.mark.parametrize(
    ("evaluate", "error"),
    [
        ({"protocol": "mir"}, "no verb and noun classes"),
        ({"protocol": "zero-shot"}, "no labels"),
        ({"protocol": "mir", "relevancy": Path("none.npy")}, "none.npy"),
    ],
)
def test_mistakes_show_before_training_begins(data_dir: Path, evaluate: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        task_of(settings(data_dir, **evaluate)).training_set(World())


def test_settings_out_of_range_name_the_flag() -> None:
    with pytest.raises(UserError, match=r"--evaluate\.max-samples is 1"):
        DualEncoderEvaluation(max_samples=1)

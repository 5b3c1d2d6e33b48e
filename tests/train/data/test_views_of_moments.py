"""Clips from several cameras: their views show the same moments, and towers use their mean or all their tokens."""

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill import Batches, load_model, open_clips
from clipmill.manifests.errors import UserError
from clipmill.prep.synthetic import read_frame_number
from clipmill.train.config.model import DualEncoderTowers, Towers
from clipmill.train.data.loader import SampleRequest
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.video_vit import VideoViT, clip_tower
from clipmill.train.models.views import accept_views
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.train.running import train
from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard

FPS = {"top": Fraction(10), "wrist": Fraction(20)}
# Start and end of each episode in the file of each camera. The wrist camera recorded less of the second episode.
SPANS = {"top": [(0.0, 1.5), (1.5, 3.0)], "wrist": [(0.5, 2.0), (2.0, 3.0)]}
SIZE_PX = 64
VIEWS = ("top", "wrist")
SMALL: dict[str, Any] = {"batch": 2, "num_frames": 3, "size_px": SIZE_PX, "crop": "centre", "workers": 1, "rgb": False}


def captions_of(spans: dict[str, list[tuple[float, float]]]) -> list[Caption]:
    return [
        Caption(
            view, *span, f"episode {number}", labels={"group": f"e{number}", "view": view, "label_done": str(number)}
        )
        for view, its in spans.items()
        for number, span in enumerate(its)
    ]


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("robot")
    # The frame numbers of the cameras do not overlap, so frames cannot be confused.
    chunks = [("top", 100, 30), ("wrist", 200, 80), ("alone", 0, 30)]
    samples = [
        video_sample(name, 0, encode_chunk(first, count, fps=FPS.get(name, Fraction(10))), fps=FPS.get(name, 10))
        for name, first, count in chunks
    ]
    write_shard(data_dir, 0, samples, split="train")
    write(data_dir, captions_of(SPANS))
    return data_dir


def write(data_dir: Path, captions: list[Caption]) -> None:
    write_captions(data_dir, dict.fromkeys(("top", "wrist", "alone", "unmade"), "train"), captions)


def open_batches(data_dir: Path, **changes: Any) -> Batches:
    return open_clips(data_dir, **{"views": VIEWS, **SMALL, **changes})


def numbers_in(video: torch.Tensor) -> np.ndarray:
    frames = video.flatten(0, -2)[:, : SIZE_PX**2].reshape(-1, SIZE_PX, SIZE_PX).numpy()
    return np.array([read_frame_number(frame) for frame in frames]).reshape(video.shape[:-1])


@pytest.mark.parametrize("sampling", ["uniform", "stride", "lavila"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_views_show_the_same_moments(robot: Path, sampling: str, shuffle: bool) -> None:
    with open_batches(robot, sampling=sampling, stride=3, shuffle=shuffle) as clips:
        batches = list(clips) + list(clips)
    assert clips.num_samples == 2
    for batch in batches:
        assert batch["video"].shape[:3] == (2, 2, 3) and batch["colour"].shape == (2, 2)
        top, wrist = numbers_in(batch["video"]).transpose(1, 0, 2)
        time_s = batch["time_s"].numpy()
        assert np.allclose(time_s[:, 0], (top - 100) / 10) and np.allclose(time_s[:, 1], (wrist - 200) / 20)
        for row, text in enumerate(batch["caption"]):
            episode = int(text[-1])
            offsets = [time_s[row, at] - SPANS[view][episode][0] for at, view in enumerate(VIEWS)]
            # The moment lies within the frame of the slower camera, and the other camera shows its frame at that
            # moment.
            assert (offsets[1] > offsets[0] - 0.05 - 1e-9).all() and (offsets[1] < offsets[0] + 0.1 - 1e-9).all()
            assert batch["begin_s"][row] == SPANS["top"][episode][0]
            assert offsets[0].min() >= 0 and offsets[0].max() < 1.5 and offsets[1].max() < (1.5, 1.0)[episode]


def test_order_of_views_labels_rgb_and_model_input(robot: Path) -> None:
    with open_batches(robot, views=("wrist", "top"), label="done", shuffle=False) as clips:
        [batch] = clips
    assert numbers_in(batch["video"])[:, 0].min() >= 200 and batch["label"].tolist() == [0, 1]
    with open_batches(robot, rgb=True, shuffle=False) as clips:
        [rgb] = clips
    assert rgb["video"].shape == (2, 2, 3, SIZE_PX, SIZE_PX, 3) and "colour" not in rgb
    colours = {"pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.5, 0.5, 0.5), "augment": {"flip": 0.5}}
    with open_batches(robot, **colours) as clips:
        batch = next(iter(clips))
    assert batch["video"].shape == (2, 2, 3, 3, SIZE_PX, SIZE_PX)


def test_clips_that_are_read_ahead_are_the_same(robot: Path) -> None:
    with open_batches(robot) as clips:
        reader, requests = clips._samples.loader.reader, [SampleRequest(number, number, 7) for number in range(2)]
        for loaded, ahead in zip(reader.load(requests), reader.load_read(reader.read(requests)), strict=True):
            assert np.array_equal(loaded["video"], ahead["video"]) and loaded["time_s"] == ahead["time_s"]


def test_a_state_belongs_to_its_views(robot: Path) -> None:
    with open_batches(robot) as clips:
        state = clips.state_dict()
    with (
        open_batches(robot, views=("wrist", "top")) as clips,
        pytest.raises(UserError, match="belongs to other samples"),
    ):
        clips.load_state_dict(state)
    with open_clips(robot, **SMALL) as clips:
        assert clips.num_samples == 4  # without views, the spans of both cameras are clips


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:3], "1 of 2 groups have no view wrist: e1"),
        (
            lambda rows: [*rows, dataclasses.replace(rows[2], begin_s=0.75)],
            "different numbers of spans of views wrist and",
        ),
        (lambda rows: rows[:2], "the captions have no view wrist"),
        (lambda rows: [Caption("top", 0.0, 1.0, "a")], "the captions have no groups, and thus no views top, wrist"),
    ],
)
def test_groups_without_one_span_of_each_view_are_named(robot: Path, change: Any, words: str) -> None:
    try:
        write(robot, change(captions_of(SPANS)))
        with pytest.raises(UserError, match=words):
            open_batches(robot)
    finally:
        write(robot, captions_of(SPANS))


def test_the_parts_of_an_episode_are_moments_in_order(robot: Path) -> None:
    parts = {"top": [(0.8, 1.5), (0.0, 0.8), (1.5, 3.0)], "wrist": [(0.5, 1.3), (1.3, 2.0), (2.0, 3.0)]}
    rows = [
        Caption(
            view,
            *span,
            f"from {span[0]}",
            labels={"group": f"e{span[0] >= 1.5 + 0.5 * (view == 'wrist'):d}", "view": view},
        )
        for view, its in parts.items()
        for span in its
    ]
    try:
        write(robot, rows)
        with open_batches(robot, batch=3, shuffle=False) as clips:
            [batch] = clips
    finally:
        write(robot, captions_of(SPANS))
    assert batch["caption"] == ["from 0.0", "from 0.8", "from 1.5"]
    begins_s = [span[0] for span in sorted(parts["wrist"])]
    assert all(
        0 <= shown - begin < 0.3 for shown, begin in zip(batch["time_s"][:, 1, 0].tolist(), begins_s, strict=True)
    )


def test_groups_whose_view_was_not_encoded_are_omitted_and_counted(robot: Path) -> None:
    unmade = Caption("unmade", 2.0, 3.0, "episode 1", labels={"group": "e1", "view": "wrist"})
    try:
        write(robot, [*captions_of(SPANS)[:3], unmade])
        with open_batches(robot, batch=1) as clips:
            assert clips.num_samples == 1 and "1 moment with a view that has no usable chunks" in repr(clips)
    finally:
        write(robot, captions_of(SPANS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"views": "top,wrist"}, "views is 'top,wrist'"),
        ({"views": ("top",)}, "views top is not a list of different cameras"),
        ({"views": ("top", "top")}, "views top,top is not a list of different cameras"),
        ({"clips": 2, "shuffle": False}, "2 clips x 1 crops of 2 cameras"),
    ],
)
def test_views_that_do_not_fit_are_refused(robot: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_batches(robot, **changes)


def tower_of(rule: str, **settings: Any) -> tuple[VideoViT, VideoViT]:
    """Return a tower for two views, and a tower for one view with the same weights."""
    towers = Towers(views=rule, width=32, heads=2, depth=2, patch_px=16, temporal="random", **settings)  # type: ignore[arg-type]
    size = size_of("tiny", towers).video
    torch.manual_seed(0)
    several, single = (
        clip_tower(size, image_px=32, num_frames=2, embedding_width=8, attend=attend_with_sdpa, towers=towers).eval()
        for _ in range(2)
    )
    single.load_state_dict(several.state_dict())
    accept_views(several, num_views=2, rule=rule)  # type: ignore[arg-type]
    return several, single


def test_a_tower_takes_the_mean_of_views_or_all_of_their_tokens() -> None:
    clips_BVCTHW = torch.randn(3, 2, 3, 2, 32, 32)
    several, single = tower_of("mean")
    assert several.state_dict().keys() == single.state_dict().keys()
    views = [single(clips_BVCTHW[:, view]) for view in range(2)]
    assert torch.allclose(several(clips_BVCTHW), (views[0] + views[1]) / 2, atol=1e-6)
    assert torch.equal(several(clips_BVCTHW[:, 0]), views[0])
    several, single = tower_of("concat")
    assert several.state_dict().keys() - single.state_dict().keys() == {"view_embedding"}
    # Pass the concatenated tokens of both views through the blocks.
    tokens = torch.cat([single.embed(clips_BVCTHW[:, view]) for view in range(2)], dim=1)
    expected = single.finish(single.transformer(tokens))
    assert torch.allclose(several.tokens(clips_BVCTHW), expected, atol=1e-6)
    assert torch.allclose(several(clips_BVCTHW), expected[:, 0] @ single.proj, atol=1e-6)
    assert not torch.allclose(several(clips_BVCTHW), (views[0] + views[1]) / 2, atol=1e-2)
    with torch.no_grad():
        several.get_parameter("view_embedding")[1] = torch.randn(32)
    assert not torch.allclose(several.tokens(clips_BVCTHW), expected, atol=1e-2)


def test_a_tower_that_cannot_concatenate_is_refused() -> None:
    with pytest.raises(UserError, match="has no blocks that attend to all tokens at once"):
        tower_of("concat", attention="divided")


@pytest.mark.parametrize("rule", ["mean", pytest.param("concat", marks=pytest.mark.nightly)])
def test_a_run_with_views_trains_evaluates_exports_and_is_loaded(robot: Path, tmp_path: Path, rule: str) -> None:
    flags = "--model tiny --towers.depth 1 --size-px 32 --num-frames 2 --batch 2 --steps 1 --device cpu --workers 1"
    views = ("--views", "top,wrist", "--towers.views", rule)
    assert train("dual-encoder", "--shards", robot, "--out", tmp_path / "run", *flags.split(), *views) == 0
    model = load_model(tmp_path / "run")
    with open_batches(robot, num_frames=2, size_px=32, rgb=True, shuffle=False) as clips:
        [batch] = clips
    embedded_BE = model.encode_video(batch["video"])
    assert embedded_BE.shape == (2, 128)
    with pytest.raises(UserError, match=r"are not \[B, 2, T, H, W, 3\]"):
        model.encode_video(batch["video"][:, 0])
    assert train("export", tmp_path / "run", "--format", "torch", "--out", tmp_path / "program") == 0
    program: Any = torch.export.load(tmp_path / "program/model.pt2").module()
    inputs = model._normalise_rgb(batch["video"])
    assert torch.allclose(program(inputs), embedded_BE, atol=1e-5)
    assert (
        train("export", tmp_path / "run", "--format", "open_clip", "--out", tmp_path / "clip") == (rule == "concat") * 2
    )
    if rule == "mean":
        assert train("eval", "retrieval", tmp_path / "run", "--split", "train") == 0
        assert torch.allclose(load_model(tmp_path / "clip").encode_video(batch["video"]), embedded_BE, atol=1e-6)


def test_settings_of_views_that_have_no_effect_or_place(robot: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ("--shards", robot, "--out", tmp_path / "run", "--model", "tiny", "--steps", "1", "--device", "cpu")
    for command, more, words in (
        ("dual-encoder", ("--towers.views", "concat"), "--towers.views is concat, which has no effect"),
        ("mae", ("--views", "top,wrist"), "from a single camera"),
        ("dual-encoder", ("--views", "top,wrist", "--input", "latents"), "--views needs decoded clips"),
        ("dual-encoder", ("--views", "top,wrist", "--parallel.stages", "2"), "--views needs the complete tower"),
    ):
        assert train(command, *flags, *more) == 2
        assert words in capsys.readouterr().err


def test_a_classifier_takes_views(robot: Path, tmp_path: Path) -> None:
    flags = "--model tiny --size-px 32 --num-frames 2 --batch 2 --steps 1 --device cpu --workers 1 --label done"
    views = ("--views", "top,wrist", "--towers.views", "concat", "--towers.kind", "videomae", "--repeats", "2")
    assert train("classify", "--shards", robot, "--out", tmp_path / "run", *flags.split(), *views) == 0


def test_settings_name_views() -> None:
    settings = DualEncoderSettings(views="top, wrist", towers=DualEncoderTowers(views="concat"))
    assert settings.view_names == VIEWS and settings.num_views == 2 and DualEncoderSettings().num_views == 1

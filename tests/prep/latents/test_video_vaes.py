"""Tests of `prep latents` with video VAEs: segments equal diffusers' output, and no frame is lost."""

from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch.nn import functional

from clipmill.manifests.errors import UserError
from clipmill.prep.engines.execution import Execution
from clipmill.prep.latents.column import LatentsRequest
from clipmill.prep.latents.frames import video_segments
from clipmill.prep.latents.run import run_trial, worker_memory_gb
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.commits import commit_path
from clipmill.shards.reader import Variant
from tests.prep.latents.conftest import make, plan, recipe, video
from tests.prep.latents.test_column import stored_latents
from tests.prep.latents.video_vaes import NAMES, load_vae, save_model
from tests.prep.running import Ran, chunk, contents, manifest
from tests.prep.sets import ShardSet
from tests.tiers import nightly_beyond

Prep = Callable[..., Ran]
EVERY_DAY = ("AutoencoderKLWan", "Wan 2.2", "AutoencoderKLLTXVideo")  # statistics in the configuration, and elsewhere
SETTINGS: dict[str, Any] = {"fps": "8", "segment": "1s", "size": 32, "num_threads": 1}
RECIPE = {name: SETTINGS[name] for name in ("fps", "segment", "size")}
NEXT = {"long_000000000": "long_000002000", "long_000002000": "long_000004000", "short_000000000": "short_000002000"}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("AutoencoderKLWan", tmp_path_factory.mktemp("vae") / "random-wan")


def segments(shard_set: ShardSet, *, repeat: bool = False) -> dict[str, list[np.ndarray]]:
    """Decode the segments with PyAV: 9 frames at 8 fps, uint8 [9, H, W, 3], by decoding every frame."""
    frames = {}
    for sample in Variant.open(shard_set.data).iterate():
        with av.open(BytesIO(sample["mp4"]), "r") as container:
            frames[sample["__key__"]] = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    segments_by_key = {}
    for key, shown in frames.items():
        moments = [shown[int(moment * 30 / 8)] for moment in range(-(-len(shown) * 8 // 30))]
        if key in NEXT:
            moments.append(frames[NEXT[key]][0])
        elif repeat:
            moments += [moments[-1]] * (-(len(moments) - 1) % 8)
        segments_by_key[key] = [np.stack(moments[begin : begin + 9]) for begin in range(0, len(moments) - 8, 8)]
    return segments_by_key


@pytest.mark.parametrize("name", nightly_beyond(EVERY_DAY, NAMES))
def test_segments_are_bit_for_bit_those_of_diffusers(shard_set: ShardSet, name: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path / "vae")
    make(shard_set.data, vae=str(folder), batch=9, **SETTINGS)
    latents, model = Variant.open(shard_set.data, column="latents"), load_vae(folder, name)
    rows = {row["key"]: row for shard in latents.shards() for row in shard.index.to_pylist()}
    torch.set_num_threads(1)
    mean, scale = torch.tensor(0.0), torch.tensor(float(model.config.get("scaling_factor") or 1.0))
    statistics = model if name == "AutoencoderKLLTXVideo" else model.config
    if getattr(statistics, "latents_mean", None) is not None:
        shape, frames = (4, -1, 1, 1), latents.recipe["latent_frames"]
        mean = torch.as_tensor(statistics.latents_mean).view(shape)[:, :frames]
        scale = scale / torch.as_tensor(statistics.latents_std).view(shape)[:, :frames]
    latents_by_key, expected = stored_latents(shard_set), segments(shard_set)
    assert list(latents_by_key) == [key for key, its in expected.items() if its]
    for key, array in latents_by_key.items():
        row = rows[key]
        assert array.shape == (
            len(expected[key]),
            4,
            row["num_frames"] // len(expected[key]),
            row["height"],
            row["width"],
        )
        assert row["source_frames"] == [9] * len(array)
        assert row["num_frames"] * row["fps_den"] / row["fps_num"] == len(array), "there must be one segment per second"
        left, top, width, height = row["crops"][:4]
        for segment, frames in zip(array, expected[key], strict=True):
            squares = np.ascontiguousarray(frames[:, top : top + height, left : left + width])
            small = functional.interpolate(
                torch.from_numpy(squares).permute(0, 3, 1, 2), size=(32, 32), mode="bilinear", antialias=True
            )
            with torch.inference_mode():
                encoded = model.encode((small.float() / 127.5 - 1).transpose(0, 1)[None]).latent_dist.mode()[0]
            assert np.array_equal(segment, ((encoded - mean) * scale).half().numpy())
    stored_values = latents.recipe
    assert (stored_values["segment"], stored_values["tail"], stored_values["latent_frames"]) == (
        "9f",
        "drop",
        array.shape[2],
    )


def test_the_end_of_a_video_is_dropped_or_repeated(shard_set: ShardSet, wan: Path) -> None:
    make(shard_set.data, vae=str(wan), **SETTINGS)
    dropped = {key: len(array) for key, array in stored_latents(shard_set).items()}
    make(shard_set.data, vae=str(wan), tail="repeat", **SETTINGS)
    repeated = {key: len(array) for key, array in stored_latents(shard_set).items()}
    assert dropped == {key: len(its) for key, its in segments(shard_set).items() if its}
    assert repeated == {key: len(its) for key, its in segments(shard_set, repeat=True).items()}
    assert sum(repeated.values()) > sum(dropped.values())
    for shard in Variant.open(shard_set.data, column="latents").shards():
        for row in shard.index.to_pylist():
            assert set(row["source_frames"][:-1]) <= {9}
            assert (row["source_frames"][-1] == 9) == (row["key"] in NEXT)


@pytest.mark.parametrize(
    ("shown", "has_next", "tail", "lengths", "has_border"),
    [
        (16, True, "drop", (9, 9), True),
        (17, True, "drop", (9, 9), False),
        (16, False, "drop", (9,), False),
        (17, False, "drop", (9, 9), False),
        (16, False, "repeat", (9, 8), False),
        (17, False, "repeat", (9, 9), False),
        (20, True, "repeat", (9, 9), False),
        (20, False, "repeat", (9, 9, 4), False),
        (1, False, "repeat", (1,), False),
        (7, True, "drop", (), False),
        (7, False, "drop", (), False),
    ],
)
def test_segments_share_the_frame_on_their_border(
    shown: int, has_next: bool, tail: str, lengths: tuple[int, ...], has_border: bool
) -> None:
    segments_found = video_segments(list(range(shown)), segment_frames=9, has_next=has_next, tail=tail)
    assert (segments_found.lengths, segments_found.has_next_frame) == (lengths, has_border)
    assert len(segments_found.frames) + segments_found.has_next_frame + segments_found.num_repeated == 9 * len(lengths)
    for number, begin in enumerate(range(0, 9 * len(lengths), 9)):
        assert segments_found.frames[begin : begin + 8] == list(range(8 * number, min(8 * number + 8, shown)))


def test_what_is_made_again_has_the_same_bytes(shard_set: ShardSet, wan: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "vae": str(wan), "posterior": "sample", "crop": "random", "compression": "zstd"}
    first = make(shard_set.data, **settings)
    before = contents(shard_set.data / "latents")
    next((shard_set.data / "latents").rglob("*.tar")).unlink()
    make(shard_set.data, **settings)
    assert contents(shard_set.data / "latents") == before
    assert make(shard_set.data, **settings).num_shards_made == 0
    assert first.num_chunks == len([its for its in segments(shard_set).values() if its])
    changed = tmp_path / wan.name
    changed.mkdir()
    for file in wan.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        (changed / file.name).write_bytes(content)
    variants = {recipe("v", vae=str(vae), **RECIPE).variant for vae in (wan, changed)}
    assert all(variant.startswith("random-wan-32px") for variant in variants)
    assert len(variants) == 2


def test_a_worker_on_a_cluster_reserves_the_memory_that_its_segments_take(shard_set: ShardSet, wan: Path) -> None:
    plans = [
        plan(shard_set.data, vae=vae, **{**RECIPE, **size}) for vae, size in ((str(wan), {}), ("tiny", {"size": 64}))
    ]
    address = "10.0.0.1:6379"
    small_gb, two = (
        worker_memory_gb(plans[0], LatentsRequest(address=address, batch=batch), on_cpu=True) for batch in (9, 18)
    )
    trial = run_trial(plans[0])
    assert trial is not None and trial.segment_bytes is not None
    assert small_gb <= 1.2 * trial.segment_bytes / 1e9 and two == pytest.approx(2 * small_gb, rel=0.2)
    constant = worker_memory_gb(plans[1], LatentsRequest(address=address), on_cpu=True)
    for request, on_cpu in (
        (LatentsRequest(address=address), False),
        (LatentsRequest(), True),
        (LatentsRequest(address=address, execution=Execution(task_memory=2.0)), True),
    ):
        assert worker_memory_gb(plans[0], request, on_cpu=on_cpu) == constant


def test_a_video_in_two_shards_has_the_latents_that_it_has_in_one(
    wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use 22 chunks: the last frame for the twentieth is in the other shard, which may be made later."""
    settings: dict[str, Any] = {"vae": str(wan), "fps": "8", "segment": "500ms", "size": 32}
    video_file = FrameNumberVideo(num_frames=330, fps=Fraction(30), width=64, height=48)
    video_file.write(tmp_path / "videos" / "long.mp4")
    arrays = []
    for num_shards in (2, 1):
        if num_shards == 1:
            monkeypatch.setattr("clipmill.prep.video.spans.MIN_SHARDS", 1)
        data = tmp_path / str(num_shards)
        manifest(data, tmp_path / "videos")
        chunk(data, "--len", "500ms", "--preset", "ultrafast", "--short-side", 32)
        if num_shards == 2:
            late = commit_path(data / "video" / video(data), 1)
            aside = late.rename(late.with_name("aside"))
            assert make(data, **settings).num_chunks == 19
            aside.rename(late)
            summary = make(data, **settings)
            assert (summary.num_encoded, summary.num_reused) == (2, 19)
        make(data, **settings)
        latents = Variant.open(data, column="latents")
        assert len(latents.shards()) == num_shards
        arrays.append({sample["__key__"]: sample["latents.npy"] for sample in latents.iterate()})
    assert len(arrays[0]) == 21 and arrays[0] == arrays[1]


def test_lengths_that_the_vae_cannot_take_are_refused_with_the_nearest(
    prep: Prep, shard_set: ShardSet, wan: Path
) -> None:
    def refusal_of(*flags: object) -> str:
        ran = prep("latents", "--vae", wan, "--data", shard_set.data, "--size", 32, *flags, status=2)
        return ran.stderr

    message = refusal_of("--segment", "60f", "--fps", "16")
    assert "AutoencoderKLWan encodes segments of 4k + 1 frames, but --segment 60f at 16 fps has 60 frames" in message
    assert "use --segment 57f (3.5s) or --segment 61f (3.75s); a chunk of 15 s holds 4 of them" in message
    assert "has 4 frames" in refusal_of("--segment", "1s", "--fps", "3")
    assert "--segment 5f" in refusal_of("--segment", "1f")
    assert "or 81f for frames" in refusal_of("--segment", "0f")
    recipe(video(shard_set.data), vae=str(wan), segment="5s", fps="16", size=32)


def test_a_segment_that_no_chunk_holds_is_refused_with_both_lengths(prep: Prep, shard_set: ShardSet, wan: Path) -> None:
    flags = ("latents", "--vae", wan, "--size", 32, "--fps", 8, "--data", shard_set.data)
    for command in (flags, ("plan", *flags)):
        error = prep(*command, "--segment", "25f", status=2).stderr
        assert "--segment 25f at 8 fps is 25 frames long (3 s and" in error and "the longest chunk is 2 s long" in error
        assert "use --segment 17f or less, or make longer chunks" in error
    assert not (shard_set.data / "latents").exists()
    # With --tail repeat, the last segment of a video is filled up.
    engine = ("--engine", "processes", "--workers", 1)
    assert "no chunk" not in prep("plan", *flags, "--segment", "25f", "--tail", "repeat").stdout
    ran = prep(*flags, "--segment", "13f", *engine)
    assert "left out 2 chunks too short for a segment; --tail repeat would encode" in ran.stdout
    assert "at the ends of chunks and videos, outside of segments" in ran.stdout
    values = prep(*flags, "--segment", "13f", *engine, "--json").summary
    assert (values["num_chunks"], values["left_out"]) == (3, {"num_chunks": 2, "seconds": 3.5})
    status = prep("status", "--data", shard_set.data, "--json", status=None).summary["columns"]["latents"]
    assert not status["stale_because"] and not status["to_make"]


def test_a_plan_says_how_many_segments_fit_and_what_is_left_out(prep: Prep, shard_set: ShardSet, wan: Path) -> None:
    flags = ("--vae", wan, "--size", 32, "--fps", 8, "--data", shard_set.data)
    text = prep("plan", "latents", *flags, "--segment", "1s").stdout
    assert "segments 9 frames at 8 fps, 1 s, become 3 latent frames; a chunk of 2 s holds 2" in text
    assert "of memory per worker to encode one segment at a time" in text
    values = prep("plan", "latents", *flags, "--segment", "1s", "--json").summary["segments"]
    assert values["num_segments"] == sum(map(len, segments(shard_set).values()))
    prep("latents", *flags, "--segment", "1s", "--engine", "processes", "--workers", 1)
    prep("verify", "--deep", "--data", shard_set.data)
    assert "at the ends of chunks and videos, outside of segments" in text


def test_what_a_class_does_not_do_is_refused(shard_set: ShardSet, wan: Path, tmp_path: Path) -> None:
    cosmos = save_model("AutoencoderKLCosmos", tmp_path / "cosmos")
    chunks = video(shard_set.data)
    for settings, words in (
        ({"posterior": "sample"}, "no posterior to sample"),
        ({"tiling": True}, "does not support tiling"),
        ({"segment": "25f"}, "has statistics for 3 latent frames"),
    ):
        with pytest.raises(UserError, match=words):
            recipe(chunks, **{"vae": str(cosmos), **RECIPE, **settings})
    plain, tiled = (recipe(chunks, vae=str(wan), tiling=tiling, **RECIPE) for tiling in (False, True))
    assert plain.variant != tiled.variant and "tiling" not in plain.values

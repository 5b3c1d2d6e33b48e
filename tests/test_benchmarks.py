"""Every benchmark still runs, on next to nothing, and gives its figures; what they are is no matter here."""

import importlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.forks import Forks

TINY = {
    "bucket_run": ["--steps", "5", "--every", "2", "--rounds", "1", "--latency", "0.001", "--batch", "4"],
    "caption": ["--shape", "tiny", "--rounds", "1", "--captions", "2", "--device", "cpu"],
    "caption_pipeline": ["--microbatches", "2", "--rounds", "1", "--schedules", "1f1b"],
    "captions": ["--chunks", "4", "--in-flight", "2", "--latency", "0.01"],
    "chunk": ["--synthetic", "1", "--minutes", "0.05", "--rounds", "1", "--variants", "prep chunk", "bare ffmpeg"],
    "decode": ["--pieces", "1", "--clips", "2", "--rounds", "1", "--variants", "clipmill", "libavcodec"],
    "encoding": ["--rounds", "1", "--cases", "tiny"],
    "latents": [
        *("--segments", "26", "--videos", "4", "--batches", "3", "--rounds", "1", "--copies", "2"),
        *("--variants", "LatentLoader", "LatentLoader, first visits", "npy memmap", "memcpy"),
    ],
    "loader_scaling": [
        *("--workers", "1", "2", "--decode", "plain", "packets", "--lengths", "15", "--clips", "8"),
        *("--num-videos", "1", "--rounds", "1"),
    ],
    "losses": ["--rounds", "1", "--pairs", "32", "--width", "8"],
    "mae": ["--parts", "model", "--model", "tiny", "--size-px", "32", "--rounds", "1", "--steps", "1"],
    "manifest": ["--narrations", "400"],
    "memory": ["--minutes", "0.05"],
    "mixture": ["--pieces", "2", "--folders", "2", "--epochs", "1", "--rounds", "1"],
    "object_storage": ["--requests", "2", "--videos", "1", "--rounds", "1", "--latency-ms", "1"],
    "open": ["--chunks", "300", "--ranks", "1", "--sets", "chunks", "--indexes-up-to", "0"],
    "plan": ["--chunks", "80", "--runs", "1"],
    "images": ["--images", "8", "--short-side", "32", "--batch", "2", "--rounds", "1"],
    "python_loader": ["--pieces", "1", "--batch", "2", "--batches", "1", "--segments", "80", "--rounds", "1"],
    "remote": [
        *("--pieces", "1", "--batches", "1", "--segments", "40", "--rounds", "1"),
        *("--cached-epochs", "1", "--latency", "0.001"),
    ],
    "rerun": ["--chunks", "80", "--runs", "1"],
    "scores": ["--rounds", "1"],
    "search": ["--rows", "300", "--rounds", "1"],
    "selection": ["--chunks", "2000", "--rounds", "1"],
    "text_tower": ["--model", "tiny", "--captions", "4", "--rounds", "1", "--device", "cpu"],
    "views": ["--episodes", "1", "--samples", "2", "--rounds", "1"],
    "vit": ["--rounds", "1", "--variants", "naive", "fused, checkpointed", "open_clip", "--device", "cpu"],
}
EVERY_DAY = {"rerun"}  # make nightly runs the others too
# Constants of the modules: lengths of a turn, workers of a command.
SMALLER = {"AT_LEAST_S": 0.05, "LOADER_AT_LEAST_S": 0.05, "LATENT_EPOCHS": 2, "CLIPS_PER_PIECE": 20, "NUM_WORKERS": 1}
NOT_BENCHMARKS = {
    "__init__",
    "allocated",
    "caption_steps",
    "environment",
    "launch",
    "made_data",
    "mae_data",
    "mae_steps",
    "measure",
    "plain_loops",
    "report",
    "object_storage_peers",
    "search_peers",
    "timing",
    "tree",
    "view_peers",
    "vit_steps",
    "peer_process",
    "open_data",
}


def test_every_benchmark_is_tried_here(repository: Path) -> None:
    assert {path.stem for path in (repository / "benchmarks").glob("*.py")} == TINY.keys() | NOT_BENCHMARKS


def flat_pictures(random: np.random.Generator) -> Iterator[np.ndarray]:
    """Pictures of 15 s that differ and cost next to nothing, to make and to encode: a step of grey that wanders."""
    for number in range(450):
        picture = np.full((288, 512, 3), 40, np.uint8)
        picture[:, number : number + 60] = 200
        yield picture


@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(TINY)]
)
def test_a_benchmark_prints_a_table_and_writes_the_same_as_json(
    name: str, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.decode_peers.chunk_sets import CLOSED, OWN, RECIPES

    json_path = tmp_path / "figures.json"
    # Its programs are forked, for some of which a table of the module has the interpreter.
    monkeypatch.setattr(sys, "executable", str(forks.python()))
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("benchmarks.decode_peers.pieces.generate_frames", flat_pictures)
    for constant in SMALLER.keys() & vars(module).keys():
        monkeypatch.setattr(module, constant, SMALLER[constant])
    for recipe in (OWN, CLOSED):
        monkeypatch.setitem(RECIPES, recipe, (*RECIPES[recipe], "--preset", "ultrafast"))
    monkeypatch.setattr(sys, "argv", [name, *TINY[name], "--json", str(json_path)])
    module.main()
    figures = json.loads(json_path.read_text())
    table = capsys.readouterr().out
    assert figures["machine"] in table
    assert figures["commit"] in table
    assert "|---|" in table


def test_a_way_to_load_latents_that_is_not_installed_leaves_its_row_empty(tmp_path: Path) -> None:
    from benchmarks.latents import MEMCPY, SEEDS, rows_of
    from benchmarks.peer_process import NotInstalled, PeerProcess

    with pytest.raises(NotInstalled):
        PeerProcess(tmp_path / "python", "benchmarks.latent_peers.mds_shards", folder=tmp_path)
    seed, floor = rows_of(32, {MEMCPY: [100.0, 300.0, 200.0]}, [SEEDS[0], MEMCPY])
    assert (seed["segments/s"], seed["/ memcpy"]) == ("not installed", None)
    assert (floor["segments/s"], floor["/ seed"], floor["/ memcpy"]) == (200, None, 1.0)


@pytest.mark.nightly
def test_steps_of_a_masked_autoencoder_are_taken_from_chunks_of_any_kind(tmp_path: Path) -> None:
    import torch

    from benchmarks.decode_peers.chunk_sets import OWN, X264_DEFAULT
    from benchmarks.decode_peers.clip_set import FPS, chunk_path, data_folder
    from benchmarks.mae import VARIANTS, data_rows
    from benchmarks.mae_data import make_data_folder
    from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard

    data = data_folder(tmp_path, OWN)
    write_shard(data, 0, [video_sample("000", 0, encode_chunk(0, 40, fps=FPS), fps=FPS)], split="train")
    write_captions(data, {"000": "train"}, [Caption("000", 0, 1, "text")])
    plain = chunk_path(tmp_path, X264_DEFAULT, 0)
    plain.parent.mkdir()
    plain.write_bytes(encode_chunk(0, 40, fps=FPS, open_gop=True))
    make_data_folder(tmp_path)
    settings = {"model": "tiny", "size_px": 64, "num_frames": 2, "stride": 2, "batch": 1, "workers": 1, "device": "cpu"}
    rows = data_rows(tmp_path, settings, device=torch.device("cpu"), num_rounds=1, num_steps=1)
    assert [(row["chunks"], row["path"]) for row in rows] == list(VARIANTS)
    assert rows[0]["speed / first"] == 1.0 and all(row["data / step"] < 1 for row in rows)


def test_a_decoder_that_is_not_installed_leaves_its_row_and_its_figures_empty(tmp_path: Path) -> None:
    from benchmarks.decode_peers.chunk_sets import OWN, X264_DEFAULT
    from benchmarks.decode_peers.clip_set import SHORT
    from benchmarks.decode_peers.figures import DECORD, LOADERS, OURS, TORCHCODEC, Measured, ratios_of, rows_of

    rates = {
        (OWN, SHORT, OURS): [80.0, 30.0, 50.0],
        (OWN, SHORT, TORCHCODEC[0]): [2.0, 1.0, 5.0],
        (OWN, SHORT, TORCHCODEC[1]): [1.0, 3.0, 1.0],
    }
    loaders = {
        LOADERS[0]: [(10.0, 9.0), (20.0, 9.0), (10.0, 9.0)],
        LOADERS[1]: [(19.0, 8.0), (20.0, 8.0), (21.0, 8.0)],
        LOADERS[2]: [(20.0, 8.0), (25.0, 8.0), (20.0, 8.0)],
    }
    measured = Measured(rates, {}, loaders, dict.fromkeys(rates, (0, 4)), {DECORD: "no Python"})
    ratios = ratios_of(measured, {OWN: 150, X264_DEFAULT: 100})
    assert ratios["over_torchcodec_own_chunks"] == 10.0
    assert (ratios["over_decord_own_chunks"], ratios["over_decord_x264_default"]) == (None, None)
    assert ratios["two_threads_over_two_processes"] == 0.95
    assert (ratios["two_threads_over_one"], ratios["bytes_over_x264_default"]) == (1.9, 1.5)
    decord, ours = rows_of(measured, [(OWN, SHORT, DECORD), (OWN, SHORT, OURS)])
    assert (decord["clips/CPU s"], decord["wrong frames"]) == ("not installed", None)
    assert (ours["clips/CPU s"], ours["wrong frames"], ours["/ decord"]) == (50.0, "0 of 4", None)


@pytest.mark.nightly
def test_a_decoder_that_delivers_the_frame_beside_the_one_asked_for_is_caught(tmp_path: Path) -> None:
    import av

    from benchmarks.decode_peers.clip_set import Clip, crop_rgb
    from benchmarks.decode_peers.frame_check import ChunkFrames, num_wrong_luma, num_wrong_rgb
    from benchmarks.decode_peers.pieces import generate_frames

    path = tmp_path / "chunk.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, width=512, height=288, pix_fmt="yuv420p")
        for picture in islice(generate_frames(np.random.default_rng(0)), 12):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    frames = ChunkFrames(path)
    clip = Clip(chunk=0, frames=(2, 5, 6, 11), seed=0, left=40, top=10, width=300, height=250)
    brighter = [np.clip(frames.rgb[number].astype(int) + 2, 0, 255).astype(np.uint8) for number in clip.frames]
    assert num_wrong_rgb(clip, crop_rgb(brighter, clip), frames) == 0
    shifted = [frames.rgb[number] for number in (2, 4, 7, 11)]
    assert num_wrong_rgb(clip, crop_rgb(shifted, clip), frames) == 2
    frames_found = {number: frames.decoded[number] for number in clip.frames}
    assert num_wrong_luma(clip, frames_found, frames) == 0
    assert num_wrong_luma(clip, {**frames_found, 5: frames.decoded[4]}, frames) == 1


def test_pieces_are_taken_from_as_many_videos_as_there_are() -> None:
    from benchmarks.decode_peers.pieces import distribute_pieces

    room = {Path("long"): 40, Path("short"): 0, Path("other"): 2}
    assert distribute_pieces(room, 5) == {Path("long"): 3, Path("other"): 2}
    assert distribute_pieces(room, 100) == {Path("long"): 40, Path("other"): 2}


def test_ratios_are_of_the_same_round_and_over_the_better_seed() -> None:
    from benchmarks.latents import MEMCPY, OURS, SEEDS, rows_of

    rates = {
        OURS: [80.0, 30.0, 50.0],
        SEEDS[0]: [2.0, 1.0, 5.0],
        SEEDS[1]: [1.0, 3.0, 1.0],
        MEMCPY: [100.0, 60.0, 50.0],
    }
    row = rows_of(1, rates, [OURS])[0]
    assert (row["segments/s"], row["/ seed"], row["/ memcpy"]) == (50, 10.0, 0.8)


def test_memcpy_has_as_many_buffers_as_the_loader_that_is_measured_by_it() -> None:
    from benchmarks.latent_peers.memcpy import RING_BATCHES
    from clipmill.train.data.batch import NUM_BUFFERS

    assert NUM_BUFFERS == RING_BATCHES


def test_the_digest_of_latents_knows_every_byte_and_no_order(tmp_path: Path) -> None:
    from benchmarks.latent_peers.segment_set import digest, make_segment_set, open_segment_set

    make_segment_set(tmp_path / "set", num_segments=5, num_videos=2, values="ar1")
    segments = open_segment_set(tmp_path / "set")
    latents, text = segments.latents, segments.text[segments.video_of_segment]
    whole = digest([(latents, text)])
    assert whole[0] == 5
    assert digest([(latents[3:], text[3:]), (latents[:3], text[:3])]) == whole
    assert digest([(latents, text[::-1])]) != whole
    assert digest([(latents[[0, 0, 1, 2, 3]], text[[0, 0, 1, 2, 3]])])[0] == 4
    changed = latents.copy()
    changed[4, -1, -1, -1, -1] += 1
    assert digest([(changed, text)]) != whole


def test_the_cost_of_a_command_holds_that_of_its_children_and_of_its_daemons(tmp_path: Path) -> None:
    from benchmarks.measure import run_measured

    spend = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spend!r}])"
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spend!r}])"
    for program in (child, orphan):
        assert run_measured([sys.executable, "-c", program], folder=tmp_path).cpu_s >= 0.3


def test_peak_memory_is_that_of_the_command_and_not_of_who_measures() -> None:
    from benchmarks.measure import run_measured

    held = bytearray(300_000_000)
    held[::4096] = bytes(len(held[::4096]))
    assert run_measured([sys.executable, "-S", "-c", "pass"]).peak_bytes < 100_000_000
    assert run_measured([sys.executable, "-S", "-c", "b = b'x' * 200_000_000"]).peak_bytes > 200_000_000


@pytest.mark.parametrize("largest", [0, 1, 7, 60, 997])
@pytest.mark.parametrize("guess", [1, 8, 60, 1000])
def test_the_largest_batch_is_found_to_five_percent_from_any_guess(largest: int, guess: int) -> None:
    from benchmarks.vit import largest_fitting

    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= largest

    result = largest_fitting(fits, guess=guess)
    assert result <= largest <= result + max(1, result // 20)
    assert len(tried) <= (3 if abs(guess - largest) * 50 <= largest else 20)


def test_the_memory_of_divided_attention_is_counted_as_attention() -> None:
    import torch

    from benchmarks.vit_steps import VARIANTS, Setup, Steps

    setup = Setup(model="tiny", image_px=32, num_frames=2, device=torch.device("cpu"))
    joint, divided = (Steps(VARIANTS[name], setup).kept_bytes(1) for name in ("fused", "divided"))
    assert divided["attention"] > 1.5 * joint["attention"] > 0
    assert divided["other"] == joint["other"]


def test_the_batch_that_memory_of_two_smaller_ones_promises() -> None:
    from benchmarks.vit import largest_by_line

    assert largest_by_line({2: 1200, 8: 1800}, limit_bytes=24_000) == 230
    assert largest_by_line({2: 1200, 8: 1200}, limit_bytes=1000) == 1

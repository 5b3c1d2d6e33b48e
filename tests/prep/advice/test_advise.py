"""Tests of `prep advise`: the arithmetic of AVION's equation 3, and the values that enter it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.advice import (
    WHOLE_CHUNKS,
    Bucket,
    Load,
    advice_text,
    advice_values,
    measure_disk,
    open_column,
    packet_ranges,
    read_run_steps,
)
from clipmill.shards.dataset import current_variant, set_current_variant
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import Variant
from tests.object_storage.faults import Faults, vanished_key
from tests.prep.running import Ran
from tests.prep.sets import ShardSet, flip
from tests.train.latents.columns import write_columns

Prep = Callable[..., Ran]
STEP = ("--batch", 64, "--step-time", 0.25)
# AVION's own numbers: 256 clips, 0.12 MB/s, 15 s; the disk reads 400 MB/s and a step takes 1.5 s.
LOAD = Load(
    batch=256,
    step_s=1.5,
    read_bytes_per_s=400e6,
    video_bytes_per_s=0.12e6,
    chunk_s=15.0,
    clip_bytes={"packets": 100_000.0, "latents": 164_000.0},
)
ORIGIN = {"step": "a", "read_speed": "b", "bitrate": "c", "clips": "d"}


def line_of(load: Load, way: str) -> str:
    [line] = [text_line for text_line in advice_text(load, ORIGIN).splitlines() if text_line.startswith(way)]
    return line


def test_the_longest_chunk_is_where_reading_takes_as_long_as_the_step() -> None:
    assert LOAD.longest_chunk_s == pytest.approx(400e6 * 1.5 / (256 * 0.12e6))
    assert replace(LOAD, chunk_s=LOAD.longest_chunk_s).headroom(WHOLE_CHUNKS) == pytest.approx(1)
    assert LOAD.headroom(WHOLE_CHUNKS) == pytest.approx(LOAD.longest_chunk_s / 15)
    assert replace(LOAD, batch=512).longest_chunk_s == pytest.approx(LOAD.longest_chunk_s / 2)
    assert replace(LOAD, step_s=3.0).longest_chunk_s == pytest.approx(LOAD.longest_chunk_s * 2)
    assert LOAD.headroom("packets") == pytest.approx(400e6 * 1.5 / (256 * 100_000))
    assert replace(LOAD, chunk_s=600.0).headroom("packets") == LOAD.headroom("packets")


def test_the_advice_in_words_follows_the_figures() -> None:
    slow = replace(LOAD, read_bytes_per_s=4e6)
    assert "256 x 1.8 MB = 461 MB" in line_of(LOAD, WHOLE_CHUNKS) and "fine, 1.3 times" in line_of(LOAD, WHOLE_CHUNKS)
    assert "chunks may be up to 19.5 s long (AVION, arXiv:2309.16669, equation 3)" in line_of(LOAD, WHOLE_CHUNKS)
    assert "too much; reading takes 76.8 times as long as the step" in line_of(slow, WHOLE_CHUNKS)
    assert "fine, 23.4 times" in line_of(LOAD, "packets") and "takes 4.3 times" in line_of(slow, "packets")
    assert "256 x 164 kB" in line_of(LOAD, "latents") and "fine, 14.3 times" in line_of(LOAD, "latents")
    values = advice_values(replace(LOAD, read_bytes_per_s=100e6))
    assert (values["whole_chunks"]["is_fine"], values["packets"]["is_fine"]) == (False, True)


def test_a_cluster_shares_what_the_disk_delivers() -> None:
    """64 GPUs on 8 nodes share a disk from which a single node read 400 MB/s."""
    cluster = replace(LOAD, batch=2048, num_nodes=8, gpus_per_node=8, is_total=False)
    needed = 2048 * 100_000 / 1.5
    values = advice_values(cluster)
    assert values["packets"]["bytes_per_s"] == pytest.approx(needed)
    assert values["packets"]["bytes_per_s_per_gpu"] == pytest.approx(needed / 64)
    assert values["clips_per_s_per_gpu"] == pytest.approx(2048 / 1.5 / 64)
    assert "8 nodes with 8 GPUs each; per GPU 32 clips, 21.3 clips/s" in advice_text(cluster, ORIGIN)
    assert "17.1 MB/s per node: fine" in line_of(cluster, "packets")
    assert "even if 8 nodes together get only the speed that this node measured" in line_of(cluster, "packets")
    unsure = line_of(replace(cluster, read_bytes_per_s=50e6), "packets")
    assert "fine only if 8 nodes together get 137 MB/s" in unsure and "--read-speed" in unsure
    assert "too much" in line_of(replace(cluster, read_bytes_per_s=10e6), "packets")
    given = line_of(replace(cluster, is_total=True), "packets")
    assert "fine" in given and "8 nodes" not in given


def test_the_requests_in_flight_are_rate_times_latency() -> None:
    load = replace(LOAD, num_nodes=2, gpus_per_node=4)
    bucket = Bucket(
        load=load,
        latency_s=0.06,
        requests_per_clip=1.25,
        set_bytes=60_000_000_000,
        num_shards=200,
        clips_per_epoch=400_000,
    )
    needs = bucket.values()
    assert needs["requests_per_s"] == pytest.approx(256 / 1.5 * 1.25)
    assert needs["requests_in_flight"] == pytest.approx(256 / 1.5 * 1.25 * 0.06)
    assert needs["epochs_until_cache_pays"] == pytest.approx(2 * 60e9 / (400_000 * 100_000))
    text = "\n".join(bucket.lines())
    assert "213/s x 60 ms = 12.8 (Little's law), 1.6 per GPU; a train process sends up to 32 at a time: enough" in text
    assert "500,000 requests per epoch" in text and "USD 0.2 at" in text and "after 3.0 epochs" in text
    slow = "\n".join(replace(bucket, latency_s=3.0, load=replace(load, step_s=0.05)).lines())
    assert "not enough" in slow and "more than the 5,500/s that S3 guarantees" in slow
    tars = "\n".join(replace(bucket, load=replace(load, clip_bytes={"latents": 164_000.0})).lines())
    assert "60 GB in 200 requests on each node, which takes 150 s" in tars
    assert "an epoch of 400,000 clips takes 2,344 s" in tars


def bytes_read(table: PacketTable, frames: list[int], *, gap_bytes: int) -> int:
    return sum(size for _, size in packet_ranges(table, frames, gap_bytes=gap_bytes))


def test_the_bytes_of_a_clip_are_its_packets_and_the_short_gaps_between_them() -> None:
    size = np.array([1000, 300, 10, 20, 900, 10], np.uint32)
    offset = (48 + np.concatenate([[0], np.cumsum(size)[:-1]])).astype(np.uint32)
    both = PACKET_KEY | PACKET_REFERENCE
    flags = np.array([both, PACKET_REFERENCE, 0, 0, both, 0], np.uint8)
    frame = np.array([0, 3, 1, 2, 4, 5], np.int32)
    table = PacketTable(offset, size, frame, flags, np.zeros(6, np.uint32))
    assert bytes_read(table, [0], gap_bytes=0) == 1000
    assert bytes_read(table, [2], gap_bytes=0) == 1320
    assert bytes_read(table, [2], gap_bytes=10) == 1330
    assert bytes_read(table, [1, 5], gap_bytes=19) == 1310 + 910
    assert bytes_read(table, [1, 5], gap_bytes=20) == 1310 + 20 + 910
    is_open = replace(table, frame=np.array([0, 3, 1, 2, 5, 4], np.int32))
    assert bytes_read(is_open, [0], gap_bytes=0) == int(size.sum()) + 48


def test_a_set_is_measured_by_what_is_in_it(shard_set: ShardSet) -> None:
    variant = Variant.open(shard_set.data)
    sizes = [len(shard.read(row, "mp4")) for shard in variant.shards() for row in range(shard.num_samples)]
    column = open_column(variant, "video")
    assert column.bytes_per_s == pytest.approx(sum(sizes) / 8)  # the videos are 5 and 3 s long
    assert 0 < column.clip_bytes < sum(sizes) / len(sizes) and len(column.reads) == 4 * len(sizes)
    speed, how = measure_disk(column)
    assert speed.num_reads == len(sizes) and speed.bytes_per_s > 0 and f"{len(sizes)} chunks" in how


def test_advice_on_a_set_in_words_and_as_json(prep: Prep, shard_set: ShardSet) -> None:
    text = prep("advise", "--data", shard_set.data, *STEP).stdout
    assert "\nwhole chunks  64 x " in text and "\npackets       64 x " in text and "2 of 2 shards" in text
    values = prep("advise", "--data", shard_set.data, *STEP, "--read-speed", 50, "--json").summary
    assert (values["batch"], values["step_s"], values["read_bytes_per_s"], values["chunk_s"]) == (64, 0.25, 50e6, 2.0)
    whole = values["whole_chunks"]
    assert values["longest_chunk_s"] == pytest.approx(50e6 * 0.25 / (64 * values["video_bytes_per_s"]))
    assert whole["headroom"] == pytest.approx(values["longest_chunk_s"] / 2)
    assert values["packets"]["headroom"] > whole["headroom"]
    given = prep("advise", "--data", shard_set.data, *STEP, "--read-speed", 50, "--bitrate", "8M", "--json").summary
    assert given["video_bytes_per_s"] == 1e6
    sizes = [report["packets"]["bytes_per_clip"] for report in (given, values)]
    assert sizes[0] / sizes[1] == pytest.approx(1e6 / values["video_bytes_per_s"])


def write_run(folder: Path, steps: list[dict[str, Any]], *, settings: str = "model: tiny\nbatch: 32\n") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps) + '{"step": 9, "st')
    (folder / "settings.yaml").write_text(settings)
    return folder


def test_step_time_and_batch_come_from_a_run(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    steps = [{"step": 1, "step_s": 60.0, "data_wait_s": 1.0}]
    steps += [{"step": number, "step_s": 0.5, "data_wait_s": 0.1} for number in range(2, 9)]
    run = write_run(tmp_path / "run", steps)
    run_steps = read_run_steps(run)
    assert run_steps.step_s == pytest.approx(0.4)
    assert (run_steps.num_steps, run_steps.batch) == (7, 32)
    values = prep("advise", "--data", shard_set.data, "--run", run, "--read-speed", 50, "--json").summary
    assert (values["batch"], values["step_s"]) == (32, pytest.approx(0.4))
    given = prep("advise", "--data", shard_set.data, "--run", run, "--read-speed", 50, "--batch", 7, "--json").summary
    assert (given["batch"], given["step_s"]) == (7, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("processes", "readers"), [("2, ddp", 2), ("8, zero1, 2 x 4 stages, 1f1b", 2), ("1", 1), ("many", None)]
)
def test_the_batch_of_a_run_grows_with_the_cluster(processes: str, readers: int | None, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": step, "step_s": 0.5, "data_wait_s": 0.1} for step in (1, 2, 3)])
    (run / "run.json").write_text(json.dumps({"processes": processes}))
    assert read_run_steps(run).num_readers == readers


def test_advice_for_a_cluster_scales_the_run(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": step, "step_s": 0.5, "data_wait_s": 0.1} for step in (1, 2, 3)])
    (run / "run.json").write_text('{"processes": "2, ddp"}')
    words = ("--data", shard_set.data, "--run", run, "--nodes", 4, "--gpus", 8)
    values = prep("advise", *words, "--read-speed", 50, "--json").summary
    assert (values["batch"], values["nodes"], values["gpus_per_node"]) == (512, 4, 8)
    assert values["is_read_speed_of_all_nodes"] and values["clips_per_s_per_gpu"] == pytest.approx(16 / 0.4)
    text = " ".join(prep("advise", *words).stdout.split())  # the output wraps lines at paths
    assert "its batch of 32 clips is scaled from 2 to 32 GPUs" in text and "4 nodes together" in text
    assert prep("advise", *words, "--batch", 64, "--json").summary["batch"] == 64


def test_advice_on_latents_counts_segments(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    data = write_columns(tmp_path)
    values = prep("advise", "--data", data, "--column", "latents", *STEP, "--read-speed", 50, "--json").summary
    # The chunks have 24 frames of 4 x 8 x 8 float16 values at 4 frames per second; a segment is 5 s long.
    assert values["chunk_s"] == 6 and 20 * 512 <= values["latents"]["bytes_per_clip"] < 21 * 512 + 512
    text = prep("advise", "--data", data, "--column", "latents", *STEP).stdout
    assert "\nlatents       64 x " in text and "\npackets" not in text
    # If the folder also has chunks of video, the advice lists the cost of both.
    shutil.copytree(data / "latents", shard_set.data / "latents")
    set_current_variant(shard_set.data, "latents", str(current_variant(data, "latents")))
    both = prep("advise", "--data", shard_set.data, *STEP).stdout
    assert "\npackets       64 x " in both and "\nlatents       64 x " in both
    refused = prep("advise", "--data", data, "--column", "latents", *STEP, "--bitrate", "2M", status=2).error
    assert "--bitrate has no effect on latents" in refused


@pytest.mark.nightly
def test_advice_on_a_bucket_is_measured_there(prep: Prep, shard_set: ShardSet, bucket: str, faults: Faults) -> None:
    objects = open_objects(bucket)
    for path in sorted(path for path in shard_set.data.rglob("*") if path.is_file()):
        objects.write(path.relative_to(shard_set.data).as_posix(), path)
    faults.set(latency_s=0.03)
    words = ("advise", "--data", bucket, "--batch", 64, "--step-time", 0.25)
    values = prep(*words, "--json").summary
    needs = values["bucket"]
    assert needs["latency_s"] >= 0.03 and needs["requests_per_clip"] >= 1
    assert needs["requests_in_flight"] == pytest.approx(needs["requests_per_s"] * needs["latency_s"])
    tars = [path.stat().st_size for path in shard_set.data.glob("video/*/*.tar")]
    assert needs["set_bytes"] == sum(tars) and needs["clips_per_epoch"] == 5
    # Over a network, longer gaps are read than from a disk, because a request costs more.
    local = prep("advise", "--data", shard_set.data, *STEP, "--json").summary
    assert values["packets"]["bytes_per_clip"] >= local["packets"]["bytes_per_clip"]
    text = prep(*words, "--nodes", 2, "--gpus", 8).stdout
    assert "that the bucket delivers" in text and "Little's law" in text and "on each node" in text
    faults.set(vanished_key(r"\.tar"))
    assert "cannot be read" in prep(*words, status=2).error


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--batch", 0, "--step-time", 1), "--batch is 0"),
        (("--batch", -3, "--step-time", 1), "--batch is -3"),
        (("--batch", 3, "--step-time", "nan"), "--step-time is nan"),
        (("--batch", 3, "--step-time", "inf"), "--step-time is inf"),
        (("--batch", 3, "--step-time", -0.5), "--step-time is -0.5"),
        (("--batch", 3, "--step-time", 1, "--read-speed", 0), "--read-speed is 0"),
        (("--batch", 3, "--step-time", 1, "--bitrate", "-8k"), '"-8k"'),
        (("--batch", 3, "--step-time", 1, "--nodes", 0), "--nodes is 0"),
        (("--batch", 3, "--step-time", 1, "--gpus", -8), "--gpus is -8"),
        (("--batch", 3), "the step time is unknown"),
        (("--step-time", 1), "the batch size is unknown"),
        (("--run", "nowhere"), "nowhere/metrics.jsonl"),
    ],
)
def test_a_wrong_figure_is_named(words: tuple[object, ...], named: str, prep: Prep, made_set: Path) -> None:
    assert named in prep("advise", "--data", made_set, *words, status=2).error


def test_a_run_that_tells_nothing_is_refused(prep: Prep, made_set: Path, tmp_path: Path) -> None:
    step_line = {"step": 1, "step_s": 1.0, "data_wait_s": 0.5}
    nothing = {"step": 2, "step_s": float("nan"), "data_wait_s": 0.5}
    waiting = {"step": 3, "step_s": 1.0, "data_wait_s": 1.0}
    for number, (steps, named) in enumerate(
        [
            ([], "no steps"),
            ([step_line], "no steps"),
            ([step_line, nothing], "no steps"),
            ([step_line, waiting], "is 0 s"),
        ]
    ):
        run = write_run(tmp_path / str(number), steps)
        assert named in prep("advise", "--data", made_set, "--run", run, status=2).error
    run = write_run(tmp_path / "no-batch", [step_line, step_line], settings="model: tiny\n")
    assert "the batch size is unknown" in prep("advise", "--data", made_set, "--run", run, status=2).error


def test_without_shards_there_is_no_advice(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    assert "none does not exist" in prep("advise", "--data", tmp_path / "none", *STEP, status=2).error
    (tmp_path / "empty").mkdir()
    assert "has no video shards" in prep("advise", "--data", tmp_path / "empty", *STEP, status=2).error
    flip(shard_set.index(), 5000)
    assert "its content differs from the commit" in prep("advise", "--data", shard_set.data, *STEP, status=2).error
    shard_set.tar(1).unlink()
    shard_set.tar().unlink()
    assert "cannot be read" in prep("advise", "--data", shard_set.data, *STEP, status=2).error

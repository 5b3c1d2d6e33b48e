"""Findings of `train doctor` about synthetic machines."""

from dataclasses import replace
from typing import Any

import pytest

from clipmill.shards.disk_speed import DiskSpeed
from clipmill.train.doctor.commands import judge, lines_of
from clipmill.train.doctor.machine import (
    Accelerator,
    AttentionTrial,
    Decoder,
    Disk,
    Finding,
    Gpu,
    Host,
    MachineFacts,
    training_defaults,
)

H200 = Gpu(name="NVIDIA H200", memory_bytes=150_000_000_000, free_bytes=149_000_000_000, capability=(9, 0))
WORKS = [AttentionTrial(attention="sdpa", kind="clips", dtype="bfloat16", kernels="fused attention of cuDNN 9.26.0")]
FAST = DiskSpeed(read_bytes_per_s=2e9, piece_ms=0.1, cached=False)
SLOW = DiskSpeed(read_bytes_per_s=30e6, piece_ms=25.0, cached=None)
GOOD = MachineFacts(
    asked_device="auto",
    host=Host(
        processor="Xeon",
        num_cores=16,
        allowed_cores=16,
        quota_cores=None,
        memory_bytes=128 << 30,
        free_bytes=100 << 30,
        shm_bytes=64 << 30,
        thread_variables={},
        compiler="/usr/bin/cc",
    ),
    accelerator=Accelerator(
        torch="2.15.0+cu132",
        torch_cuda="13.2",
        cudnn="9.26.0",
        driver="580.65.06",
        num_threads=16,
        gpus=[H200],
        xformers="0.0.35",
        attention="xformers",
        has_triton=True,
        precision="bf16",
        tried=WORKS,
    ),
    decoder=Decoder(pyav="18.1.0", libavcodec="62.28.102"),
    disk=Disk(path="/data", file_system="ext4", kind="local", free_bytes=10**12, speed=FAST),
    versions={"python": "3.12.3"},
    system="Linux",
)


def machine(*, asked: str = "auto", **changes: dict[str, Any]) -> MachineFacts:
    """Return the good machine with changed fields of its host, accelerator, decoder or disk."""
    parts = {name: replace(getattr(GOOD, name), **fields) for name, fields in changes.items()}
    return replace(GOOD, asked_device=asked, **parts)


NO_GPU: dict[str, Any] = {"gpus": [], "driver": None, "cuda_error": "Found no NVIDIA driver", "tried": []}
OLD_DRIVER: dict[str, Any] = {"gpus": [], "driver": "535.104.05", "cuda_error": "the driver is too old", "tried": []}


def test_nothing_is_said_of_a_good_machine() -> None:
    assert judge(GOOD) == []
    assert judge(machine(accelerator=NO_GPU)) == []


@pytest.mark.parametrize(
    ("examined", "level", "words", "hint"),
    [
        (machine(asked="cuda", accelerator=NO_GPU), "broken", "requests a GPU", "--device cpu"),
        (
            machine(accelerator=OLD_DRIVER),
            "warning",
            "torch 2.15.0+cu132 for CUDA 13.2 finds no GPU: the dri",
            "update",
        ),
        (machine(asked="cuda", accelerator=OLD_DRIVER), "broken", "an NVIDIA driver (535.104.05)", "update the driver"),
        (
            machine(accelerator={**OLD_DRIVER, "needed_driver": "580.65.06"}),
            "warning",
            "(535.104.05) is older than 580.65.06",
            "to 580.65.06 or later",
        ),
        (
            machine(accelerator={**NO_GPU, "driver": "580.1", "torch": "2.15.0+cpu", "torch_cuda": None}),
            "warning",
            "built without CUDA",
            "with CUDA",
        ),
        (
            machine(accelerator={"gpus": [], "tried": []}),
            "warning",
            "finds no GPU: none is visible",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            machine(accelerator={**NO_GPU, "unusable_gpu": "torch sees none (torch needs driver 580.65.06)"}),
            "warning",
            "cannot be used: torch sees none",
            "install the NVIDIA driver",
        ),
        (
            machine(accelerator={"torch_error": "no response within 180 s"}),
            "broken",
            "no response within",
            "nvidia-smi",
        ),
        (
            machine(accelerator={"gpus": [replace(H200, free_bytes=50_000_000_000)]}),
            "warning",
            "100 of the 150 GB of GPU 0 are already in use",
            "nvidia-smi",
        ),
        (
            machine(accelerator={"tried": [replace(WORKS[0], kernels="", error="no kernel image")]}),
            "broken",
            "attention with sdpa fails for clips in bfloat16: no kernel image",
            "build",
        ),
        (
            machine(accelerator={"tried": [*WORKS, replace(WORKS[0], attention="xformers", error="no operator")]}),
            "warning",
            "attention with xformers fails",
            "usable backends: sdpa",
        ),
        (
            machine(accelerator={"tried": [replace(WORKS[0], kernels="math (all scores in memory) of torch")]}),
            "warning",
            "no fused kernel",
            "a build of torch for this GPU",
        ),
        (machine(accelerator={"xformers": "not loaded"}), "warning", "cannot be loaded", "docs/models.md"),
        (machine(accelerator={"has_triton": False}), "note", "triton", "triton"),
        (machine(host={"compiler": None}), "note", "no C compiler", "gcc"),
        (machine(host={"quota_cores": 4.0}), "warning", "allows only 4", "OMP_NUM_THREADS=4"),
        (machine(host={"quota_cores": 0.5}), "warning", "allows only 0.5", "OMP_NUM_THREADS=1"),
        (machine(host={"thread_variables": {"OMP_NUM_THREADS": "64"}}), "warning", "is 64, but 16 cores", "unset"),
        (
            machine(host={"thread_variables": {"OMP_NUM_THREADS": "1"}}, accelerator=NO_GPU),
            "warning",
            "is 1, but 16 cores",
            "unset",
        ),
        (
            machine(host={"shm_bytes": 64 << 20}, accelerator={"gpus": [H200, H200]}),
            "warning",
            "has only 67.1 MB",
            "--shm-size",
        ),
        (machine(decoder={"error": "No module named 'av'"}), "broken", "PyAV cannot be used", "install"),
        (machine(decoder={"missing": ("h264",)}), "broken", "has no decoder for h264", "wheel"),
        (machine(decoder={"missing": ("vp9",)}), "warning", "has no decoder for vp9", "wheel"),
        (machine(disk={"kind": "network", "file_system": "nfs4"}), "warning", "network file system (nfs4)", "local"),
        (machine(disk={"free_bytes": 10**9}), "warning", "1.0 GB left", "--out"),
        (machine(disk={"speed": replace(FAST, read_bytes_per_s=30e6)}), "warning", "only 30 MB/s", "train bench"),
        (machine(disk={"speed": replace(FAST, piece_ms=25.0)}), "warning", "take 25 ms on /data", "--workers"),
        (machine(disk={"problem": Finding("note", "no shard", "run it")}), "note", "/data: no shard", "run it"),
    ],
)
def test_what_is_wrong_is_said_with_a_hint(examined: MachineFacts, level: str, words: str, hint: str) -> None:
    (finding,) = judge(examined)
    assert finding.level == level
    assert words in finding.what and hint in finding.hint


@pytest.mark.parametrize(
    "examined",
    [
        machine(asked="cpu", accelerator=OLD_DRIVER),
        machine(host={"thread_variables": {"OMP_NUM_THREADS": "1"}}),  # the GPU computes
        machine(host={"thread_variables": {"OMP_NUM_THREADS": " 16,1"}}),
        machine(host={"thread_variables": {"OMP_NUM_THREADS": ""}}),
        machine(host={"thread_variables": {"OMP_NUM_THREADS": "banana"}}, accelerator=NO_GPU),
        machine(host={"shm_bytes": 64 << 20}),  # a single GPU exchanges nothing
        machine(disk={"speed": replace(SLOW, cached=True)}),
        machine(disk={"speed": SLOW}),
        machine(accelerator={"gpus": [replace(H200, free_bytes=None)]}),
    ],
)
def test_what_does_not_matter_is_not_said(examined: MachineFacts) -> None:
    assert judge(examined) == []


def test_what_stops_training_comes_first() -> None:
    findings = judge(machine(host={"compiler": None, "quota_cores": 4.0}, decoder={"error": "not there"}))
    assert [finding.level for finding in findings] == ["broken", "warning", "note"]


def test_what_training_uses_follows_from_the_machine() -> None:
    used = training_defaults(GOOD)
    assert (used.device, used.precision, used.compiles) == ("cuda", "bf16", True)
    assert used.attention == "xformers, or sdpa for heads and precisions without an xformers kernel"
    for other in ("sdpa", "cudnn"):
        assert training_defaults(machine(accelerator={"attention": other})).attention == other
    for examined in (machine(asked="cpu"), machine(accelerator=NO_GPU)):
        used = training_defaults(examined)
        assert (used.device, used.precision, used.attention) == ("cpu", "fp32", "sdpa")


def test_about_ten_lines_say_it_all() -> None:
    lines = lines_of(machine(accelerator={"gpus": [H200, H200]}))
    assert lines["gpu"] == ("2 x NVIDIA H200, 150 GB, compute capability 9.0; driver 580.65.06")
    assert lines["torch"] == "2.15.0+cu132, CUDA 13.2, cuDNN 9.26.0, xformers 0.0.35"
    assert len(lines) == 9

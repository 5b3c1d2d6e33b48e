"""Attention by xformers on a GPU: heads of every width, and what a call copies and waits for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import first
from benchmarks.gpu.first import BACKENDS, fastest_backend, measure_attention
from benchmarks.gpu.measurements import Measurement, Setup, run_measurements
from clipmill.train.device.transfer import LateMetrics, pinned_memory
from clipmill.train.models import attention
from clipmill.train.models.attention import (
    attend_naively,
    attend_with_sdpa,
    attend_with_xformers,
    attend_with_xformers_or_sdpa,
    pack,
)
from clipmill.train.models.space_time import attend_short
from tests.simulated_gpu.device import MixedDevices
from tests.simulated_gpu.inside.runs import DECODER, PIXELS
from tests.simulated_gpu.inside.steps import run
from tests.simulated_gpu.journal import Journal
from tests.simulated_gpu.kernels import CALLS
from tests.tiers import nightly_beyond
from tests.train.running import error_of, facts, train

CUDA = torch.device("cuda", 0)
LENGTHS = (5, 2, 7)
# 16-bit numbers are computed with eight at a time, 32-bit ones with four; xformers has no kernel for other widths.
MODELS = {
    "video": (f"dual-encoder {PIXELS} --towers.heads 32", 4),
    "text": (f"dual-encoder {PIXELS} --towers.text-width 64 --towers.text-heads 16", 4),
    "decoder": (f"caption {PIXELS} {DECODER} --decoder.heads 32", None),
}


@pytest.mark.parametrize("part", nightly_beyond(["text"], MODELS))
def test_heads_without_a_kernel_are_announced_and_computed_by_sdpa(
    part: str, clips_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, _ = MODELS[part]
    words = (*flags.split(), "--shards", clips_dir, "--steps", "1", "--precision", "bf16", "--out", tmp_path / "run")
    run(*words)
    stdout = capsys.readouterr().out
    assert "xformers has no kernel for" in stdout and "sdpa" in stdout
    assert facts(tmp_path / "run")["attention_choice"] == ("sdpa" if part == "video" else "xformers")


def test_xformers_by_name_is_refused_for_such_heads(
    clips_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], journal: Journal
) -> None:
    flags, width = MODELS["text"]
    words = (*flags.split(), "--shards", clips_dir, "--attention", "xformers", "--precision", "bf16")
    assert train(*words, "--out", tmp_path / "run") == 2
    assert f"no kernel for heads of width {width}" in error_of(capsys) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("width", nightly_beyond([12, 64], [4, 12, 16, 20, 64]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["full", "causal", "packed"])
def test_every_width_has_the_numbers_and_gradients_of_the_formula(
    width: int, dtype: torch.dtype, kind: str, journal: Journal
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1 if kind == "packed" else 2, sum(LENGTHS), 3, 2, width).to(dtype)
    packing = pack(LENGTHS, device=CUDA) if kind == "packed" else None
    results = []
    for attend in (attend_with_xformers_or_sdpa, attend_naively):
        inputs = qkv.to(CUDA).requires_grad_()
        out = attend(*inputs.unbind(2), causal=kind == "causal", packing=packing)
        out.square().sum().backward()
        assert inputs.grad is not None
        results.append((out.detach().float().cpu(), inputs.grad.float().cpu()))
    atol, rtol = (0.1, 0.05) if dtype is torch.bfloat16 else (1e-5, 1e-5)
    for outputs, expected in zip(*results, strict=True):
        torch.testing.assert_close(outputs, expected, atol=atol, rtol=rtol)


NUM = 65_537  # two more sequences, or heads, than the grid of a kernel has room for
# Shapes of queries, and of the sequences of attention over time: side by side with a mask, or with a key that all see.
CROWDS = {
    "sequences": (NUM, 2, 1, 8),
    "heads": (1, 2, NUM, 8),
    "packed": (1, NUM + 1, 1, 8),
    "with a first key": (2, NUM // 2 + 1, 1, 1, 8),
    "side by side": (NUM, 2, 1, 1, 8),
}


@pytest.mark.parametrize("kind", nightly_beyond(["packed"], CROWDS))
def test_more_sequences_than_a_grid_has_room_for_are_computed_in_parts(kind: str, journal: Journal) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, *CROWDS[kind])
    packing = pack([2, *[1] * (NUM - 1)], device=CUDA) if kind == "packed" else None
    results = []
    for attend in (attend_naively, attend_with_xformers, attend_with_sdpa):
        inputs = qkv.to(CUDA).requires_grad_()
        q, k, v = inputs.unbind(0)
        if kind == "side by side":
            out = attend_short(attend, q, k, v, num_per_tile=1 if attend is attend_naively else 2)
        elif kind == "with a first key":
            out = attend_short(attend, q, k, v, extra_key_value=(k[:, 0], v[:, 0]), num_per_tile=1)
        else:
            out = attend(q, k, v, packing=packing)
        out.square().sum().backward()
        assert inputs.grad is not None
        results.append((out.detach().cpu(), inputs.grad.cpu()))
    for outputs in results[1:]:
        torch.testing.assert_close(outputs, results[0], atol=1e-5, rtol=1e-5)


def test_heads_of_64_are_computed_by_flash_attention(journal: Journal) -> None:
    """What the other tests rely on: xformers' operators ran, and nothing fell back."""
    before = CALLS["flash forward"], CALLS["flash backward"]
    qkv = torch.randn(2, 9, 3, 4, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    attend_with_xformers_or_sdpa(*qkv.unbind(2)).sum().backward()
    assert (CALLS["flash forward"], CALLS["flash backward"]) == (before[0] + 1, before[1] + 1)


def test_packed_captions_are_copied_to_the_device_once_a_pass(journal: Journal) -> None:
    """`pack` copies the layout in one transfer; what attention derives from it is computed on the device."""
    packing = pack(LENGTHS, device=CUDA)
    [before] = journal.copies
    qkv = torch.randn(1, sum(LENGTHS), 3, 2, 64, device=CUDA, dtype=torch.bfloat16)
    for _ in range(2):
        attend_with_xformers(*qkv.unbind(2), packing=packing)
    assert journal.copies == [before] and journal.pageable == [] and journal.waits == []


def test_a_changed_private_name_of_xformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    common: Any = pytest.importorskip("xformers.ops.fmha.common")
    monkeypatch.delattr(common, "_built_with_cuda")
    attention.load_xformers.cache_clear()
    with pytest.raises(ImportError, match="_built_with_cuda"):
        attention.load_xformers()
    attention.load_xformers.cache_clear()


def test_the_simulation_notices_what_a_gpu_would(journal: Journal) -> None:
    """What all other tests rely on."""
    host = torch.arange(4.0)
    moved = host.to(CUDA)
    assert [note.what.partition(" of")[0] for note in journal.waits] == ["a copy"]
    waits: list[Callable[[], object]] = [
        lambda: moved.sum().item(),
        lambda: moved.tolist(),
        lambda: moved[moved > 1],
        lambda: moved.nonzero(),
        lambda: torch.tensor([1.0], device=CUDA),
        lambda: moved.cpu(),
        torch.cuda.synchronize,
    ]
    for number, wait in enumerate(waits):
        seen = len(journal.waits)
        wait()
        assert len(journal.waits) > seen, number
    with pytest.raises(MixedDevices):
        moved + host
    with pytest.raises(MixedDevices):
        moved + torch.ones(4, device=torch.device("cuda", 1))
    with pytest.raises(MixedDevices):
        moved[torch.zeros(1, dtype=torch.int64, device=torch.device("cuda", 1))]
    with pytest.raises(MixedDevices):
        moved[torch.arange(4, device=CUDA)] = host
    with pytest.raises(RuntimeError, match=r"torch.bfloat16 and torch.float32"):
        torch.nn.functional.layer_norm(moved.bfloat16(), (4,), weight=moved)
    host.to(CUDA, non_blocking=True)
    assert len(journal.pageable) == 1
    buffer = pinned_memory((4,), torch.float32).fill_(1)
    buffer.to(CUDA, non_blocking=True)
    buffer.fill_(2)
    torch.cuda.synchronize()
    assert [note.what for note in journal.races] == ["memory was refilled while a copy from it was pending"]
    stream = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(stream):
        copied = pinned_memory((4,), torch.float32).fill_(1).to(CUDA, non_blocking=True)
    _ = copied + 1
    assert len(journal.races) == 3  # before its copy was over, and unknown to the allocator
    with torch.device("meta"):
        assert torch.tensor([]).is_meta  # by which transformers sees whether a model is built without memory
    late = LateMetrics({"loss": moved.sum()}, CUDA)
    assert bool(late._values.isnan()) and late.read() == {"loss": 6.0}
    results = pinned_memory((4,), torch.float32)
    for _ in range(2):
        results.copy_(moved, non_blocking=True)
    assert journal.races[-1].what.startswith("memory was filled by a copy while another")


@pytest.mark.nightly
def test_the_fastest_backend_of_a_gpu_is_in_the_results_of_its_first_minutes(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first, "SHAPES", [shape for shape in first.SHAPES if shape.name in first._PRESETS][:2])
    setup = Setup(device=CUDA, is_dry_run=True, data=tmp_path, scratch=tmp_path)
    measurements = [Measurement(name="attention", measure=measure_attention, estimated_s=1)]
    assert run_measurements(measurements, setup=setup, minutes=1, path=tmp_path / "first.json")
    [entry] = json.loads((tmp_path / "first.json").read_text())["measurements"]
    assert [row["error"] for row in entry["rows"] if "error" in row] == []
    # SDPA's own kernels are not simulated.
    assert all(isinstance(row[name], float) for row in entry["rows"] for name in ("xformers", "sdpa")), entry["rows"]
    [(capability, name)] = fastest_backend(tmp_path / "first.json").items()
    assert capability == torch.cuda.get_device_capability(0) and name in BACKENDS

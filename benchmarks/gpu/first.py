"""The first quarter of an hour on a GPU that nobody has used clipmill on: does it work, then how fast is it.

In the order in which an answer is worth most. What only says yes or no runs tests of tests/gpu; the page has a row for
each of them.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu.feeding_data import require_repeated
from benchmarks.gpu.feeding_steps import wait_row
from benchmarks.gpu.measurements import Result, Setup, Target, one_line
from benchmarks.gpu.speed_attention import PRECISIONS, SHAPES, AttentionCalls, attentions, tiny
from clipmill.train.doctor.accelerator import examine_accelerator
from clipmill.train.models.attention import attend_naively
from clipmill.train.run.folder import read_lines

ROOT = Path(__file__).parents[2]
# Shapes of the presets' towers: clips, packed captions, VideoMAE's encoder, time attention, a captioner.
_PRESETS = (
    "ViT-B/16, 4 frames",
    "text, 12 tokens, packed",
    "VideoMAE-B, visible",
    "TimeSformer, 8 frames",
    "caption decoder, itself",
)
# Relative errors in the norm that rounding alone makes.
_MOST_ERROR = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2}
_TESTS_TIMEOUT_S = 150.0
_LEAST_MFU, _MOST_WAIT = 0.3, 0.01
_WARM_STEPS = 8


def measure_doctor(setup: Setup) -> Result:
    """Return what `train doctor` finds out about torch, the driver and each attention backend."""
    found = examine_accelerator(has_gpus=setup.device.type == "cuda")
    rows: list[dict[str, Any]] = [asdict(tried) for tried in found.tried]
    for row in rows:
        if not row["error"]:
            del row["error"]
    return Result(
        rows=rows,
        notes=[
            f"torch {found.torch}, CUDA {found.torch_cuda}, driver {found.driver} (needs {found.needed_driver})",
            f"xformers {found.xformers}; its own library: {found.xformers_library or 'loaded'}",
            *(f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}" for gpu in found.gpus),
        ],
    )


def measure_attention(setup: Setup) -> Result:
    """Return error and time of each backend at the presets' shapes; the fastest one is for `--attention auto`."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        if shape.name not in _PRESETS:
            continue
        for precision, dtype in PRECISIONS.items():
            if setup.is_dry_run and precision != "fp32":
                continue
            calls = AttentionCalls(tiny(shape) if setup.is_dry_run else shape, device=setup.device, dtype=dtype)
            row: dict[str, Any] = {"shape": shape.name, "precision": precision}
            expected = calls.gradients(attend_naively, in_float32=True)
            times: dict[str, float] = {}
            for name, opens in attentions(setup).items():
                try:
                    attend = opens()
                    error = _error(calls.gradients(attend), expected)
                    if error > _MOST_ERROR[precision]:
                        row["error"] = f"{name} is off by {error:.2g}"
                    times[name] = row[name] = _milliseconds(partial(calls.forward_and_backward, attend), setup)
                except Exception as error:  # noqa: BLE001  a backend may support no such shape
                    row[name] = one_line(error, most_chars=40)
            chosen = {name: ms for name, ms in times.items() if name not in ("auto", "naive")}
            rows.append({**row, "fastest": min(chosen, key=lambda name: chosen[name], default=None)})
    return Result(rows=rows, notes=["ms per forward and backward pass; gradients are those of the formula in float32"])


def measure_tests(setup: Setup, *, files: Sequence[str], selection: str = "") -> Result:
    """Return the outcome of tests of tests/gpu."""
    report = setup.scratch / f"{Path(files[0]).stem}.xml"
    words = [sys.executable, "-m", "pytest", *(f"tests/gpu/{name}" for name in files), "-m", "gpu", "-q"]
    words += ["--gpu-device", setup.device.type, "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "TMPDIR": str(setup.scratch), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*words, *(["-k", selection] if selection else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TESTS_TIMEOUT_S,
        check=False,
    )
    if not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    rows: list[dict[str, Any]] = []
    for case in ElementTree.parse(report).iter("testcase"):
        row: dict[str, Any] = {"test": case.get("name"), "seconds": float(case.get("time", "0"))}
        outcome = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        row["outcome"] = "passed" if outcome is None else outcome.tag
        if outcome is not None and outcome.tag != "skipped":
            row["error"] = outcome.get("message")
        rows.append(row)
    return Result(rows=rows)


def measure_preset(setup: Setup) -> Result:
    """Return MFU and waiting for data of b16-ego4d with 4 and 16 frames, with and without checkpointing."""
    data, rows, targets = require_repeated(setup), list[dict[str, Any]](), list[Target]()
    for num_frames in (4, 16):
        for keeps in (False, True):
            name = f"T = {num_frames}, {'without' if keeps else 'with'} activation checkpointing"
            out = setup.scratch / f"preset-{num_frames}-{keeps}"
            batch = 4 if setup.is_dry_run else (256 if num_frames == 4 else 32) * (1 if keeps else 2)
            try:
                lines = _train(setup, data, out=out, num_frames=num_frames, batch=batch, keeps_activations=keeps)
            except RuntimeError as error:
                rows.append({"training": name, "error": one_line(error)})
                continue
            row = wait_row(name, lines, batch=batch, workers=len(os.sched_getaffinity(0)))
            steady = lines[min(_WARM_STEPS, len(lines) // 2) :]
            row["MFU"] = mfu = sum(line.get("mfu", 0.0) for line in steady) / len(steady)
            rows.append(row)
            if not keeps:
                targets.append(Target(what=f"MFU, {name}", figure=mfu, goal=_LEAST_MFU))
            targets.append(Target(what=f"waiting, {name}", figure=row["wait share"], goal=_MOST_WAIT, is_at_most=True))
    return Result(rows=rows, targets=targets, notes=["expected figures: docs/gpu.md"])


def _train(
    setup: Setup, data: Path, *, out: Path, num_frames: int, batch: int, keeps_activations: bool
) -> list[dict[str, Any]]:
    """The steps of a short run of the preset; RuntimeError if it fails, as for want of memory."""
    program = "import sys; from clipmill.train.cli import main; sys.argv[0] = 'train'; main()"
    words = ["dual-encoder", "--shards", data, "--preset", "b16-ego4d", "--num-frames", num_frames, "--batch", batch]
    words += ["--steps", 2 if setup.is_dry_run else 30, "--device", setup.device.type, "--out", out]
    words += ["--checkpoint-every", 10**6, "--workers", len(os.sched_getaffinity(0))]
    words += ["--towers.no-activation-checkpointing"] if keeps_activations else []
    words += ["--model", "tiny", "--size-px", 32] if setup.is_dry_run else []
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    lines = read_lines(out / "metrics.jsonl")
    shutil.rmtree(out)
    return lines


def _error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((one.float() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


def _milliseconds(step: Callable[[], None], setup: Setup, *, num_steps: int = 10) -> float:
    for _ in range(2):
        step()
    if setup.device.type != "cuda":
        began_s = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - began_s)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_steps

"""Measurements for a GPU on which clipmill has not run before: does it work, and how fast is it?

The most valuable measurements come first. Those that only succeed or fail run tests in tests/gpu, and the page has a
row for each test.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu.feeding_data import require_repeated
from benchmarks.gpu.feeding_steps import wait_row
from benchmarks.gpu.measurements import Result, Setup, Target, one_line
from benchmarks.gpu.speed_attention import PRECISIONS, SHAPES, AttentionCalls, tiny
from clipmill.train.doctor.machine import examine_accelerator
from clipmill.train.models.attention import AttentionChoice, attend_naively, open_attention
from clipmill.train.run.folder import read_lines

ROOT = Path(__file__).parents[2]
# Shapes of the towers in the presets: clips, packed captions, VideoMAE's encoder, time attention, a captioner.
_PRESETS = (
    "ViT-B/16, 4 frames",
    "text, 12 tokens, packed",
    "VideoMAE-B, visible",
    "TimeSformer, 8 frames",
    "caption decoder, itself",
)
# Backends that --attention auto can choose, and the name of the table row for all shapes.
BACKENDS: tuple[AttentionChoice, ...] = ("xformers", "sdpa", "flash", "cudnn")
ALL = "all of them"
# Maximum relative errors, in the norm, that rounding can cause.
_MOST_ERROR = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2}
_TESTS_TIMEOUT_S = 150.0
_LEAST_MFU, _MOST_WAIT = 0.3, 0.01
_WARM_STEPS = 8


def measure_doctor(setup: Setup) -> Result:
    """Return the findings of `train doctor` about torch, the driver and each attention backend."""
    accelerator = examine_accelerator(looks_for_gpus=setup.device.type == "cuda")
    rows: list[dict[str, Any]] = [asdict(trial) for trial in accelerator.tried]
    for row in rows:
        if not row["error"]:
            del row["error"]
    return Result(
        rows=rows,
        notes=[
            f"torch {accelerator.torch}, CUDA {accelerator.torch_cuda}, driver {accelerator.driver} "
            f"(needs {accelerator.needed_driver})",
            f"xformers {accelerator.xformers}; its own library: {accelerator.xformers_library or 'loaded'}",
            *(f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}" for gpu in accelerator.gpus),
        ],
    )


def measure_attention(setup: Setup) -> Result:
    """Return the error and time of each backend for the shapes of the presets. `fastest_backend` reads the last row."""
    names = BACKENDS if setup.device.type == "cuda" else ("sdpa",)
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
            for name in ("naive", *names):
                try:
                    attend = open_attention(name, device_type=setup.device.type).attend
                    deviation = _deviation(calls.gradients(attend), expected)
                    if not deviation <= _MOST_ERROR[precision]:
                        row["error"] = f"{name} is off by {deviation:.2g}"
                    else:
                        row[name] = _milliseconds(partial(calls.forward_and_backward, attend), setup)
                except Exception as error:  # noqa: BLE001  a backend may not support the shape
                    row[name] = one_line(error, most_chars=40)
            rows.append({**row, "fastest": _fastest(row)})
    precision = rows[0]["precision"]
    of_precision = [row for row in rows if row["precision"] == precision]
    total: dict[str, Any] = {
        name: sum(row[name] for row in of_precision) for name in names if all(_ran(row, name) for row in of_precision)
    }
    rows.append({"shape": ALL, "precision": precision, **total, "fastest": _fastest(total)})
    return Result(
        rows=rows,
        notes=[
            "ms per forward and backward pass; gradients are compared with the formula in float32",
            f"{ALL}: enter the fastest backend in FASTEST_BACKENDS of train/models/attention_choice.py",
        ],
    )


def fastest_backend(path: Path) -> dict[tuple[int, int], AttentionChoice]:
    """Return the entry for `attention_choice.FASTEST_BACKENDS` from the results of a GPU; {} if there is none."""
    results = json.loads(path.read_bytes())
    capability = results["environment"].get("compute_capability")
    rows = [row for one in results["measurements"] for row in one["rows"] if row.get("shape") == ALL]
    if capability is None or not rows or rows[0]["fastest"] is None:
        return {}
    major, minor = map(int, capability.split("."))
    return {(major, minor): rows[0]["fastest"]}


def _ran(row: dict[str, Any], name: str) -> bool:
    return isinstance(row.get(name), float)


def _fastest(row: dict[str, Any]) -> str | None:
    return min((name for name in BACKENDS if _ran(row, name)), key=lambda name: row[name], default=None)


def measure_tests(setup: Setup, *, files: Sequence[str], selection: str = "", dry: str) -> Result:
    """Run tests in tests/gpu, and return their outcomes.

    Args:
        selection: Expression for pytest's -k that selects the tests.
        dry: Expression for a dry run.
    """
    report = setup.scratch / f"{Path(files[0]).stem}.xml"
    words = [*(f"tests/gpu/{name}" for name in files), "-m", "gpu", "-q", "--gpu-device", setup.device.type]
    words += ["-p", "no:cacheprovider", f"--junitxml={report}", "-k", dry if setup.is_dry_run else selection]
    status, said = _run("pytest", words, setup=setup, timeout_s=_TESTS_TIMEOUT_S)
    if not report.exists():
        raise RuntimeError(f"pytest exited with {status}: {said[-500:]}")
    rows: list[dict[str, Any]] = []
    for case in ElementTree.parse(report).iter("testcase"):
        row: dict[str, Any] = {"test": case.get("name"), "seconds": float(case.get("time", "0"))}
        outcome = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        row["outcome"] = "passed" if outcome is None else outcome.tag
        if outcome is not None and outcome.tag != "skipped":
            row["error"] = outcome.get("message")
        rows.append(row)
    if not rows:
        raise RuntimeError(f"pytest found no test: {said[-500:]}")
    return Result(rows=rows)


def measure_preset(setup: Setup, *, num_frames: int, keeps_activations: bool) -> Result:
    """Measure the MFU of b16-ego4d and the time it waits for data, with or without activation checkpointing."""
    name = f"T = {num_frames}, {'without' if keeps_activations else 'with'} activation checkpointing"
    batch = 4 if setup.is_dry_run else (256 if num_frames == 4 else 32) * (1 if keeps_activations else 2)
    workers = 1 if setup.is_dry_run else len(os.sched_getaffinity(0))
    out = setup.scratch / f"preset-{num_frames}-{keeps_activations}"
    words = ["dual-encoder", "--shards", require_repeated(setup), "--preset", "b16-ego4d", "--num-frames", num_frames]
    words += ["--batch", batch, "--steps", 2 if setup.is_dry_run else 30, "--device", setup.device.type, "--out", out]
    words += ["--checkpoint-every", 10**6, "--workers", workers]
    words += ["--towers.no-activation-checkpointing"] if keeps_activations else []
    words += ["--model", "tiny", "--size-px", 32] if setup.is_dry_run else []
    status, said = _run("clipmill.train.cli", words, setup=setup)
    if status:
        raise RuntimeError((said.strip().splitlines() or [f"exit status {status}"])[-1])
    lines = read_lines(out / "metrics.jsonl")
    shutil.rmtree(out)
    row = wait_row(name, lines, batch=batch, workers=workers)
    steady = lines[min(_WARM_STEPS, len(lines) // 2) :]
    row["MFU"] = mfu = sum(line.get("mfu", 0.0) for line in steady) / len(steady)
    targets = [Target(what=f"waiting, {name}", figure=row["wait share"], goal=_MOST_WAIT, is_at_most=True)]
    if not keeps_activations:
        targets.append(Target(what=f"MFU, {name}", figure=mfu, goal=_LEAST_MFU))
    return Result(rows=[row], targets=targets, notes=["docs/gpu.md lists the expected figures"])


def _run(module: str, words: Sequence[object], *, setup: Setup, timeout_s: float | None = None) -> tuple[int, str]:
    """Run a program in a new process; in a dry run, in this process, which has imported most modules already.

    Args:
        module: Module with a function `main`, whose return value or SystemExit is the exit status.

    Returns:
        The exit status and the output of the program.
    """
    command = f"import sys; from {module} import main; sys.argv[0] = 'main'; sys.exit(main())"
    if not setup.is_dry_run:
        done = subprocess.run(
            [sys.executable, "-c", command, *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(setup.scratch), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr
    argv, folder, printed, status = sys.argv, Path.cwd(), io.StringIO(), 0
    sys.argv = ["main", *map(str, words)]
    os.chdir(ROOT)
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            status = int(import_module(module).main() or 0)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = argv
        os.chdir(folder)
    return status, printed.getvalue()


def _deviation(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((one.float() - other).norm() / other.norm()) for one, other in zip(actual, expected, strict=True))


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

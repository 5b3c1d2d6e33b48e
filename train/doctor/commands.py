"""`train doctor`: rules that find a machine's problems, the report of the command, and the entry in run.json."""

import json
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.progress import Activity
from clipmill.train.doctor.machine import (
    CODECS,
    LEVELS,
    Finding,
    MachineFacts,
    as_json,
    examine,
    examine_in_run,
    training_defaults,
)

# Rules: pure functions that take facts about a machine, and yield findings with hints.

_GB = 1e9
_MIN_SHM = 1 << 30  # bytes of /dev/shm for NCCL's buffers within a machine and for Ray's objects
_MIN_FREE = 2 * _GB
_SLOW_READ = 100e6
_SLOW_PIECE_MS = 10.0
_USED_FRACTION = 0.1
_FASTER_DISK = "use a faster disk, or run train bench to check whether the disk keeps up"

_broken, _warning, _note = (partial(Finding, level) for level in LEVELS)


def judge(machine: MachineFacts) -> list[Finding]:
    """Return all findings, in order of decreasing severity."""
    findings = [finding for rule in _RULES for finding in rule(machine)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _judge_torch(machine: MachineFacts) -> Iterator[Finding]:
    if (error := machine.accelerator.torch_error) is not None:
        yield _broken(
            f"torch cannot be used: {error}",
            "reinstall clipmill[train]; if a GPU does not respond, check it with nvidia-smi",
        )


def _judge_gpu(machine: MachineFacts) -> Iterator[Finding]:
    from clipmill.train.device.driver import is_older

    accelerator = machine.accelerator
    if accelerator.gpus or accelerator.torch_error is not None or machine.asked_device == "cpu":
        return
    finding, fallback = (
        (_broken, "use --device cpu") if machine.asked_device == "cuda" else (_warning, "training runs on the CPU")
    )
    if accelerator.driver is None and accelerator.unusable_gpu is not None:
        yield finding(
            f"the GPU of this machine cannot be used: {accelerator.unusable_gpu}",
            f"install the NVIDIA driver; until then, {fallback}",
        )
    elif accelerator.driver is None:
        if machine.asked_device == "cuda":
            yield _broken(
                "--device cuda requests a GPU, but this machine has no NVIDIA driver",
                "use --device cpu, or a machine with a GPU",
            )
    elif accelerator.torch_cuda is None:
        yield finding(
            f"this machine has an NVIDIA driver, but torch {accelerator.torch} was built without CUDA",
            f"install a build of torch with CUDA; until then, {fallback}",
        )
    elif accelerator.needed_driver is not None and is_older(accelerator.driver, accelerator.needed_driver):
        yield finding(
            f"the NVIDIA driver ({accelerator.driver}) is older than {accelerator.needed_driver}, the oldest driver "
            f"that torch {accelerator.torch} for CUDA {accelerator.torch_cuda} supports",
            f"update the driver to {accelerator.needed_driver} or later; until then, {fallback}",
        )
    else:
        yield finding(
            f"there is an NVIDIA driver ({accelerator.driver}), but torch {accelerator.torch} for CUDA "
            f"{accelerator.torch_cuda} finds no GPU: {accelerator.cuda_error or 'none is visible'}",
            "update the driver if it is too old; check CUDA_VISIBLE_DEVICES, and that the container was started with "
            "access to the GPUs (--gpus all)",
        )


def _judge_gpu_use(machine: MachineFacts) -> Iterator[Finding]:
    if machine.asked_device == "cpu":
        return
    for index, gpu in enumerate(machine.accelerator.gpus):
        used_bytes = 0 if gpu.free_bytes is None else gpu.memory_bytes - gpu.free_bytes
        if used_bytes > max(_USED_FRACTION * gpu.memory_bytes, 2 * _GB):
            yield _warning(
                f"{used_bytes / _GB:.0f} of the {gpu.memory_bytes / _GB:.0f} GB of GPU {index} are already in use",
                "list the processes with nvidia-smi, or select a different GPU with CUDA_VISIBLE_DEVICES",
            )


def _judge_attention(machine: MachineFacts) -> Iterator[Finding]:
    accelerator = machine.accelerator
    usable_backends = sorted({trial.attention for trial in accelerator.tried if not trial.error})
    for trial in accelerator.tried:
        if trial.error:
            problem = f"attention with {trial.attention} fails for {trial.kind} in {trial.dtype}: {trial.error}"
            if trial.attention == "sdpa":
                yield _broken(problem, "install a build of torch that supports this GPU")
            else:
                names = f"; usable backends: {', '.join(usable_backends)}" if usable_backends else ""
                yield _warning(problem, f"use --attention auto, which ignores this backend{names}")
        elif accelerator.gpus and trial.attention == "sdpa" and "math" in trial.kernels:
            yield _warning(
                f"SDPA has no fused kernel for {trial.kind} in {trial.dtype}, and stores all scores in memory",
                "install a build of torch for this GPU",
            )


def _judge_xformers(machine: MachineFacts) -> Iterator[Finding]:
    accelerator = machine.accelerator
    if accelerator.xformers == "not loaded":
        yield _warning(
            f"xformers is installed but cannot be loaded: {accelerator.xformers_library}",
            "install matching versions of torch and xformers (docs/models.md), or train without xformers",
        )


def _judge_cores(machine: MachineFacts) -> Iterator[Finding]:
    host = machine.host
    cores = min(host.allowed_cores, host.quota_cores or host.allowed_cores)
    if host.quota_cores is not None and host.quota_cores < host.allowed_cores:
        yield _warning(
            f"the cgroup allows only {host.quota_cores:g} of {count_noun(host.allowed_cores, 'visible core')}",
            f"set OMP_NUM_THREADS={max(1, int(host.quota_cores))}, because torch starts a thread for each visible core",
        )
    value = host.thread_variables.get("OMP_NUM_THREADS", "").strip()
    # A value such as "4,2" has one number per nesting level. OpenMP ignores text that is not a number.
    num_threads = int(value.split(",")[0]) if re.fullmatch(r"[1-9][0-9]{0,8}(,.*)?", value) else None
    is_on_cpu = machine.asked_device == "cpu" or not machine.accelerator.gpus
    if num_threads is not None and (num_threads > cores or (is_on_cpu and 2 * num_threads < cores)):
        yield _warning(
            f"OMP_NUM_THREADS is {value}, but {cores:g} cores are available",
            "unset OMP_NUM_THREADS, unless several processes share the machine",
        )


def _judge_shared_memory(machine: MachineFacts) -> Iterator[Finding]:
    size = machine.host.shm_bytes
    if size is not None and size < _MIN_SHM and len(machine.accelerator.gpus) > 1:
        yield _warning(
            f"/dev/shm has only {size_text(size)}, but NCCL uses it to exchange data between processes",
            "start the container with --shm-size 8g or --ipc host",
        )


def _judge_decoder(machine: MachineFacts) -> Iterator[Finding]:
    decoder = machine.decoder
    if decoder.error is not None:
        yield _broken(f"PyAV cannot be used: {decoder.error}", "install PyAV, which decodes the clips")
    elif decoder.missing:
        yield (_broken if "h264" in decoder.missing else _warning)(
            f"PyAV {decoder.pyav} has no decoder for {', '.join(decoder.missing)}",
            "install the PyAV wheel, which contains all decoders; chunks with other codecs can still be read",
        )


def _judge_disk(machine: MachineFacts) -> Iterator[Finding]:
    disk = machine.disk
    if disk is None:
        return
    if disk.kind == "network":
        yield _warning(
            f"{disk.path} is on a network file system ({disk.file_system}), so each clip waits for the server",
            "copy the data to a local disk, or run train bench to check whether the server keeps up",
        )
    if disk.free_bytes is not None and disk.free_bytes < _MIN_FREE:
        yield _warning(
            f"{disk.path} has only {disk.free_bytes / _GB:.1f} GB left, but each checkpoint of ViT-B takes 1.8 GB",
            "free some space, or write runs to another disk (--out)",
        )
    if disk.problem is not None:
        yield Finding(disk.problem.level, f"{disk.path}: {disk.problem.what}", disk.problem.hint)
    speed = disk.speed
    if speed is None or speed.cached is not False:  # reads from the page cache do not show the speed of the disk
        return
    if speed.read_bytes_per_s < _SLOW_READ:
        yield _warning(f"{disk.path} is read at only {size_text(speed.read_bytes_per_s)}/s", _FASTER_DISK)
    if speed.piece_ms > _SLOW_PIECE_MS:
        yield _warning(
            f"random reads of 64 KiB, as needed for clips, take {speed.piece_ms:.0f} ms on {disk.path}",
            "use a faster disk, or more --workers",
        )


def _judge_compilation(machine: MachineFacts) -> Iterator[Finding]:
    if machine.host.compiler is None:
        yield _note("--compile cannot be used, because there is no C compiler", "install gcc, or set CC")
    elif machine.accelerator.gpus and not machine.accelerator.has_triton:
        yield _note("--compile cannot be used on the GPU, because triton is not installed", "install triton")


_RULES: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    *(_judge_torch, _judge_gpu, _judge_gpu_use, _judge_attention, _judge_xformers),
    *(_judge_cores, _judge_shared_memory, _judge_decoder, _judge_disk, _judge_compilation),
)


_LABEL_WIDTH = 12
_MAX_COLUMNS = 100
_DISK_KINDS = {
    **{"local": "local", "network": "a network file system", "host": "a folder on the host", "memory": "in memory"},
    "unknown": "possibly not local",
}
_CACHED = {True: "from the page cache", False: "not from the page cache", None: "perhaps from the page cache"}


def run_doctor(*, shards: Path | None, device: str, is_json: bool) -> None:
    """Examine this machine, and print the report.

    Args:
        shards: Data folder whose disk is examined; None for the current folder.
        device: Value of `--device`.
        is_json: True to print JSON.

    Raises:
        UserError: `shards` is not a folder on a disk.
        FailedWork: A problem would stop training.
    """
    if shards is not None:
        _require_folder(shards)
    with Activity("examining this machine, which takes about 10 s"):
        machine = examine(device=device, shards=shards)
    findings = judge(machine)
    if is_json:
        print(json.dumps({**as_json(machine), "findings": [asdict(finding) for finding in findings]}))
    else:
        print_report(machine, findings)
    num_broken = sum(finding.level == "broken" for finding in findings)
    if num_broken:
        raise FailedWork(f"{count_noun(num_broken, 'problem')} would stop training")


def _require_folder(shards: Path) -> None:
    if shards.is_dir():
        return
    if url := re.fullmatch(r"(\w+):/(.*)", str(shards)):  # a path has no double slash
        bucket_url = f"{url[1]}://{url[2]}"
        raise UserError(
            f"train doctor measures disks, but --shards {bucket_url} is in object storage",
            hint=f"omit --shards, and measure the bucket with prep advise --data {bucket_url}",
            flags=("--shards",),
        )
    problem = f"{shards} is a file, not a data folder" if shards.exists() else f"there is no folder {shards}"
    raise UserError(
        f"{problem} (requested by --shards)", hint="use the data folder that prep made", flags=("--shards",)
    )


def doctor_facts(*, asked_device: str, device_type: str) -> dict[str, Any]:
    """Return the report's lines and findings for run.json, without slow measurements."""
    machine = examine_in_run(asked_device=asked_device, device_type=device_type)
    return {"lines": lines_of(machine), "findings": [asdict(finding) for finding in judge(machine)]}


def lines_of(machine: MachineFacts) -> dict[str, str]:
    """Return the lines of the report, keyed by label."""
    return {label: text for label, describe in _LINES.items() if (text := describe(machine))}


def print_report(machine: MachineFacts, findings: list[Finding]) -> None:
    """Print the lines and findings, wrapped to the width of the terminal."""
    columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS) if sys.stdout.isatty() else 80
    for label, text in lines_of(machine).items():
        print(wrap_words(text, label=label, columns=columns))
    for finding in findings:
        print()
        print(wrap_words(finding.what, label=f"{finding.level}:", columns=columns))
        print(wrap_words(finding.hint, label="hint:", columns=columns))
    if not findings:
        print("\nNo problems were found.")


def wrap_words(text: str, *, label: str, columns: int) -> str:
    """Wrap text. A label precedes the first line, and the other lines are indented."""
    return textwrap.fill(
        text,
        width=columns,
        initial_indent=label.ljust(_LABEL_WIDTH),
        subsequent_indent=" " * _LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _gpus(machine: MachineFacts) -> str:
    accelerator = machine.accelerator
    driver = f"; driver {accelerator.driver}" if accelerator.driver else ""
    if not accelerator.gpus:
        return f"none{driver or '; no NVIDIA driver'}"
    kinds = Counter(
        f"{gpu.name}, {size_text(gpu.memory_bytes)}, compute capability {'.'.join(map(str, gpu.capability))}"
        for gpu in accelerator.gpus
    )
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items()) + driver


def _torch(machine: MachineFacts) -> str:
    accelerator = machine.accelerator
    if accelerator.torch is None:
        return "cannot be used"
    parts = [accelerator.torch, f"CUDA {accelerator.torch_cuda}" if accelerator.torch_cuda else "without CUDA"]
    if accelerator.needed_driver:
        parts.append(f"needs driver {accelerator.needed_driver} or later")
    if accelerator.cudnn:
        parts.append(f"cuDNN {accelerator.cudnn}")
    parts.append(f"xformers {accelerator.xformers}")
    return ", ".join(parts)


def _attention(machine: MachineFacts) -> str:
    """List the attention backends and the kernels that each backend uses."""
    texts: dict[str, dict[str, list[str]]] = {}
    for trial in machine.accelerator.tried:
        kernels = "fails" if trial.error else trial.kernels
        texts.setdefault(trial.attention, {}).setdefault(kernels, []).append(trial.kind)
    lines = []
    for name, kinds in texts.items():
        parts = [text if len(kinds) == 1 else f"{text} ({', '.join(names)})" for text, names in kinds.items()]
        lines.append(f"{name}: {', '.join(parts)}")
    return "; ".join(lines)


def _decoder(machine: MachineFacts) -> str:
    decoder = machine.decoder
    if decoder.error is not None:
        return "cannot be used"
    available = [codec for codec in CODECS if codec not in decoder.missing]
    return f"PyAV {decoder.pyav}, libavcodec {decoder.libavcodec}: {', '.join(available) or 'none'}"


def _processor(machine: MachineFacts) -> str:
    host = machine.host
    text = f"{host.processor}, {count_noun(host.num_cores, 'core')}"
    if host.memory_bytes is not None:
        text += f"; memory {size_text(host.memory_bytes)}"
        text += f" ({size_text(host.free_bytes)} free)" if host.free_bytes is not None else ""
    return text + (f"; /dev/shm {size_text(host.shm_bytes)}" if host.shm_bytes is not None else "; no /dev/shm")


def _threads(machine: MachineFacts) -> str:
    host = machine.host
    text = f"{count_noun(host.allowed_cores, 'core')} allowed"
    if host.quota_cores is not None:
        text += f", limited to {host.quota_cores:g} by the cgroup"
    if machine.accelerator.num_threads is not None:
        text += f"; torch uses {count_noun(machine.accelerator.num_threads, 'thread')}"
    variables = ", ".join(f"{name}={value}" for name, value in host.thread_variables.items())
    return f"{text}; {variables or 'OMP_NUM_THREADS is not set'}"


def _disk(machine: MachineFacts) -> str:
    disk = machine.disk
    if disk is None:
        return ""
    text = f"{disk.path}: {disk.file_system or 'unknown file system'}, {_DISK_KINDS[disk.kind]}"
    if disk.free_bytes is not None:
        text += f", {size_text(disk.free_bytes)} free"
    if (speed := disk.speed) is not None:
        text += "" if speed.write_bytes_per_s is None else f"; writes {size_text(speed.write_bytes_per_s)}/s"
        text += f"; reads {size_text(speed.read_bytes_per_s)}/s, 64 KiB in {speed.piece_ms:.2f} ms"
        text += f" ({_CACHED[speed.cached]})"
    return text


def _software(machine: MachineFacts) -> str:
    versions = machine.versions
    version_texts = [
        f"{name} {versions[name]}" for name in ("clipmill", "python", "numpy", "pyarrow") if name in versions
    ]
    return f"{', '.join(version_texts)}; {machine.system}"


def _training(machine: MachineFacts) -> str:
    if machine.is_run:
        return ""
    defaults = training_defaults(machine)
    compiles = "--compile works" if defaults.compiles else "no --compile"
    return (
        f"{defaults.device}, {defaults.precision}, attention: {defaults.attention}; "
        f"{defaults.loader_threads} loader threads; {compiles}"
    )


_LINES = {
    **{"gpu": _gpus, "torch": _torch, "attention": _attention, "decoder": _decoder, "processor": _processor},
    **{"threads": _threads, "disk": _disk, "software": _software, "training": _training},
}

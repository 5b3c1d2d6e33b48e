"""`train doctor`: the command, its report of about ten lines and findings, and the part of it that a run's page has."""

import json
import re
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.progress import Activity
from clipmill.train.doctor.examined import CODECS, Examined, as_json, examine, examine_in_run, used_by_training
from clipmill.train.doctor.host import Finding
from clipmill.train.doctor.judge import judge

_LABEL_WIDTH = 12
_MAX_COLUMNS = 100
_DISK_KINDS = {
    **{"local": "local", "network": "a network file system", "host": "a folder of the host", "memory": "in memory"},
    "unknown": "not known whether local",
}
_CACHED = {True: "from the page cache", False: "not from the page cache", None: "perhaps from the page cache"}


def run_doctor(*, shards: Path | None, device: str, is_json: bool) -> None:
    """Examine this machine and print the report.

    Raises:
        UserError: `shards` is not a folder on a disk.
        FailedWork: a finding would stop training.
    """
    if shards is not None:
        _require_folder(shards)
    with Activity("examining this machine, which takes about 10 s"):
        examined = examine(device=device, shards=shards)
    findings = judge(examined)
    if is_json:
        print(json.dumps({**as_json(examined), "findings": [asdict(finding) for finding in findings]}))
    else:
        print_report(examined, findings)
    num_broken = sum(finding.level == "broken" for finding in findings)
    if num_broken:
        things = count_noun(num_broken, "thing")
        raise FailedWork(f"{things} would stop training")


def _require_folder(shards: Path) -> None:
    if shards.is_dir():
        return
    if address := re.fullmatch(r"(\w+):/(.*)", str(shards)):  # a path has no double slash
        remote = f"{address[1]}://{address[2]}"
        raise UserError(
            f"train doctor measures disks, and --shards {remote} is in object storage",
            hint=f"leave out --shards, and measure the bucket with prep advise --data {remote}",
            flags=("--shards",),
        )
    what = f"{shards} is a file, not a data folder" if shards.exists() else f"there is no folder {shards}"
    raise UserError(f"{what} (asked for by --shards)", hint="name the data folder of prep", flags=("--shards",))


def doctor_facts(*, asked_device: str, device_type: str) -> dict[str, Any]:
    """Lines and findings for run.json, without anything that takes time."""
    examined = examine_in_run(asked_device=asked_device, device_type=device_type)
    return {"lines": lines_of(examined), "findings": [asdict(finding) for finding in judge(examined)]}


def lines_of(examined: Examined) -> dict[str, str]:
    """The lines of the report by label."""
    return {label: text for label, describe in _LINES.items() if (text := describe(examined))}


def print_report(examined: Examined, findings: list[Finding]) -> None:
    """Print lines and findings, wrapped to the width of the terminal."""
    columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS) if sys.stdout.isatty() else 80
    for label, text in lines_of(examined).items():
        print(wrap_words(text, label=label, columns=columns))
    for finding in findings:
        print()
        print(wrap_words(finding.what, label=f"{finding.level}:", columns=columns))
        print(wrap_words(finding.hint, label="hint:", columns=columns))
    if not findings:
        print("\nNothing is wrong.")


def wrap_words(text: str, *, label: str, columns: int) -> str:
    """Words behind a label, wrapped."""
    return textwrap.fill(
        text,
        width=columns,
        initial_indent=label.ljust(_LABEL_WIDTH),
        subsequent_indent=" " * _LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _gpus(examined: Examined) -> str:
    accelerator = examined.accelerator
    driver = f"; driver {accelerator.driver}" if accelerator.driver else ""
    if not accelerator.gpus:
        return f"none{driver or '; no NVIDIA driver'}"
    kinds = Counter(
        f"{gpu.name}, {size_text(gpu.memory_bytes)}, compute capability {'.'.join(map(str, gpu.capability))}"
        for gpu in accelerator.gpus
    )
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items()) + driver


def _torch(examined: Examined) -> str:
    accelerator = examined.accelerator
    if accelerator.torch is None:
        return "cannot be used"
    parts = [accelerator.torch, f"CUDA {accelerator.torch_cuda}" if accelerator.torch_cuda else "without CUDA"]
    if accelerator.needed_driver:
        parts.append(f"needs driver {accelerator.needed_driver} or later")
    if accelerator.cudnn:
        parts.append(f"cuDNN {accelerator.cudnn}")
    parts.append(f"xformers {accelerator.xformers}")
    return ", ".join(parts)


def _attention(examined: Examined) -> str:
    """Backends with the kernels that they run, grouped."""
    texts: dict[str, dict[str, list[str]]] = {}
    for one in examined.accelerator.tried:
        kernels = "fails" if one.error else one.kernels
        texts.setdefault(one.attention, {}).setdefault(kernels, []).append(one.kind)
    found = []
    for name, kinds in texts.items():
        each = [text if len(kinds) == 1 else f"{text} ({', '.join(its)})" for text, its in kinds.items()]
        found.append(f"{name}: {', '.join(each)}")
    return "; ".join(found)


def _decoder(examined: Examined) -> str:
    decoder = examined.decoder
    if decoder.error is not None:
        return "cannot be used"
    available = [codec for codec in CODECS if codec not in decoder.missing]
    return f"PyAV {decoder.pyav}, libavcodec {decoder.libavcodec}: {', '.join(available) or 'none'}"


def _processor(examined: Examined) -> str:
    host = examined.host
    text = f"{host.processor}, {count_noun(host.num_cores, 'core')}"
    if host.memory_bytes is not None:
        text += f"; memory {size_text(host.memory_bytes)}"
        text += f" ({size_text(host.free_bytes)} free)" if host.free_bytes is not None else ""
    return text + (f"; /dev/shm {size_text(host.shm_bytes)}" if host.shm_bytes is not None else "; no /dev/shm")


def _threads(examined: Examined) -> str:
    host = examined.host
    text = f"{count_noun(host.allowed_cores, 'core')} allowed"
    if host.quota_cores is not None:
        text += f", the cgroup's limit is {host.quota_cores:g}"
    if examined.accelerator.num_threads is not None:
        text += f"; torch uses {count_noun(examined.accelerator.num_threads, 'thread')}"
    variables = ", ".join(f"{name}={value}" for name, value in host.thread_variables.items())
    return f"{text}; {variables or 'OMP_NUM_THREADS is not set'}"


def _disk(examined: Examined) -> str:
    disk = examined.disk
    if disk is None:
        return ""
    text = f"{disk.path}: {disk.file_system or 'file system not known'}, {_DISK_KINDS[disk.kind]}"
    if disk.free_bytes is not None:
        text += f", {size_text(disk.free_bytes)} free"
    if (speed := disk.speed) is not None:
        text += "" if speed.write_bytes_per_s is None else f"; writes {size_text(speed.write_bytes_per_s)}/s"
        text += f"; reads {size_text(speed.read_bytes_per_s)}/s, 64 KiB in {speed.piece_ms:.2f} ms"
        text += f" ({_CACHED[speed.cached]})"
    return text


def _software(examined: Examined) -> str:
    versions = examined.versions
    shown = [f"{name} {versions[name]}" for name in ("clipmill", "python", "numpy", "pyarrow") if name in versions]
    return f"{', '.join(shown)}; {examined.system}"


def _training(examined: Examined) -> str:
    if examined.is_run:
        return ""
    used = used_by_training(examined)
    compiles = "--compile works" if used.compiles else "no --compile"
    return (
        f"{used.device}, {used.precision}, attention: {used.attention}; "
        f"{used.loader_threads} loader threads; {compiles}"
    )


_LINES = {
    **{"gpu": _gpus, "torch": _torch, "attention": _attention, "decoder": _decoder, "processor": _processor},
    **{"threads": _threads, "disk": _disk, "software": _software, "training": _training},
}

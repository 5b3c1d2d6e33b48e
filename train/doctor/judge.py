"""What is wrong with a machine, as far as training goes, and what to do: pure functions of what was found."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from train.doctor.examined import Examined

Level = Literal["broken", "warning", "note"]

_GB = 1e9
# With less, NCCL's exchanges within a machine and Ray's objects do not fit.
_LEAST_SHM = 1 << 30
_LEAST_FREE = 2 * _GB
_SLOW_READ = 100e6
_SLOW_PIECE_MS = 10.0
_TAKEN_SHARE = 0.1
_LEAST_TORCH = (2, 11)


_MOUNT = "check the mount and its permissions"
# By words of the problem, the first that fits.
_DISK_PROBLEMS: tuple[tuple[str, Level, str], ...] = (
    ("cannot be read: Permission denied", "broken", "give this user access to it"),
    ("cannot be read", "broken", _MOUNT),
    ("no answer", "broken", _MOUNT),
    ("no shard", "note", "run prep chunk first"),
    ("too small", "note", "nothing to do: a speed needs a shard of 128 KiB"),
    (
        "space is left",
        "warning",
        "make room, have the quota or the number of inodes raised, or write runs elsewhere (--out)",
    ),
    ("", "note", _MOUNT),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        level: broken: training stops, or cannot begin; warning: it is slower or other than it could be; note: worth
            knowing, and nothing to do about it.
    """

    level: Level
    what: str
    hint: str


def judge(examined: Examined) -> list[Finding]:
    """All findings, what stops training first."""
    order: tuple[Level, ...] = ("broken", "warning", "note")
    found = [finding for rule in _RULES for finding in rule(examined)]
    return sorted(found, key=lambda finding: order.index(finding.level))


def _torch(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    if accelerator.torch_error is not None:
        yield Finding(
            level="broken",
            what=f"torch cannot be used: {accelerator.torch_error}",
            hint="install the extra `train` again; where a GPU does not answer, see what nvidia-smi says",
        )
    elif accelerator.torch is not None and _numbers(accelerator.torch)[:2] < _LEAST_TORCH:
        yield Finding(
            level="warning",
            what=f"torch {accelerator.torch} is older than any that clipmill is tested with",
            hint="install torch 2.11 or newer",
        )


def _gpu(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    if accelerator.gpus or accelerator.torch_error is not None:
        return
    level: Level = "broken" if examined.asked_device == "cuda" else "warning"
    has_driver = accelerator.driver is not None or accelerator.driver_cuda is not None
    if examined.asked_device == "cpu":
        return
    if has_driver and accelerator.torch_cuda is None:
        yield Finding(
            level=level,
            what=f"this machine has an NVIDIA driver, and torch {accelerator.torch} was built without CUDA",
            hint="install a build of torch with CUDA; until then training runs on the CPU",
        )
    elif accelerator.driver_cuda and accelerator.driver_cuda[0] < _numbers(accelerator.torch_cuda or "0")[0]:
        had = ".".join(map(str, accelerator.driver_cuda))
        yield Finding(
            level=level,
            what=f"the NVIDIA driver supports CUDA {had}, and torch {accelerator.torch} needs {accelerator.torch_cuda}",
            hint=f"update the driver, or install a torch that was built for CUDA {accelerator.driver_cuda[0]}",
        )
    elif has_driver:
        yield Finding(
            level=level,
            what=f"there is an NVIDIA driver, and torch finds no GPU: {accelerator.cuda_error or 'none is visible'}",
            hint="check CUDA_VISIBLE_DEVICES, and that the container was started with its GPUs (--gpus all)",
        )
    elif examined.asked_device == "cuda":
        yield Finding(
            level="broken",
            what="there is no GPU here (asked for by --device cuda): no NVIDIA driver was found",
            hint="use --device cpu, or another machine",
        )


def _gpu_in_use(examined: Examined) -> Iterator[Finding]:
    if examined.asked_device == "cpu":
        return
    for number, gpu in enumerate(examined.accelerator.gpus):
        taken = 0 if gpu.free_bytes is None else gpu.memory_bytes - gpu.free_bytes
        if taken > max(_TAKEN_SHARE * gpu.memory_bytes, 2 * _GB):
            yield Finding(
                level="warning",
                what=f"{taken / _GB:.0f} of the {gpu.memory_bytes / _GB:.0f} GB of GPU {number} are in use already",
                hint="nvidia-smi lists the processes; CUDA_VISIBLE_DEVICES chooses another GPU",
            )
    names = {gpu.name for gpu in examined.accelerator.gpus}
    if len(names) > 1:
        yield Finding(
            level="warning",
            what=f"the GPUs differ ({', '.join(sorted(names))}): every step waits for the slowest",
            hint="choose like ones by CUDA_VISIBLE_DEVICES",
        )


def _attention(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    works = {one.attention for one in accelerator.tried if not one.error}
    for one in accelerator.tried:
        if not one.error:
            continue
        is_last = one.attention == "sdpa"
        yield Finding(
            level="broken" if is_last else "warning",
            what=f"attention by {one.attention} fails for {one.kind} in {one.dtype}: {one.error}",
            hint="torch does not suit this GPU: install a build for it"
            if is_last
            else f"--attention auto does without it; {', '.join(sorted(works)) or 'nothing'} works",
        )
    for one in accelerator.tried:
        if accelerator.gpus and one.attention == "sdpa" and "math" in one.kernels:
            yield Finding(
                level="warning",
                what=f"SDPA has no fused kernel for {one.kind} in {one.dtype} here, and keeps all scores in memory",
                hint="install a torch that was built for this GPU",
            )


def _xformers(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    if accelerator.xformers == "not loaded":
        yield Finding(
            level="warning",
            what=f"xformers is installed and cannot be loaded: {accelerator.xformers_library}",
            hint="training does without it; see docs/models.md for pairs of torch and xformers that work",
        )
    elif accelerator.xformers_library is not None:
        yield Finding(
            level="note",
            what=f"xformers {accelerator.xformers} cannot load its own library: {accelerator.xformers_library}",
            hint="nothing to do: that library has no attention kernels; the ones that work are above (docs/models.md)",
        )


def _cores(examined: Examined) -> Iterator[Finding]:
    host = examined.host
    cores = min(host.allowed_cores, host.quota_cores or host.allowed_cores)
    if host.quota_cores is not None and host.quota_cores < host.allowed_cores:
        yield Finding(
            level="warning",
            what=f"{host.allowed_cores} cores are visible, and the cgroup allows the time of {host.quota_cores:g}",
            hint=f"torch starts a thread for each visible core: set OMP_NUM_THREADS={max(1, int(host.quota_cores))}",
        )
    value = host.thread_variables.get("OMP_NUM_THREADS", "").strip()
    num_threads = _num_threads(value)
    on_cpu = examined.asked_device == "cpu" or not examined.accelerator.gpus
    if num_threads is None:
        if value:
            yield Finding(
                level="warning",
                what=f"OMP_NUM_THREADS is {value!r}, which is no number of threads from 1: it has no effect",
                hint="set it to a number, or unset it",
            )
    elif num_threads > cores:
        yield Finding(
            level="warning",
            what=f"OMP_NUM_THREADS is {value}, more than the {cores:g} cores that there are",
            hint="unset it",
        )
    elif on_cpu and num_threads < cores // 2 + cores % 2:
        yield Finding(
            level="warning",
            what=f"OMP_NUM_THREADS is {value}, and training on this CPU could use {cores:g} cores",
            hint="unset it, unless several processes share the machine",
        )


def _num_threads(value: str) -> int | None:
    """The threads of "4", or of "4,2" (by level of nesting); None of what OpenMP leaves aside (0, words, nothing)."""
    first = value.split(",")[0].strip()
    return int(first) if re.fullmatch(r"[0-9]{1,9}", first) and int(first) else None


def _shared_memory(examined: Examined) -> Iterator[Finding]:
    size = examined.host.shm_bytes
    if size is not None and size < _LEAST_SHM and len(examined.accelerator.gpus) > 1:
        yield Finding(
            level="warning",
            what=f"/dev/shm has {size / 1e6:.0f} MB, through which the processes of several GPUs exchange data (NCCL)",
            hint="start the container with --shm-size 8g or --ipc host",
        )


def _decoder(examined: Examined) -> Iterator[Finding]:
    decoder = examined.decoder
    if decoder.error is not None:
        yield Finding(
            level="broken", what=f"PyAV cannot be used: {decoder.error}", hint="install it: clips are decoded by it"
        )
    elif decoder.missing:
        yield Finding(
            level="broken" if "h264" in decoder.missing else "warning",
            what=f"PyAV {decoder.pyav} lacks decoders of {', '.join(decoder.missing)}",
            hint="install PyAV from its wheel, which has them; chunks of other codecs can be read",
        )


def _disk(examined: Examined) -> Iterator[Finding]:
    disk = examined.disk
    if disk is None:
        return
    if disk.kind == "network":
        yield Finding(
            level="warning",
            what=f"{disk.path} lies on a network file system ({disk.file_system}): each clip waits for its server",
            hint="copy the data to a local disk, or see with train bench whether it keeps up",
        )
    is_full = False
    if disk.free_bytes is not None and disk.free_bytes < _LEAST_FREE:
        is_full = True
        yield Finding(
            level="warning",
            what=f"{disk.path} has {disk.free_bytes / _GB:.1f} GB left; checkpoints of ViT-B take 1.8 GB each",
            hint="make room, or write runs elsewhere (--out)",
        )
    if disk.problem is not None:
        for words, level, hint in _DISK_PROBLEMS:
            if words in disk.problem:
                # Of a lack of space that the warning above does not tell already.
                if not (is_full and words == "space is left"):
                    yield Finding(level=level, what=f"{disk.path}: {disk.problem}", hint=hint)
                break
    # What came from memory says nothing of the disk.
    if disk.cached is False and disk.read_bytes_per_s is not None and disk.read_bytes_per_s < _SLOW_READ:
        yield Finding(
            level="warning",
            what=f"{disk.path} is read at {disk.read_bytes_per_s / 1e6:.0f} MB/s",
            hint="use a faster disk, or see with train bench whether it keeps up",
        )
    if disk.cached is False and disk.piece_ms is not None and disk.piece_ms > _SLOW_PIECE_MS:
        yield Finding(
            level="warning",
            what=f"64 KiB somewhere on {disk.path} take {disk.piece_ms:.0f} ms; clips are read in such pieces",
            hint="use a faster disk, or more --workers",
        )


def _compile(examined: Examined) -> Iterator[Finding]:
    if examined.host.compiler is None:
        yield Finding(
            level="note", what="--compile cannot be used: there is no C compiler", hint="install gcc, or set CC"
        )
    elif examined.accelerator.gpus and not examined.accelerator.has_triton:
        yield Finding(
            level="note", what="--compile cannot be used on the GPU: triton is not installed", hint="install triton"
        )


_RULES: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    *(_torch, _gpu, _gpu_in_use, _attention, _xformers, _cores, _shared_memory, _decoder, _disk, _compile),
)


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 15) of "2.15.0+cu132"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) or (0,)

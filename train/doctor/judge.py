"""What is wrong with a machine and what to do about it: pure functions of what was found."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from clipmill.train.doctor.examined import Examined

Level = Literal["broken", "warning", "note"]
_LEVELS: tuple[Level, ...] = ("broken", "warning", "note")

_GB = 1e9
_MIN_SHM = 1 << 30  # NCCL's buffers within a machine and Ray's objects need more
_MIN_FREE = 2 * _GB
_SLOW_READ = 100e6
_SLOW_PIECE_MS = 10.0
_TAKEN_SHARE = 0.1
_MIN_TORCH = (2, 11)
_CHECK_MOUNT = "check the mount and its permissions"
_MAKE_ROOM = "free some space, have the quota or the number of inodes raised, or write runs elsewhere (--out)"
# Level and hint by words of a disk's problem; the first match counts.
_DISK_PROBLEMS: tuple[tuple[str, Level, str], ...] = (
    ("cannot be read: Permission denied", "broken", "give this user access to it"),
    ("cannot be read", "broken", _CHECK_MOUNT),
    ("no answer", "broken", _CHECK_MOUNT),
    ("no shard", "note", "run prep chunk first"),
    ("too small", "note", "nothing to do: measuring needs a shard of at least 128 KiB"),
    ("space is left", "warning", _MAKE_ROOM),
    ("", "note", _CHECK_MOUNT),
)


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        level: broken: training cannot start or stops; warning: training is slower or different than it could be; note:
            for information.
    """

    level: Level
    what: str
    hint: str


_broken, _warning, _note = (partial(Finding, level) for level in _LEVELS)


def judge(examined: Examined) -> list[Finding]:
    """All findings, the most severe first."""
    found = [finding for rule in _RULES for finding in rule(examined)]
    return sorted(found, key=lambda finding: _LEVELS.index(finding.level))


def _torch(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    if accelerator.torch_error is not None:
        yield _broken(
            f"torch cannot be used: {accelerator.torch_error}",
            "reinstall the extra `train`; if a GPU does not respond, check nvidia-smi",
        )
    elif accelerator.torch is not None and _major_minor(accelerator.torch) < _MIN_TORCH:
        yield _warning(
            f"torch {accelerator.torch} is older than any version that clipmill is tested with",
            "install torch 2.11 or newer",
        )


def _gpu(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    if accelerator.gpus or accelerator.torch_error is not None or examined.asked_device == "cpu":
        return
    finding = _broken if examined.asked_device == "cuda" else _warning
    has_driver = accelerator.driver is not None or accelerator.driver_cuda is not None
    if has_driver and accelerator.torch_cuda is None:
        yield finding(
            f"this machine has an NVIDIA driver, but torch {accelerator.torch} was built without CUDA",
            "install a build of torch with CUDA; until then training runs on the CPU",
        )
    elif accelerator.driver_cuda and accelerator.driver_cuda[0] < _major_minor(accelerator.torch_cuda or "0")[0]:
        had = ".".join(map(str, accelerator.driver_cuda))
        yield finding(
            f"the NVIDIA driver supports CUDA {had}, but torch {accelerator.torch} needs {accelerator.torch_cuda}",
            f"update the driver, or install a torch built for CUDA {accelerator.driver_cuda[0]}",
        )
    elif has_driver:
        yield finding(
            f"there is an NVIDIA driver, but torch finds no GPU: {accelerator.cuda_error or 'none is visible'}",
            "check CUDA_VISIBLE_DEVICES, and that the container was started with its GPUs (--gpus all)",
        )
    elif examined.asked_device == "cuda":
        yield _broken(
            "there is no GPU here (asked for by --device cuda): no NVIDIA driver was found",
            "use --device cpu, or another machine",
        )


def _gpu_in_use(examined: Examined) -> Iterator[Finding]:
    if examined.asked_device == "cpu":
        return
    for index, gpu in enumerate(examined.accelerator.gpus):
        taken = 0 if gpu.free_bytes is None else gpu.memory_bytes - gpu.free_bytes
        if taken > max(_TAKEN_SHARE * gpu.memory_bytes, 2 * _GB):
            yield _warning(
                f"{taken / _GB:.0f} of the {gpu.memory_bytes / _GB:.0f} GB of GPU {index} are in use already",
                "nvidia-smi lists the processes; CUDA_VISIBLE_DEVICES selects another GPU",
            )
    names = sorted({gpu.name for gpu in examined.accelerator.gpus})
    if len(names) > 1:
        yield _warning(
            f"the GPUs differ ({', '.join(names)}): every step waits for the slowest",
            "select equal GPUs with CUDA_VISIBLE_DEVICES",
        )


def _attention(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    working = sorted({one.attention for one in accelerator.tried if not one.error})
    for one in accelerator.tried:
        if one.error:
            what = f"attention by {one.attention} fails for {one.kind} in {one.dtype}: {one.error}"
            if one.attention == "sdpa":
                yield _broken(what, "torch does not support this GPU: install a build that does")
            else:
                yield _warning(what, f"--attention auto ignores it; {', '.join(working) or 'nothing'} works")
        elif accelerator.gpus and one.attention == "sdpa" and "math" in one.kernels:
            yield _warning(
                f"SDPA has no fused kernel for {one.kind} in {one.dtype} here, and keeps all scores in memory",
                "install a torch that was built for this GPU",
            )


def _xformers(examined: Examined) -> Iterator[Finding]:
    accelerator = examined.accelerator
    if accelerator.xformers == "not loaded":
        yield _warning(
            f"xformers is installed but cannot be loaded: {accelerator.xformers_library}",
            "training works without it; docs/models.md has versions of torch and xformers that match",
        )


def _cores(examined: Examined) -> Iterator[Finding]:
    host = examined.host
    cores = min(host.allowed_cores, host.quota_cores or host.allowed_cores)
    if host.quota_cores is not None and host.quota_cores < host.allowed_cores:
        yield _warning(
            f"{host.allowed_cores} cores are visible, but the cgroup allows the time of {host.quota_cores:g}",
            f"torch starts a thread per visible core: set OMP_NUM_THREADS={max(1, int(host.quota_cores))}",
        )
    value = host.thread_variables.get("OMP_NUM_THREADS", "").strip()
    num_threads = _num_threads(value)
    is_on_cpu = examined.asked_device == "cpu" or not examined.accelerator.gpus
    if num_threads is None:
        if value:
            yield _warning(
                f"OMP_NUM_THREADS is {value!r}, which is no positive number of threads: it has no effect",
                "set it to a number, or unset it",
            )
    elif num_threads > cores:
        yield _warning(f"OMP_NUM_THREADS is {value}, more than the {cores:g} available cores", "unset it")
    elif is_on_cpu and num_threads < cores // 2 + cores % 2:
        yield _warning(
            f"OMP_NUM_THREADS is {value}, but training on this CPU could use {cores:g} cores",
            "unset it, unless several processes share the machine",
        )


def _num_threads(value: str) -> int | None:
    """Threads of "4", or of "4,2" (nesting levels); None for what OpenMP ignores (0, words, nothing)."""
    first = value.split(",")[0].strip()
    return int(first) if re.fullmatch(r"[0-9]{1,9}", first) and int(first) else None


def _shared_memory(examined: Examined) -> Iterator[Finding]:
    size = examined.host.shm_bytes
    if size is not None and size < _MIN_SHM and len(examined.accelerator.gpus) > 1:
        yield _warning(
            f"/dev/shm has {size / 1e6:.0f} MB, through which the processes of several GPUs exchange data (NCCL)",
            "start the container with --shm-size 8g or --ipc host",
        )


def _decoder(examined: Examined) -> Iterator[Finding]:
    decoder = examined.decoder
    if decoder.error is not None:
        yield _broken(f"PyAV cannot be used: {decoder.error}", "install it: clips are decoded with it")
    elif decoder.missing:
        yield (_broken if "h264" in decoder.missing else _warning)(
            f"PyAV {decoder.pyav} lacks decoders of {', '.join(decoder.missing)}",
            "install PyAV from its wheel, which has them; chunks of other codecs can be read",
        )


def _disk(examined: Examined) -> Iterator[Finding]:
    disk = examined.disk
    if disk is None:
        return
    if disk.kind == "network":
        yield _warning(
            f"{disk.path} is on a network file system ({disk.file_system}): each clip waits for its server",
            "copy the data to a local disk, or check with train bench whether it keeps up",
        )
    free_bytes = _MIN_FREE if disk.free_bytes is None else disk.free_bytes
    is_full = free_bytes < _MIN_FREE
    if is_full:
        yield _warning(
            f"{disk.path} has {free_bytes / _GB:.1f} GB left; checkpoints of ViT-B take 1.8 GB each",
            "free some space, or write runs elsewhere (--out)",
        )
    if disk.problem is not None:
        words, level, hint = next(row for row in _DISK_PROBLEMS if row[0] in disk.problem)
        # The warning above already covers a lack of space.
        if not (is_full and words == "space is left"):
            yield Finding(level, f"{disk.path}: {disk.problem}", hint)
    speed = disk.speed
    if speed is None or speed.cached is not False:  # reads from the page cache say nothing about the disk
        return
    if speed.read_bytes_per_s < _SLOW_READ:
        yield _warning(
            f"{disk.path} is read at {speed.read_bytes_per_s / 1e6:.0f} MB/s",
            "use a faster disk, or check with train bench whether it keeps up",
        )
    if speed.piece_ms > _SLOW_PIECE_MS:
        yield _warning(
            f"random reads of 64 KiB from {disk.path} take {speed.piece_ms:.0f} ms; clips are read in such pieces",
            "use a faster disk, or more --workers",
        )


def _compile(examined: Examined) -> Iterator[Finding]:
    if examined.host.compiler is None:
        yield _note("--compile cannot be used: there is no C compiler", "install gcc, or set CC")
    elif examined.accelerator.gpus and not examined.accelerator.has_triton:
        yield _note("--compile cannot be used on the GPU: triton is not installed", "install triton")


_RULES: tuple[Callable[[Examined], Iterator[Finding]], ...] = (
    *(_torch, _gpu, _gpu_in_use, _attention, _xformers, _cores, _shared_memory, _decoder, _disk, _compile),
)


def _major_minor(version: str) -> tuple[int, ...]:
    """(2, 15) of "2.15.0+cu132"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) or (0,)

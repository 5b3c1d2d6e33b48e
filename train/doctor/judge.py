"""What is wrong with a machine and what to do about it: pure functions of what was found."""

import re
from collections.abc import Callable, Iterator
from functools import partial

from clipmill.manifests.formatting import count_noun, size_text
from clipmill.train.doctor.examined import Examined
from clipmill.train.doctor.host import LEVELS, Finding

_GB = 1e9
_MIN_SHM = 1 << 30  # NCCL's buffers within a machine and Ray's objects need more
_MIN_FREE = 2 * _GB
_SLOW_READ = 100e6
_SLOW_PIECE_MS = 10.0
_TAKEN_SHARE = 0.1
_FASTER_DISK = "use a faster disk, or check with train bench whether it keeps up"

_broken, _warning, _note = (partial(Finding, level) for level in LEVELS)


def judge(examined: Examined) -> list[Finding]:
    """All findings, the most severe first."""
    found = [finding for rule in _RULES for finding in rule(examined)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _torch(examined: Examined) -> Iterator[Finding]:
    if (error := examined.accelerator.torch_error) is not None:
        yield _broken(
            f"torch cannot be used: {error}", "reinstall the extra `train`; if a GPU does not respond, check nvidia-smi"
        )


def _gpu(examined: Examined) -> Iterator[Finding]:
    from clipmill.train.device.driver import is_older

    accelerator = examined.accelerator
    if accelerator.gpus or accelerator.torch_error is not None or examined.asked_device == "cpu":
        return
    finding = _broken if examined.asked_device == "cuda" else _warning
    if accelerator.driver is None and accelerator.unusable_gpu is not None:
        yield finding(
            f"the GPU of this machine cannot be used: {accelerator.unusable_gpu}",
            "install the NVIDIA driver; until then training runs on the CPU",
        )
    elif accelerator.driver is None:
        if examined.asked_device == "cuda":
            yield _broken(
                "there is no GPU here (asked for by --device cuda): no NVIDIA driver was found",
                "use --device cpu, or another machine",
            )
    elif accelerator.torch_cuda is None:
        yield finding(
            f"this machine has an NVIDIA driver, but torch {accelerator.torch} was built without CUDA",
            "install a build of torch with CUDA; until then training runs on the CPU",
        )
    elif accelerator.needed_driver is not None and is_older(accelerator.driver, accelerator.needed_driver):
        yield finding(
            f"the NVIDIA driver ({accelerator.driver}) is older than {accelerator.needed_driver}, which torch "
            f"{accelerator.torch} for CUDA {accelerator.torch_cuda} needs",
            f"update the driver to {accelerator.needed_driver} or later; until then training runs on the CPU",
        )
    else:
        yield finding(
            f"there is an NVIDIA driver ({accelerator.driver}), but torch {accelerator.torch} for CUDA "
            f"{accelerator.torch_cuda} finds no GPU: {accelerator.cuda_error or 'none is visible'}",
            "update a driver that is too old; check CUDA_VISIBLE_DEVICES, and that the container was started with its "
            "GPUs (--gpus all)",
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
            f"the cgroup allows the time of {host.quota_cores:g} of {count_noun(host.allowed_cores, 'visible core')}",
            f"torch starts a thread per visible core: set OMP_NUM_THREADS={max(1, int(host.quota_cores))}",
        )
    value = host.thread_variables.get("OMP_NUM_THREADS", "").strip()
    # "4,2" has nesting levels, and OpenMP ignores what is no number.
    num_threads = int(value.split(",")[0]) if re.fullmatch(r"[1-9][0-9]{0,8}(,.*)?", value) else None
    is_on_cpu = examined.asked_device == "cpu" or not examined.accelerator.gpus
    if num_threads is not None and (num_threads > cores or (is_on_cpu and 2 * num_threads < cores)):
        yield _warning(
            f"OMP_NUM_THREADS is {value}, and {cores:g} cores are available",
            "unset it, unless several processes share the machine",
        )


def _shared_memory(examined: Examined) -> Iterator[Finding]:
    size = examined.host.shm_bytes
    if size is not None and size < _MIN_SHM and len(examined.accelerator.gpus) > 1:
        yield _warning(
            f"/dev/shm has {size_text(size)}, through which the processes of several GPUs exchange data (NCCL)",
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
    if disk.free_bytes is not None and disk.free_bytes < _MIN_FREE:
        yield _warning(
            f"{disk.path} has {disk.free_bytes / _GB:.1f} GB left; checkpoints of ViT-B take 1.8 GB each",
            "free some space, or write runs elsewhere (--out)",
        )
    if disk.problem is not None:
        yield Finding(disk.problem.level, f"{disk.path}: {disk.problem.what}", disk.problem.hint)
    speed = disk.speed
    if speed is None or speed.cached is not False:  # reads from the page cache say nothing about the disk
        return
    if speed.read_bytes_per_s < _SLOW_READ:
        yield _warning(f"{disk.path} is read at {size_text(speed.read_bytes_per_s)}/s", _FASTER_DISK)
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

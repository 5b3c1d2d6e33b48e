"""Everything that is known about a machine, and what training uses of it."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipmill.train.config.training import TrainingSettings
from clipmill.train.doctor.accelerator import Accelerator, ask_child, examine_accelerator
from clipmill.train.doctor.host import Disk, Host, examine_disk, examine_host
from clipmill.train.run.environment import versions

# Decoders of what `prep chunk` writes (clipmill.train.data.decoders), the default's first.
CODECS = ("h264", "hevc", "libdav1d", "vp9", "mjpeg")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """PyAV and its libavcodec, the missing ones of `CODECS`, or the error of importing it."""

    pyav: str | None = None
    libavcodec: str | None = None
    missing: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A machine.

    Attributes:
        asked_device: the value of `--device`.
        disk: disk of the data folder or the current one; None if not examined.
        versions: versions of Python and packages, as on a run's page.
        is_run: examined by a starting run, which reports elsewhere what it uses.
    """

    asked_device: str
    host: Host
    accelerator: Accelerator
    decoder: Decoder
    versions: dict[str, str]
    system: str
    disk: Disk | None = None
    is_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Used:
    """What training uses by default."""

    device: str
    precision: str
    attention: str
    loader_threads: int
    compiles: bool


def examine(*, device: str, shards: Path | None) -> Examined:
    """Examine everything in about 10 seconds, with the disk of `shards` or, if None, of the current folder."""
    disk = examine_disk(shards or Path(), is_data=shards is not None)
    return _examine_parts(device, ask_child(), disk=disk)


def examine_in_run(*, asked_device: str, device_type: str) -> Examined:
    """Examine in this process what takes milliseconds, without measurements or trials, for a run's page."""
    return _examine_parts(asked_device, examine_accelerator(tries=False, has_gpus=device_type == "cuda"), is_run=True)


def _examine_parts(asked_device: str, accelerator: Accelerator, **others: Any) -> Examined:
    libc = " ".join(platform.libc_ver())
    return Examined(
        asked_device=asked_device,
        host=examine_host(),
        accelerator=accelerator,
        decoder=examine_decoder(),
        versions=versions(),
        system=f"{platform.system()} {platform.release()}, {libc or 'libc not known'}",
        **others,
    )


def examine_decoder() -> Decoder:
    """Examine PyAV by creating a decoder for each codec."""
    try:
        import av
    except (ImportError, OSError) as error:
        return Decoder(error=str(error).strip().splitlines()[0])
    missing = []
    for codec in CODECS:
        try:
            av.CodecContext.create(codec, "r")
        except (ValueError, av.FFmpegError):
            missing.append(codec)
    version = ".".join(map(str, av.library_versions.get("libavcodec", ())))
    return Decoder(pyav=av.__version__, libavcodec=version, missing=tuple(missing))


def used_by_training(examined: Examined) -> Used:
    """What training commands select by default on this machine."""
    accelerator = examined.accelerator
    is_cuda = bool(accelerator.gpus) and examined.asked_device != "cpu"
    attention = accelerator.attention if is_cuda else "sdpa"
    if attention == "xformers":
        attention = "xformers, or sdpa for heads and precisions that it has no kernel for"
    return Used(
        device="cuda" if is_cuda else "cpu",
        precision=accelerator.precision if is_cuda else "fp32",
        attention=attention,
        loader_threads=TrainingSettings.workers,
        compiles=examined.host.compiler is not None and (not is_cuda or accelerator.has_triton),
    )


def as_json(examined: Examined) -> dict[str, Any]:
    """Everything as plain values."""
    return {"machine": asdict(examined), "training": asdict(used_by_training(examined))}

"""torch, GPUs, driver and trials of attention, for `train doctor`: all facts that need a process with torch.

As a program (`python -m clipmill.train.doctor.accelerator`), it prints one JSON object. `train doctor` runs it as a
child process with a timeout (`ask_child`), because a damaged driver can hang or kill any process that uses it.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from clipmill.manifests.errors import first_line
from clipmill.train.run.environment import installed_version

_TIMEOUT_S = 180.0
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPU as reported by torch; `free_bytes` is None if it was not queried."""

    name: str
    memory_bytes: int
    free_bytes: int | None
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Trial of an attention backend on the device, with its kernels or its error."""

    attention: str
    kind: str
    dtype: str
    kernels: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Facts about torch and the GPUs.

    Attributes:
        torch_error: Reason why torch cannot be used; all other facts are then unknown.
        torch_cuda: CUDA version that torch was built for; None without CUDA.
        needed_driver: Oldest NVIDIA driver that supports this CUDA version.
        driver: Version of the NVIDIA driver, if there is one.
        cuda_error: Error of torch if it finds no GPU.
        unusable_gpu: Reason why torch cannot use this machine's GPU, as a run prints it; None without such a GPU.
        xformers: Version of xformers, "not installed" or "not loaded".
        xformers_library: Reason why xformers' own compiled library cannot be loaded.
        attention: Name of the backend that `--attention auto` uses on the first GPU; unknown without trials.
        has_triton: True if triton, with which torch.compile generates GPU kernels, is installed.
        environment: Facts for bug reports to PyTorch (torch.utils.collect_env); empty without trials.
    """

    torch_error: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    needed_driver: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    cuda_error: str | None = None
    unusable_gpu: str | None = None
    num_threads: int | None = None
    gpus: list[Gpu] = field(default_factory=list)
    xformers: str = "not installed"
    xformers_library: str | None = None
    has_triton: bool = False
    precision: str = "fp32"
    attention: str = "sdpa"
    tried: list[Tried] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)


def examine_accelerator(*, tries: bool = True, has_gpus: bool = True) -> Accelerator:
    """Examine torch and the GPUs.

    Args:
        tries: True to run each attention backend on the device, and load xformers, which changes torch's settings.
        has_gpus: True to look for GPUs, which initialises CUDA.
    """
    # Imported here, because a run needs it only for its page.
    from clipmill.train.device.driver import driver_version, required_driver, why_no_gpu

    try:
        import torch
    except (ImportError, OSError) as error:
        return Accelerator(torch_error=first_line(error), driver=driver_version())
    from clipmill.train.models.attention_choice import cudnn_version

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "needed_driver": required_driver(torch.version.cuda),
        "driver": driver_version(),
        "num_threads": torch.get_num_threads(),
        "has_triton": find_spec("triton") is not None,
        "xformers": installed_version("xformers"),
    }
    if has_gpus:
        try:
            torch.cuda.init()
            facts["gpus"] = [_gpu(index, queries_free=tries) for index in range(torch.cuda.device_count())]
            facts["cudnn"] = cudnn_version()
        except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
            facts |= {"cuda_error": first_line(error), "unusable_gpu": why_no_gpu()}
    if tries:
        from torch.utils.collect_env import get_env_info

        from clipmill.train.device.precision import open_precision
        from clipmill.train.models.attention_choice import FASTEST

        try:
            facts["environment"] = get_env_info()._asdict()
        except (OSError, RuntimeError, AttributeError) as error:  # collect_env runs programs, which may fail
            facts["environment"] = {"error": first_line(error)}
        device_type = "cuda" if facts.get("gpus") else "cpu"
        precision = open_precision("auto", device_type=device_type)
        facts |= {"precision": precision.name, **_xformers()}
        has_xformers = facts["xformers"] not in ("not installed", "not loaded")
        if facts.get("gpus"):
            facts["attention"] = FASTEST.get(facts["gpus"][0].capability, "xformers" if has_xformers else "sdpa")
        names = ["sdpa", *(["xformers"] if has_xformers else []), "cudnn", "flash"] if facts.get("gpus") else ["sdpa"]
        kinds = ("clips", "packed captions")
        facts["tried"] = [_try_attention(name, kind, precision.name, device_type) for name in names for kind in kinds]
    return Accelerator(**facts)


def accelerator_of(values: dict[str, Any]) -> Accelerator:
    """Convert JSON values to an `Accelerator`."""
    gpus = [Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in values["gpus"]]
    tried = [Tried(**trial) for trial in values["tried"]]
    return Accelerator(**{**values, "gpus": gpus, "tried": tried})


def _gpu(index: int, *, queries_free: bool) -> Gpu:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    # The query creates a context of several hundred megabytes on the GPU, which a run on another GPU must not do.
    free_bytes = torch.cuda.mem_get_info(index)[0] if queries_free else None
    return Gpu(name=gpu.name, memory_bytes=gpu.total_memory, free_bytes=free_bytes, capability=(gpu.major, gpu.minor))


def _xformers() -> dict[str, Any]:
    from clipmill.train.models.attention import load_xformers

    if find_spec("xformers") is None:
        return {}
    try:
        return {"xformers_library": load_xformers()}
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # unsupported version of torch
        return {"xformers": "not loaded", "xformers_library": first_line(error)}


def _try_attention(name: str, kind: str, precision: str, device_type: str) -> Tried:
    """Run forward and backward passes of attention for clips, or for packed captions."""
    import torch

    from clipmill.train.models.attention import open_attention, pack
    from clipmill.train.models.attention_choice import kernels_of

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    device, is_packed = torch.device(device_type), kind != "clips"
    lengths = (12, 9, 17, 26)
    tried = {"attention": name, "kind": kind, "dtype": str(dtype).removeprefix("torch.")}
    try:
        attend = open_attention(name, device_type=device_type).attend  # type: ignore[arg-type]
        packing = pack(lengths, device=device) if is_packed else None
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, sum(lengths), 3, 4, 64) if is_packed else (2, 197, 3, 4, 64)
        qkv = torch.randn(shape, dtype=dtype, device=device, generator=generator, requires_grad=True)
        out = attend(*qkv.unbind(2), causal=is_packed, packing=packing)
        out.sum().backward()
        if qkv.grad is None or not bool(qkv.grad.isfinite().all()):
            return Tried(**tried, error="the gradients are not finite")
        return Tried(**tried, kernels=str(kernels_of(name, *qkv.unbind(2), causal=is_packed, packing=packing)))
    # Versions of libraries may not fit together.
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        return Tried(**tried, error=first_line(error))


def ask_child(*, timeout_s: float = _TIMEOUT_S, module: str = "clipmill.train.doctor.accelerator") -> Accelerator:
    """Examine torch in a child process. If the child hangs or crashes, `torch_error` states that."""
    from clipmill.train.device.driver import driver_version

    command, pipe = [sys.executable, "-P", "-m", module], subprocess.PIPE
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.communicate(timeout=_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # a driver that does not respond blocks the child in the kernel
        why = f"torch and the GPU did not respond within {timeout_s:.0f} s"
    else:
        try:
            return accelerator_of(json.loads(printed))
        except (ValueError, KeyError, TypeError):
            lines = errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            why = f"the process that tests torch and attention ended with {process.returncode}: {lines[-1]}"
    return Accelerator(torch_error=why, driver=driver_version())


def _main() -> None:
    # Redirect the output of libraries to standard error, so that standard output contains only the JSON object.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(asdict(examine_accelerator()), output)
    output.flush()
    # Libraries of a damaged driver can also hang at exit.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()

"""The environment of the tests: equal on every machine, whatever its user has set.

A machine may have an old ffmpeg on PATH, a private umask, another language, a proxy, credentials of a cloud, a cluster
of Ray, or the variables of a job of SLURM. Tests that are about such a setting make it themselves.
"""

import os
import re
import sys
from types import ModuleType
from typing import Any

import imageio_ffmpeg

UMASK = 0o022
LOCALE = "C.UTF-8"
# What the product tells its own processes, which may import the tests: the time when GPU tests have to end, and the
# number of threads of a worker.
_KEPT = frozenset({"CLIPMILL_GPU_ENDS", "CLIPMILL_WORKER_THREADS"})
_SETTINGS = re.compile(
    r"(AWS|AZURE|GOOGLE|S3|RAY|CLIPMILL|HF|HUGGINGFACE|TRANSFORMERS|DIFFUSERS|OPENAI|WANDB|TORCH|TORCHELASTIC"
    r"|TORCHINDUCTOR|NCCL|GLOO|SLURM|XDG|LC)_.*"
    r"|(.*_)?PROXY|LANG|LANGUAGE|(NO|FORCE|CLI)_?COLOR(_FORCE)?|COLUMNS|LINES|PYTHONWARNINGS|PYTHONDONTWRITEBYTECODE"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)",
    re.IGNORECASE,
)


def fix_environment() -> None:
    """Remove the settings of the user from this process, and set what the tests rely on."""
    for name in [name for name in os.environ if _SETTINGS.fullmatch(name) and name not in _KEPT]:
        del os.environ[name]
    # Processes of several tests share the cores: threads of numpy and torch that wait for each other would keep them
    # busy. Where a command starts several threads by itself, they sleep while they wait.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ |= {"LANG": LOCALE, "CLIPMILL_FFMPEG": imageio_ffmpeg.get_ffmpeg_exe()}
    os.environ["CLIPMILL_ALLOWED_HOSTS"] = "127.0.0.1"  # tables of tests name web servers of this machine
    os.umask(UMASK)


def leave_wandb_out_of_timm() -> None:
    """timm imports wandb, which takes longer than timm itself, for functions that nothing here calls."""
    summary: Any = ModuleType("timm.utils.summary")
    summary.get_outdir = summary.update_summary = summary.trim_summary = None
    sys.modules[summary.__name__] = summary

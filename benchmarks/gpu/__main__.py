"""GPU benchmarks: the speed of models and encoders, and of the input pipeline that feeds them.

    python -m benchmarks.gpu --json FILE [--data demo/data] [--minutes 15] [--dry-run]
    python -m benchmarks.gpu --first [--json gpu-first.json] [--minutes 8]

The most important figures are measured first. Each figure is written to FILE before the next one is measured, and all
figures are printed at the end, as a page of Markdown. benchmarks/gpu/README.md describes the methods. --data is a data
folder with captioned chunks, which are repeated to a few thousand clips; `make demo` makes demo/data. --first is for a
machine with a GPU on which clipmill has not run yet (docs/gpu.md); without a data folder, it makes small clips.
--dry-run runs the program with tiny sizes on a CPU; its figures are meaningless.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measurements import Measurement, Result, Setup
from benchmarks.gpu.supervised import is_measuring, run_supervised
from benchmarks.gpu.tables import page_of
from clipmill.manifests.errors import FailedWork, UserError, run_command
from tests.train.classify.moving import write_moving


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of the command line.

    Attributes:
        json: Path of the results.
        data: Data folder.
        minutes: Time limit for all measurements together.
        is_dry_run: True to run with tiny sizes on a CPU.
        is_first: True to run the measurements in `FIRST`.
    """

    json: Path
    data: Path
    minutes: float
    is_dry_run: bool
    is_first: bool = False


def _measure(module: str, function: str, setup: Setup, **options: Any) -> Result:
    """Import the module of a measurement, and run it. A missing dependency thus affects only this measurement."""
    found: Result = getattr(import_module(f"benchmarks.gpu.{module}"), function)(setup, **options)
    return found


def _measurement(name: str, module: str, function: str, *, estimated_s: float, **options: Any) -> Measurement:
    return Measurement(name=name, measure=partial(_measure, module, function, **options), estimated_s=estimated_s)


def _tests(name: str, *files: str, selection: str = "", dry: str, estimated_s: float) -> Measurement:
    given = {"files": files, "selection": selection, "dry": dry}
    return _measurement(name, "first", "measure_tests", estimated_s=estimated_s, **given)


def _preset(*, num_frames: int, keeps_activations: bool) -> Measurement:
    name = f"b16-ego4d, {num_frames} frames{', without checkpointing' if keeps_activations else ''}"
    given = {"num_frames": num_frames, "keeps_activations": keeps_activations}
    return _measurement(name, "first", "measure_preset", estimated_s=40, **given)


# Measurements of --first, which take eight minutes on a machine on which clipmill has not run yet.
FIRST = (
    _measurement("Doctor", "first", "measure_doctor", estimated_s=20),
    _measurement("Attention: equality and speed", "first", "measure_attention", estimated_s=40),
    _tests("Memory that copies may still read", "test_prefetch.py", dry="model_is_slower", estimated_s=40),
    _tests("Where the host waits", "test_host_waits.py", dry="fp16 and sgd", estimated_s=60),
    _tests(
        "A step of every task",
        "test_tasks.py",
        selection="losses_of_a_cpu",
        dry="losses_of_a_cpu and latents",
        estimated_s=90,
    ),
    _tests("Resumption", "test_resuming.py", dry="dual-encoder", estimated_s=60),
    *(_preset(num_frames=num, keeps_activations=keeps) for keeps in (False, True) for num in (4, 16)),
)


# Measurements in order of importance. The times are estimated from FLOPs and from the time of imports and compilation.
MEASUREMENTS = (
    _measurement("ViT-B/16, 4 frames, training step", "speed_vit", "measure_steps", estimated_s=60),
    _measurement("Waiting for data", "feeding_steps", "measure_waits", estimated_s=140),
    _measurement("Attention by shape", "speed_attention", "measure_attention", estimated_s=70),
    _measurement("ViT-B/16, 4 frames, largest batch in 24 GB", "speed_vit", "measure_largest", estimated_s=50),
    _measurement("Loader threads", "feeding_threads", "measure_threads", estimated_s=50),
    _measurement("VideoMAE-B", "speed_towers", "measure_videomae", estimated_s=30),
    _measurement("TimeSformer-B", "speed_towers", "measure_timesformer", estimated_s=35),
    _measurement("Text tower", "speed_towers", "measure_text", estimated_s=30),
    _measurement("Augmentation pass", "feeding_steps", "measure_augmentation", estimated_s=70),
    _measurement("Losses", "speed_outputs", "measure_losses", estimated_s=15),
    _measurement("Decoding", "speed_outputs", "measure_decoding", estimated_s=40),
    _measurement("Encoding latents", "speed_columns", "measure_latents", estimated_s=35),
    _measurement("Latents to the device", "feeding_latents", "measure_latents", estimated_s=60),
    _measurement("ViT-B/16, 4 frames, compiled", "speed_vit", "measure_compiled", estimated_s=60),
    _measurement("Encoding text", "speed_columns", "measure_texts", estimated_s=25),
)


def main() -> None:
    """Run the measurements, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--minutes", type=float, help="time for all measurements (default 15, with --first 8)")
    parser.add_argument("--first", action="store_true", help="check whether and how fast a new machine works")
    parser.add_argument(
        "--data", type=Path, default=Path("demo/data"), metavar="DIR", help="data folder (default demo/data)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    found = parser.parse_args()
    if found.json is None and not found.first:
        parser.error("the following arguments are required: --json")
    minutes = (8.0 if found.first else 15.0) if found.minutes is None else found.minutes
    request = Request(
        json=(found.json or Path("gpu-first.json")).absolute(),
        data=found.data.absolute(),
        minutes=minutes,
        is_dry_run=found.dry_run,
        is_first=found.first,
    )
    run_command(lambda: run(request))


def run(request: Request) -> None:
    """Run the measurements, and print their tables, even after an interruption.

    Raises:
        UserError: A requirement is not met; see `require_possible`.
        FailedWork: A measurement failed.
    """
    require_possible(request)
    logging.getLogger("xformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if request.is_dry_run:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:

        def setup() -> Setup:
            device = torch.device("cpu") if request.is_dry_run else torch.device("cuda", 0)
            data = request.data
            if request.is_first and not data.is_dir():
                data = Path(scratch) / "made"
                data.mkdir()
                write_moving(data)
            return Setup(device=device, is_dry_run=request.is_dry_run, data=data, scratch=Path(scratch))

        try:
            with redirect_stdout(sys.stderr):  # training runs print to stdout, which is reserved for the page
                has_succeeded = run_supervised(
                    FIRST if request.is_first else MEASUREMENTS,
                    setup=setup,
                    is_dry_run=request.is_dry_run,
                    minutes=request.minutes,
                    path=request.json,
                )
        finally:
            if request.json.exists() and not is_measuring():
                print(page_of(request.json), flush=True)
    if not has_succeeded:
        raise FailedWork(f"some measurements failed; the reasons are in {request.json}")


def require_possible(request: Request) -> None:
    """Check the requirements of all measurements.

    Raises:
        UserError: There is no time, no data folder or no GPU, or the path of the results is not writable.
    """
    if not request.minutes > 0:
        raise UserError(
            f"--minutes {request.minutes:g} is out of range", hint="use a number greater than 0 (default 15)"
        )
    if not request.data.is_dir() and not request.is_first:
        raise UserError(
            f"the data folder {request.data} does not exist",
            hint="use --data with a data folder made by prep, or make demo/data with `make demo`",
        )
    folder = request.json.parent
    if not folder.is_dir():
        raise UserError(f"the folder {folder} for {request.json.name} does not exist", hint="create it first")
    if request.json.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{request.json} cannot be written", hint="use another file with --json")
    # is_available does not open the GPU, so that only the measuring process uses it.
    if not request.is_dry_run and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} finds no GPU",
            hint="run `nvidia-smi` to check the driver; --dry-run runs the same program on a CPU, at tiny sizes",
        )


if __name__ == "__main__":
    main()

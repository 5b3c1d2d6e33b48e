"""Whether the input pipeline keeps a fast GPU busy: the whole path from tars to weights, within some minutes.

    python -m benchmarks.gpu.feeding --json FILE --data DIR [--minutes 9] [--dry-run]

The most important figures come first. How they come about is in benchmarks/gpu/README.md; `python -m
benchmarks.gpu.tables` makes a page of FILE. --data is a data folder with captioned chunks, which are repeated to a few
thousand clips. --dry-run goes the same ways at tiny sizes on a CPU: its figures mean nothing.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.parts import Measurement, Result, Setup
from benchmarks.gpu.supervised import run_supervised

if TYPE_CHECKING:
    from benchmarks.gpu.feeding_server import LoaderServer


class _Feeding:
    """The measurements, and the process that loads for some of them."""

    def __init__(self) -> None:
        self.server: LoaderServer | None = None

    def start(self, scratch: Path) -> "LoaderServer":
        """Forks that process: before CUDA is touched, and while this one has a single thread."""
        from benchmarks.gpu.feeding_data import repeated_folder
        from benchmarks.gpu.feeding_server import LoaderServer

        self.server = LoaderServer(repeated_folder(scratch))
        return self.server

    def measurements(self) -> list[Measurement]:
        """In order of importance. Their times are estimates: a GPU machine has not measured them yet."""
        return [
            Measurement(name="Loader: threads and processes", measure=self._threads, estimated_s=110),
            Measurement(name="Waiting for data", measure=partial(_take, "steps", "measure_waits"), estimated_s=140),
            Measurement(name="Interpreter lock", measure=self._lock, estimated_s=20),
            Measurement(
                name="Augmentation pass", measure=partial(_take, "steps", "measure_augmentation"), estimated_s=70
            ),
            Measurement(
                name="Latents to the device", measure=partial(_take, "latents", "measure_latents"), estimated_s=60
            ),
            Measurement(name="Packing captions", measure=partial(_take, "text", "measure_text"), estimated_s=30),
            Measurement(name="MJPEG by nvJPEG", measure=partial(_take, "nvjpeg", "measure_nvjpeg"), estimated_s=70),
        ]

    def _threads(self, setup: Setup) -> Result:
        from benchmarks.gpu.feeding_threads import measure_threads

        assert self.server is not None
        return measure_threads(setup, self.server)

    def _lock(self, setup: Setup) -> Result:
        from benchmarks.gpu.feeding_threads import measure_lock

        assert self.server is not None
        return measure_lock(setup, self.server)


def _take(module: str, function: str, setup: Setup) -> Result:
    """Takes a measurement whose file is imported now: what is not installed costs that one only."""
    from importlib import import_module

    found: Result = getattr(import_module(f"benchmarks.gpu.feeding_{module}"), function)(setup)
    return found


def main() -> int:
    """Measures; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the figures go")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all measurements (default 9)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="data folder to load from")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    arguments = parser.parse_args()
    is_dry_run: bool = arguments.dry_run
    logging.getLogger("xformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    feeding = _Feeding()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def setup() -> Setup:
            stack.enter_context(closing(feeding.start(scratch)))
            device = torch.device("cpu") if is_dry_run else torch.device("cuda", 0)
            return Setup(device=device, is_dry_run=is_dry_run, data=arguments.data.absolute(), scratch=scratch)

        if is_dry_run:
            torch.set_num_threads(1)
        is_whole = run_supervised(
            "feeding",
            feeding.measurements(),
            setup=setup,
            is_dry_run=is_dry_run,
            minutes=arguments.minutes,
            path=arguments.json,
        )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())

"""Throughput of the input pipeline on a fast GPU, from tars to training steps, measured in a few minutes.

    python -m benchmarks.gpu.feeding --json FILE --data DIR [--minutes 9] [--dry-run]

The most important figures come first. benchmarks/gpu/README.md describes the methods; `python -m
benchmarks.gpu.tables` formats FILE as a page. --data is a data folder with captioned chunks, which are repeated to a
few thousand clips. --dry-run runs the same program with tiny sizes on a CPU; its figures are meaningless.
"""

import tempfile
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.command import Request, run_program
from benchmarks.gpu.parts import Measurement, Result, Setup
from benchmarks.gpu.supervised import run_supervised

if TYPE_CHECKING:
    from benchmarks.gpu.feeding_server import LoaderServer


class _Feeding:
    """The measurements, and the loader process that some of them use."""

    def __init__(self) -> None:
        self.server: LoaderServer | None = None

    def start(self, scratch: Path) -> "LoaderServer":
        """Fork the loader process: before CUDA is initialised, and while this process has a single thread."""
        from benchmarks.gpu.feeding_data import repeated_folder
        from benchmarks.gpu.feeding_server import LoaderServer

        self.server = LoaderServer(repeated_folder(scratch))
        return self.server

    def measurements(self) -> list[Measurement]:
        """Return the measurements in order of importance. Their durations are estimates, not measured on a GPU yet."""
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
    """Run a measurement whose module is imported now, so that a missing dependency affects only this one."""
    from importlib import import_module

    found: Result = getattr(import_module(f"benchmarks.gpu.feeding_{module}"), function)(setup)
    return found


def main() -> None:
    """Run the measurements that the command line asks for."""
    run_program(__doc__, _measure, data_help="data folder to load from")


def _measure(request: Request) -> bool:
    feeding = _Feeding()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def setup() -> Setup:
            stack.enter_context(closing(feeding.start(scratch)))
            return Setup(device=request.device, is_dry_run=request.is_dry_run, data=request.data, scratch=scratch)

        return run_supervised(
            "feeding",
            feeding.measurements(),
            setup=setup,
            is_dry_run=request.is_dry_run,
            minutes=request.minutes,
            path=request.json,
        )


if __name__ == "__main__":
    main()

"""Part C: whether the loader keeps a fast GPU busy, from tars to weights.

    python -m benchmarks.gpu.feeding --json FILE --data DIR [--minutes 9] [--dry-run]

The most important comes first; what there is no time for is left out by name. `--dry-run` goes the same ways on a CPU
at sizes that mean nothing.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.feeding_latents import measure_latents
from benchmarks.gpu.feeding_nvjpeg import measure_nvjpeg
from benchmarks.gpu.feeding_server import LoaderServer
from benchmarks.gpu.feeding_steps import measure_augmentation, measure_waits
from benchmarks.gpu.feeding_text import measure_text
from benchmarks.gpu.feeding_threads import measure_lock, measure_threads, repeated_folder
from benchmarks.gpu.parts import Measurement, Setup, run_part


def main() -> None:
    """Measures and writes the JSON file; the exit status is 1 where a measurement failed."""
    parser = argparse.ArgumentParser(description="Measure the input pipeline of a GPU machine.")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where results are written")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="data folder with chunks and captions")
    parser.add_argument("--minutes", type=float, default=9.0, help="time that the measurements may take (default 9)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU: shows that everything works")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: measure on a machine with a GPU, or give --dry-run")
    with tempfile.TemporaryDirectory(prefix="feeding-") as scratch:
        if arguments.dry_run:
            torch.set_num_threads(1)  # more cost more than such small tensors take
        # Forked now, while this process has no threads and no CUDA context.
        server = LoaderServer(repeated_folder(Path(scratch)))
        try:
            setup = Setup(
                device=torch.device("cpu" if arguments.dry_run else "cuda"),
                is_dry_run=arguments.dry_run,
                data=arguments.data.absolute(),
                scratch=Path(scratch),
            )
            measurements = _measurements(server)
            succeeded = run_part("feeding", measurements, setup=setup, minutes=arguments.minutes, path=arguments.json)
        finally:
            server.close()
    sys.exit(0 if succeeded else 1)


def _measurements(server: LoaderServer) -> list[Measurement]:
    """In order of importance; their times on a GPU machine are 9 minutes together at most."""
    return [
        Measurement(name="loader threads", measure=partial(measure_threads, server=server), estimated_s=100),
        Measurement(name="interpreter lock", measure=partial(measure_lock, server=server), estimated_s=20),
        Measurement(name="waiting for data", measure=measure_waits, estimated_s=150),
        Measurement(name="augmentation pass", measure=measure_augmentation, estimated_s=60),
        Measurement(name="latents to the device", measure=measure_latents, estimated_s=60),
        Measurement(name="packing captions", measure=measure_text, estimated_s=30),
        Measurement(name="MJPEG by nvJPEG", measure=measure_nvjpeg, estimated_s=60),
    ]


if __name__ == "__main__":
    main()

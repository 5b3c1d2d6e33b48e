"""GPU speed of models and encoders, each compared with its peers, in a few minutes.

    python -m benchmarks.gpu.speed --json FILE --data DIR [--minutes 9] [--dry-run]

The most important figures come first. benchmarks/gpu/README.md describes the methods; `python -m
benchmarks.gpu.tables` formats FILE as a page. --data is a data folder with chunks and captions, used for training when
synchronizations are counted. --dry-run runs the same program with tiny sizes on a CPU; its figures are meaningless.
"""

import tempfile
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.command import Request, run_program
from benchmarks.gpu.parts import Measurement, Result, Setup
from benchmarks.gpu.supervised import run_supervised


def _measurement(name: str, module: str, function: str, *, estimated_s: float) -> Measurement:
    """A measurement whose module is imported when it starts, so that a missing dependency affects only this one."""

    def measure(setup: Setup) -> Result:
        found: Result = getattr(import_module(f"benchmarks.gpu.{module}"), function)(setup)
        return found

    return Measurement(name=name, measure=measure, estimated_s=estimated_s)


# Estimated from FLOPs and the duration of imports and compilation, not measured.
MEASUREMENTS = (
    _measurement("ViT-B/16, 4 frames, training step", "speed_vit", "measure_steps", estimated_s=60),
    _measurement("Attention by shape", "speed_attention", "measure_attention", estimated_s=70),
    _measurement("ViT-B/16, 4 frames, largest batch in 24 GB", "speed_vit", "measure_largest", estimated_s=50),
    _measurement("Waits of the host", "speed_waits", "measure_waits", estimated_s=50),
    _measurement("VideoMAE-B", "speed_towers", "measure_videomae", estimated_s=30),
    _measurement("TimeSformer-B", "speed_towers", "measure_timesformer", estimated_s=35),
    _measurement("Text tower", "speed_towers", "measure_text", estimated_s=30),
    _measurement("Losses", "speed_outputs", "measure_losses", estimated_s=15),
    _measurement("Decoding", "speed_outputs", "measure_decoding", estimated_s=40),
    _measurement("Encoding latents", "speed_columns", "measure_latents", estimated_s=35),
    _measurement("ViT-B/16, 4 frames, compiled", "speed_vit", "measure_compiled", estimated_s=60),
    _measurement("Encoding text", "speed_columns", "measure_texts", estimated_s=25),
)


def main() -> None:
    """Run the measurements that the command line asks for."""
    run_program(__doc__, _measure, data_help="data folder to train on")


def _measure(request: Request) -> bool:
    with tempfile.TemporaryDirectory() as scratch:

        def setup() -> Setup:
            return Setup(device=request.device, is_dry_run=request.is_dry_run, data=request.data, scratch=Path(scratch))

        return run_supervised(
            "speed",
            MEASUREMENTS,
            setup=setup,
            is_dry_run=request.is_dry_run,
            minutes=request.minutes,
            path=request.json,
        )


if __name__ == "__main__":
    main()

"""What the benchmarks promise for a GPU, each way beside its peer, within some minutes.

    python -m benchmarks.gpu.speed --json FILE [--minutes 9] [--data DIR] [--dry-run]

The most important figures come first. How they come about is in benchmarks/gpu/README.md; `python -m
benchmarks.gpu.tables` makes a page of FILE. --data is a data folder with chunks and captions, which the count of waits
trains on. --dry-run takes the same ways at tiny sizes on a CPU: its figures mean nothing.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.gpu.parts import Measurement, Setup
from benchmarks.gpu.speed_attention import measure_attention
from benchmarks.gpu.speed_columns import measure_latents, measure_texts
from benchmarks.gpu.speed_outputs import measure_decoding, measure_losses
from benchmarks.gpu.speed_towers import measure_text, measure_timesformer, measure_videomae
from benchmarks.gpu.speed_vit import measure_compiled, measure_largest, measure_steps
from benchmarks.gpu.speed_waits import measure_waits
from benchmarks.gpu.supervised import run_supervised

# Seconds on an H200, estimated from FLOPs and from how long imports and compiling take; 540 in all.
MEASUREMENTS = (
    Measurement(name="ViT-B/16, 4 frames, training step", measure=measure_steps, estimated_s=60),
    Measurement(name="Attention by shape", measure=measure_attention, estimated_s=80),
    Measurement(name="ViT-B/16, 4 frames, largest batch in 24 GB", measure=measure_largest, estimated_s=60),
    Measurement(name="Waits of the host", measure=measure_waits, estimated_s=50),
    Measurement(name="VideoMAE-B", measure=measure_videomae, estimated_s=30),
    Measurement(name="TimeSformer-B", measure=measure_timesformer, estimated_s=35),
    Measurement(name="Text tower", measure=measure_text, estimated_s=30),
    Measurement(name="Losses", measure=measure_losses, estimated_s=15),
    Measurement(name="Decoding", measure=measure_decoding, estimated_s=45),
    Measurement(name="Encoding latents", measure=measure_latents, estimated_s=35),
    Measurement(name="ViT-B/16, 4 frames, compiled", measure=measure_compiled, estimated_s=70),
    Measurement(name="Encoding text", measure=measure_texts, estimated_s=30),
)


def main() -> int:
    """Measures; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the figures go")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all measurements (default 9)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="data folder to train on")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    arguments = parser.parse_args()
    is_dry_run: bool = arguments.dry_run
    logging.getLogger("xformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as scratch:

        def setup() -> Setup:
            device = torch.device("cpu" if is_dry_run else "cuda")
            return Setup(device=device, is_dry_run=is_dry_run, data=arguments.data, scratch=Path(scratch))

        if is_dry_run:
            torch.set_num_threads(1)
        is_whole = run_supervised(
            "speed", MEASUREMENTS, setup=setup, is_dry_run=is_dry_run, minutes=arguments.minutes, path=arguments.json
        )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())

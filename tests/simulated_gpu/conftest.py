"""Tests of `inside` run in a process that has the simulated GPUs; `test_simulation.py` starts it."""

import os

collect_ignore = [] if "SIMULATED_GPUS" in os.environ else ["inside"]

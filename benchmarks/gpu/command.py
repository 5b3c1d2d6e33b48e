"""The command line of parts B and C, and its checks before any measurement."""

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from manifests.errors import FailedWork, UserError, run_command


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command line.

    Attributes:
        json: path of the results.
        data: the data folder.
        minutes: time limit of all measurements together.
        is_dry_run: tiny sizes on a CPU.
    """

    json: Path
    data: Path
    minutes: float
    is_dry_run: bool

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return torch.device("cpu") if self.is_dry_run else torch.device("cuda", 0)


def run_program(description: str | None, measure: Callable[[Request], bool], *, data_help: str) -> NoReturn:
    """Run `measure`, which returns True if everything succeeded, and exit with the corresponding status.

    Args:
        description: for --help.
        data_help: help text of the data folder option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all measurements (default 9)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=data_help)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    found = parser.parse_args()
    request = Request(json=found.json, data=found.data.absolute(), minutes=found.minutes, is_dry_run=found.dry_run)

    def run() -> None:
        require_possible(request)
        logging.getLogger("xformers").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning)
        if request.is_dry_run:
            torch.set_num_threads(1)
        if not measure(request):
            raise FailedWork(f"some measurements failed; {request.json} has the reasons")

    run_command(run)


def require_possible(request: Request) -> None:
    """Check requirements that all measurements share.

    Raises:
        UserError: no time, no data, no GPU, or no writable path for the results.
    """
    if not request.minutes > 0:
        raise UserError(
            f"--minutes {request.minutes:g} is out of range", hint="give a number greater than 0 (default 9)"
        )
    if not request.data.is_dir():
        raise UserError(f"the data folder {request.data} does not exist", hint="give a data folder of prep with --data")
    folder = request.json.absolute().parent
    if not folder.is_dir():
        raise UserError(f"the folder {folder} for {request.json.name} does not exist", hint="create it first")
    if request.json.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{request.json} cannot be written", hint="give another file with --json")
    # Detecting a GPU does not open it, so a measurement process has it to itself.
    if not request.is_dry_run and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} finds no GPU",
            hint="run `nvidia-smi` to check the driver; --dry-run runs the same program on a CPU, at tiny sizes",
        )

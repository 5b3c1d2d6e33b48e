"""Run `train`, or read tars, with a memory limit: `Commands.run("tests.torture.bounded", [MB, WHAT, ...])`.

The limit applies to the growth of the process's address space after all imports.
"""

import importlib
import json
import resource
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import ClipmillError
from clipmill.prep.synthetic import read_frame_number


def main() -> None:
    """Run the command in the arguments: `MB train ...`, or `MB streamed PATTERN`."""
    added_mb, what, *arguments = sys.argv[1:]
    limit = (_kilobytes("VmSize") + (int(added_mb) << 10)) << 10
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if what == "streamed":
        print(json.dumps(_read_tars(*arguments)))
        sys.exit(0)
    program = importlib.import_module(f"{what}.cli")
    sys.argv = [str(program.__file__), *arguments]
    program.main()


def _read_tars(pattern: str) -> dict[str, object]:
    """Read tars as an evaluation does; return the frame numbers that were decoded and the failures, each by key."""
    from tests.train.data.test_streams import SIZE_PX, open_stream

    before_kb = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory of this process
    shown: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    try:
        for loaded in open_stream(pattern).evaluation_batches():
            failed |= {failure.key: f"{failure.reason}: {failure.detail}" for failure in loaded.failed}
            if loaded.batch:
                luma = loaded.batch["video"][:, :, : SIZE_PX**2].unflatten(-1, (SIZE_PX, SIZE_PX)).numpy()
                for key, clip in zip(loaded.batch["key"], luma, strict=True):
                    shown.setdefault(key, []).extend(map(_number, clip))
    except ClipmillError as error:
        return {"refused": str(error)}
    return {"shown": shown, "failed": failed, "added_mb": (_kilobytes("VmHWM") - before_kb) >> 10}


def _number(picture: NDArray[np.uint8]) -> int:
    """Decode the frame number in an image; -1 if it is unreadable."""
    try:
        return read_frame_number(picture)
    except ValueError:
        return -1


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()

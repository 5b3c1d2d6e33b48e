"""A process of `train` loads only the modules of its task and its kind of data. The limits only go down."""

import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.forked import forget, run_forked
from tests.forks import Forks
from tests.imports import count_statements

ROOT = Path(__file__).parents[2]
MAX_MODULES_OF_A_RUN, MAX_STATEMENTS_OF_A_RUN, MAX_MODULES_OF_HELP = 141, 14_586, 60


def _loaded_modules() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "clipmill"]


def _num_statements(names: list[str]) -> int:
    files = [getattr(sys.modules[name], "__file__", None) for name in names]
    return count_statements(Path(file) for file in files if file)


def _run(shards: str, out: str) -> None:
    """Train, and print the number of loaded modules and statements, the tasks, and kinds of data other than clips."""
    flags = "--preset tiny --steps 2 --batch 2 --device cpu --workers 1"
    sys.argv = ["train", "dual-encoder", *flags.split(), "--shards", shards, "--out", out]
    with suppress(SystemExit):
        importlib.import_module("clipmill.train.cli").main()
    names = _loaded_modules()
    tasks = {name.split(".")[3] for name in names if name.startswith("clipmill.train.tasks.")}
    kinds = {kind for kind in ("latents", "image_tars", "video_stream") if f"clipmill.train.data.{kind}" in names}
    print(len(names), _num_statements(names), *sorted(tasks), *kinds, file=sys.stderr)


def test_a_run_loads_what_it_uses(data_dir: Path, tmp_path: Path, forks: Forks) -> None:
    # The process is not forked from this one, which may have torch threads.
    code = f"from {__name__} import _run; _run({str(data_dir)!r}, {str(tmp_path / 'run')!r})"
    program = [str(forks.python()), "-m", "tests.fresh", code]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    num_modules, num_statements, *others = ended.stderr.splitlines()[-1].split()
    assert others == ["dual_encoder"], ended.stderr
    assert 100 < int(num_modules) <= MAX_MODULES_OF_A_RUN
    assert int(num_statements) <= MAX_STATEMENTS_OF_A_RUN


def test_help_loads_few_modules() -> None:
    def run() -> None:
        forget("clipmill")
        sys.argv = ["train", "--help"]
        with suppress(SystemExit):
            importlib.import_module("clipmill.train.cli").main()
        print(len(_loaded_modules()), file=sys.stderr)

    status, output = run_forked(run)
    assert status == 0, output
    assert 30 < int(output.splitlines()[-1]) <= MAX_MODULES_OF_HELP

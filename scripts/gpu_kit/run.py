"""Runs the parts of the kit on a GPU machine, and summarizes the results.

Parts: A tests correctness on the GPU, B measures speed, C measures the input pipeline; all parts by default. Results,
logs and tables are written to OUT. Exit codes: 0 if everything passed, 1 if something failed, 2 if nothing can run on
this machine.
"""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from manifests.errors import FailedWork, UserError, run_command
from scripts.gpu_kit.machine import MISSING, Devices, Package, conflicts, find_devices, find_packages, unpack_missing
from scripts.gpu_kit.parts import GRACE_S, PARTS, Part, Verdict, command_of, run_part
from scripts.gpu_kit.requirements import EVERYTHING, needs_of
from scripts.gpu_kit.signals import stopping

LOG = "run.log"
SITE = "site"
_LEAST_MINUTES = 0.1
_TABLES_LIMIT_S = 60
_GIVE_FOLDER = "give a writable folder for the results"


class Output:
    """Prints lines, and also writes them to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        try:
            with self._path.open("a") as file:
                print(line, file=file)
        except OSError as error:  # a full disk: the lines have at least been printed
            print(f"{self._path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--kit", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("out", type=_folder, metavar="OUT", help="folder for the results")
    parser.add_argument("--part", choices=[part.letter for part in PARTS], help="run only this part")
    parser.add_argument(
        "--minutes", type=float, help="time limit of each part in minutes (default: 4 for A, 9 for B and C)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run at tiny sizes on a CPU, as a test; the figures are meaningless"
    )
    arguments = parser.parse_args()
    if arguments.minutes is not None and not arguments.minutes >= _LEAST_MINUTES:
        parser.error(f"argument --minutes: {arguments.minutes:g} is less than {_LEAST_MINUTES}")
    parts = [part for part in PARTS if arguments.part in (None, part.letter)]

    def run() -> None:
        with stopping():
            run_kit(
                arguments.kit,
                out=arguments.out.resolve(),
                parts=parts,
                minutes=arguments.minutes,
                is_dry_run=arguments.dry_run,
            )

    run_command(run)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("empty; give a folder for the results")
    return Path(text)


def run_kit(kit: Path, *, out: Path, parts: list[Part], minutes: float | None, is_dry_run: bool) -> None:
    """Report packages and GPUs, run the parts, and write the tables.

    Args:
        minutes: time limit of each part; None for its default.

    Raises:
        UserError: `out` cannot be created, there is no GPU, or a package that everything requires is missing.
        FailedWork: a part or the tables failed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        say = Output(out / LOG)
    except FileExistsError:
        raise UserError(f"{out} is not a folder", hint=_GIVE_FOLDER) from None
    except OSError as error:
        raise UserError(f"results cannot be written to {out}: {error.strerror}", hint=_GIVE_FOLDER) from None
    # Outside of OUT, which is copied back, and of the kit, which may be read-only.
    with ExitStack() as stack:
        # Removal is arranged before there is anything to remove: a stop may come at any moment.
        scratch = Path(tempfile.gettempdir(), f"gpu-kit-{secrets.token_hex(8)}")
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        commit = (kit / "checkout" / "COMMIT").read_text().strip()
        say(f"clipmill {commit}, Python {sys.version.split()[0]} ({sys.executable}){', dry run' * is_dry_run}")
        _prepare(kit, site=scratch / SITE, is_dry_run=is_dry_run, say=say)
        checkout = scratch / "checkout"
        shutil.copytree(kit / "checkout", checkout)
        environment = _environment(checkout, scratch=scratch)
        verdicts = []
        for part in parts:
            # A separate copy for each part, so that no part sees files written by another.
            data = scratch / f"data-{part.letter}"
            shutil.copytree(kit / "data", data)
            part_minutes = minutes or part.minutes
            limit_s = 60 * part_minutes + GRACE_S
            command = command_of(part, out=out, data=data, minutes=part_minutes, is_dry_run=is_dry_run)
            say(f"part {part.letter}: at most {part_minutes:g} minutes; log: {out / part.stem}.log")
            verdicts.append(
                run_part(
                    part,
                    command,
                    out=out,
                    limit_s=limit_s,
                    folder=checkout,
                    environment=environment,
                    show=say,
                )
            )
            say(_line(verdicts[-1]))
            shutil.rmtree(data, ignore_errors=True)
        tables = _write_tables(out, checkout=checkout, environment=environment)
    _summarise(verdicts, tables, say=say)


def _prepare(kit: Path, *, site: Path, is_dry_run: bool, say: Output) -> None:
    site.mkdir()
    unpack_missing(sorted((kit / "wheels").glob("*.whl")), site)
    packages = find_packages(needs_of(kit / "checkout" / "pyproject.toml"), site=site)
    devices = find_devices()
    _report_machine(packages, devices, site=site, say=say)
    missing = [one.need.name for one in packages if one.source == MISSING and one.need.loss == EVERYTHING]
    if missing:
        raise UserError(
            f"nothing can run without {', '.join(missing)}",
            hint=f"install it into {sys.executable}, or use another Python with PYTHON=/path/to/python3.12",
        )
    if devices.problem and not is_dry_run:
        raise UserError(
            devices.problem,
            hint="run `nvidia-smi` to check the driver; --dry-run runs the same programs on a CPU, at tiny sizes",
        )


def _report_machine(packages: list[Package], devices: Devices, *, site: Path, say: Output) -> None:
    say(f"{'package':<24}{'version':<18}{'required':<14}source")
    for one in packages:
        say(
            f"{one.need.name:<24}{one.version or '-':<18}{str(one.need.requirement.specifier) or 'any':<14}{one.source}"
        )
    for one in packages:
        if one.problem:
            say(f"warning: {one.problem}")
    for conflict in conflicts(site):
        say(f"warning: {conflict}")
    say(f"GPUs: {', '.join(devices.names) or devices.problem}")


def _environment(checkout: Path, *, scratch: Path) -> dict[str, str]:
    """Return the environment of the parts: package and scratch paths, and none of the user's pytest settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # set by run.sh; the copied checkout may have bytecode
    # The first one is the kit's own checkout, from run.sh.
    paths = [str(checkout), str(scratch / SITE), *kept.pop("PYTHONPATH", "").split(os.pathsep)[1:]]
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }


def _write_tables(out: Path, *, checkout: Path, environment: dict[str, str]) -> Verdict:
    command = [sys.executable, "-m", "benchmarks.gpu.tables", str(out)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=checkout, env=environment, timeout=_TABLES_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Verdict(letter="", has_passed=False, summary=f"not written within {_TABLES_LIMIT_S} s")
    output = tuple(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-8:])
    if done.returncode != 0:
        return Verdict(letter="", has_passed=False, summary=f"exit status {done.returncode}", details=output)
    pages = ", ".join(str(path) for path in sorted(out.glob("*.md")))
    return Verdict(letter="", has_passed=True, summary=pages or "no tables")


def _summarise(verdicts: list[Verdict], tables: Verdict, *, say: Output) -> None:
    say("")
    for verdict in verdicts:
        say(_line(verdict))
        for detail in verdict.details:
            say(f"    {detail}")
    say(f"tables: {'' if tables.has_passed else 'FAILED: '}{tables.summary}")
    for detail in tables.details:
        say(f"    {detail}")
    failed = [f"part {one.letter}" for one in verdicts if not one.has_passed]
    failed += [] if tables.has_passed else ["the tables"]
    if failed:
        raise FailedWork(f"{', '.join(failed)}; the logs are in the folder of the results")
    say("all parts passed")


def _line(verdict: Verdict) -> str:
    state = "passed" if verdict.has_passed else "FAILED"
    return f"part {verdict.letter}: {state} in {verdict.seconds:.0f} s: {verdict.summary}"


if __name__ == "__main__":
    main()

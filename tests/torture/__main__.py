"""Command line of the torture campaign: `python -m tests.torture`, described in the README of this folder."""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.conftest import ROOT
from tests.torture.campaign import Result, Subjects, run_campaign
from tests.torture.workspace import Workspace

# Modules of this folder; each provides `cases(seed, workspace)`.
PARTS = {
    "points": ("points",),
    "damage": ("damage",),
    "hostile": ("hostile_sources", "hostile_annotations", "hostile_training"),
    "buckets": ("buckets",),
}


def main() -> None:
    """Run a campaign; exit with 1 if any case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description="A seeded campaign of faults.")
    parser.add_argument("--minutes", type=float, default=60.0, help="when no more cases are begun")
    parser.add_argument("--seed", type=int, default=1, help="decides which cases are drawn, and in which order")
    parser.add_argument("--part", choices=sorted(PARTS), help="one part only")
    parser.add_argument("--case", help="one case by its name, or those whose names begin so")
    parser.add_argument("--max-cases", type=int, help="the most cases to try")
    parser.add_argument("--keep", action="store_true", help="leave the folders of cases that failed, and say where")
    parser.add_argument("--json", type=Path, help="file for the same figures, and all reasons")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        with Workspace(folder) as workspace:
            parts = parts_of(chosen.part, seed=chosen.seed, workspace=workspace)
            result = run_campaign(
                parts,
                workspace,
                seconds=60 * chosen.minutes,
                only=chosen.case,
                keeps=chosen.keep,
                max_cases=chosen.max_cases,
                say=lambda line: print(line, flush=True),
            )
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if not result.outcomes:
        sys.exit(f"no case was tried: none of seed {chosen.seed} is called {chosen.case}, or the time was too short")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    print(report(result, seed=chosen.seed, commit=commit.stdout.strip()))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(result, seed=chosen.seed, commit=commit.stdout.strip()), indent=1))
    sys.exit(bool(result.failed))


def parts_of(part: str | None, *, seed: int, workspace: Workspace) -> dict[str, Subjects]:
    """Return the subjects of one part, or of all parts."""
    chosen = {name: modules for name, modules in PARTS.items() if part in (None, name)}
    found: dict[str, Subjects] = {}
    for name, modules in chosen.items():
        for module in modules:
            module_cases = importlib.import_module(f"tests.torture.{module}").cases
            found.setdefault(name, {}).update(module_cases(seed, workspace))
    return found


def report(result: Result, *, seed: int, commit: str) -> str:
    """Format a Markdown table of counts, and for each failure a description and the command that reproduces it."""
    lines = ["", f"commit {commit}, seed {seed}: {len(result.outcomes)} cases, {len(result.failed)} failed"]
    lines += [f"{result.num_left} cases were left when the time was up"] if result.num_left else []
    lines += ["", "| part | of | tried | held | failed | faults tried |", "|---|---|---|---|---|---|"]
    for key in sorted({(one.case.part, one.case.subject) for one in result.outcomes}):
        mine = [one for one in result.outcomes if (one.case.part, one.case.subject) == key]
        num_failed = sum(one.reason is not None for one in mine)
        faults = sorted(Counter(one.case.fault for one in mine).items())
        counts = len(mine), len(mine) - num_failed, num_failed
        described = ", ".join(f"{fault} {count}" for fault, count in faults)
        lines.append(f"| {' | '.join(map(str, (*key, *counts)))} | {described} |")
    for one in result.failed:
        lines += ["", f"FAILED {one.case.name}", *(f"    {line}" for line in (one.reason or "").splitlines())]
        lines += [f"    make torture SEED={seed} CASE='{one.case.name}'"]
    return "\n".join(lines)


def as_json(result: Result, *, seed: int, commit: str) -> dict[str, object]:
    """Return the same report as a JSON object."""
    outcomes = [
        {"name": one.case.name, "fault": one.case.fault, "reason": one.reason, "seconds": round(one.seconds, 2)}
        for one in result.outcomes
    ]
    return {"commit": commit, "seed": seed, "num_left": result.num_left, "cases": outcomes}


if __name__ == "__main__":
    main()

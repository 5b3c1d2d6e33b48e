"""Command line of the torture campaign: `python -m tests.torture`, described in the README of this folder."""

import argparse
import importlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tests.conftest import ROOT
from tests.torture.campaign import Result, Subjects, run_campaign
from tests.torture.workspace import Workspace

# Modules of this folder; each provides `cases(seed, workspace)`.
PARTS = {
    "points": ("points",),
    "unfinished": ("unfinished",),
    "damage": ("damage", "readers"),
    "hostile": ("hostile_sources", "hostile_annotations", "hostile_training"),
    "buckets": ("buckets",),
    "runs": ("bucket_runs",),
    "sources": ("sources",),
    "variants": ("variants",),
    "marks": ("marks",),
    "answers": ("answers",),
    "nodes": ("nodes",),
    "keys": ("keys",),
}


def main() -> None:
    """Run a campaign; exit with 1 if any case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description="A seeded campaign of faults.")
    parser.add_argument("--minutes", type=float, help="when no more cases are begun; 60, or no limit with --cases")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="decides which cases are drawn, in which order"
    )
    parser.add_argument("--part", choices=sorted(PARTS), help="one part only")
    parser.add_argument("--case", help="one case by its name, or those whose names begin so")
    parser.add_argument("--cases", nargs="+", default=[], help="PART=N: this part only, with N cases of each seed")
    parser.add_argument("--keep", action="store_true", help="leave the folders of cases that failed, and say where")
    parser.add_argument("--json", type=Path, help="file for the same figures, and all reasons")
    chosen = parser.parse_args()
    num_cases = {name: int(number) for name, _, number in (item.partition("=") for item in chosen.cases)}
    part_names = [chosen.part] if chosen.part else list(num_cases or PARTS)
    minutes = chosen.minutes or (math.inf if num_cases else 60.0)
    end_s = time.monotonic() + 60 * minutes
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    result = Result()
    try:
        with Workspace(folder) as workspace:
            for seed in chosen.seed:
                of_seed = run_campaign(
                    parts_of(part_names, seed=seed, workspace=workspace),
                    workspace,
                    seed=seed,
                    seconds=end_s - time.monotonic(),
                    only=chosen.case,
                    keeps=chosen.keep,
                    num_cases=num_cases,
                    say=lambda line: print(line, flush=True),
                )
                result.outcomes += of_seed.outcomes
                result.num_left += of_seed.num_left
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if not result.outcomes:
        sys.exit(f"no case was tried: none is called {chosen.case}, or the time was too short")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    print(report(result, commit=commit.stdout.strip()))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(result, commit=commit.stdout.strip()), indent=1))
    sys.exit(bool(result.failed))


def parts_of(names: Collection[str], *, seed: int, workspace: Workspace) -> dict[str, Subjects]:
    """Return the subjects of the selected parts."""
    subjects_by_part: dict[str, Subjects] = {}
    for name in names:
        for module in PARTS[name]:
            module_cases = importlib.import_module(f"tests.torture.{module}").cases
            subjects_by_part.setdefault(name, {}).update(module_cases(seed, workspace))
    return subjects_by_part


def report(result: Result, *, commit: str) -> str:
    """Format a Markdown table of counts, and for each failure a description and the command that reproduces it."""
    seeds = " and ".join(str(seed) for seed in dict.fromkeys(outcome.seed for outcome in result.outcomes))
    lines = ["", f"Seed {seeds}, commit {commit}: {len(result.outcomes)} cases, of which {len(result.failed)} failed."]
    lines += [f"{result.num_left} cases were left when the time was up."] if result.num_left else []
    lines += ["", "| part | of | tried | held | faults |", "|---|---|---|---|---|"]
    for key in sorted({(outcome.case.part, outcome.case.subject) for outcome in result.outcomes}):
        mine = [outcome for outcome in result.outcomes if (outcome.case.part, outcome.case.subject) == key]
        num_held = sum(outcome.reason is None for outcome in mine)
        faults = sorted(Counter(outcome.case.fault for outcome in mine).items())
        described = ", ".join(f"{fault} {count}" for fault, count in faults)
        lines.append(f"| {' | '.join(map(str, (*key, len(mine), num_held)))} | {described} |")
    for outcome in result.failed:
        lines += ["", f"FAILED {outcome.case.name}", *(f"    {line}" for line in (outcome.reason or "").splitlines())]
        lines += [f"    make torture SEED={outcome.seed} CASE='{outcome.case.name}'"]
    return "\n".join(lines)


def as_json(result: Result, *, commit: str) -> dict[str, object]:
    """Return the same report as a JSON object."""
    outcomes = [
        {
            "seed": outcome.seed,
            "name": outcome.case.name,
            "fault": outcome.case.fault,
            "reason": outcome.reason,
            "seconds": round(outcome.seconds, 2),
        }
        for outcome in result.outcomes
    ]
    return {"commit": commit, "num_left": result.num_left, "cases": outcomes}


if __name__ == "__main__":
    main()

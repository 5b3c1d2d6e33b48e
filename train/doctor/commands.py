"""What `train doctor` does, and what a run's page has of it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manifests.errors import FailedWork, UserError
from train.doctor.examined import as_json, examine, examine_in_run
from train.doctor.judge import judge
from train.doctor.report import lines_of, print_report


def run_doctor(*, shards: Path | None, device: str, is_json: bool) -> None:
    """Examines this machine and prints what was found.

    Raises:
        UserError: there is no such folder, or it is a file.
        FailedWork: something would stop training.
    """
    if shards is not None and not shards.is_dir():
        what = f"{shards} is a file, not a data folder" if shards.exists() else f"there is no folder {shards}"
        raise UserError(f"{what} (asked for by --shards)", hint="name the data folder of prep")
    examined = examine(device=device, shards=shards)
    findings = judge(examined)
    if is_json:
        print(json.dumps({**as_json(examined), "findings": [asdict(finding) for finding in findings]}))
    else:
        print_report(examined, findings)
    num_broken = sum(finding.level == "broken" for finding in findings)
    if num_broken:
        things = "1 thing" if num_broken == 1 else f"{num_broken} things"
        raise FailedWork(f"{things} would stop training")


def doctor_facts(*, asked_device: str, device_type: str) -> dict[str, Any]:
    """Lines and findings for run.json: the part that takes a run no time."""
    examined = examine_in_run(asked_device=asked_device, device_type=device_type)
    return {"lines": lines_of(examined), "findings": [asdict(finding) for finding in judge(examined)]}

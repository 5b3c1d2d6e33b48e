"""The command `train quickstart`: plan a first run, and start it on request."""

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.train.config.files import Provenance
from clipmill.train.quickstart.request import Request

if TYPE_CHECKING:
    from clipmill.train.quickstart.plan import Plan

_TRIAL_S = 8.0  # duration of the measured training steps


def quickstart(
    data: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
    /,
    *,
    request: Request = Request(),  # noqa: B008 - frozen
    yes: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Inspect the data and this machine, measure a few training steps, and propose a first run.

    The plan lists task, preset, batch size, steps, expected time, memory and disk, and ends with the complete command.
    On a terminal, train quickstart asks whether to run this command; otherwise the command runs only with --yes.

    Examples:

        train quickstart data
        train quickstart data --minutes 5 --yes
        train quickstart data --json

    Parameters
    ----------
    data
        Data folders made by prep: paths, or URLs such as s3://bucket/data.
    yes
        Run the command without asking.
    as_json
        Print the plan as one JSON object, and do not run the command.
    """
    if yes and as_json:
        raise UserError(
            "--yes runs the command, but --json only prints the plan",
            hint="omit one of them",
            flags=("--yes", "--json"),
        )
    if request.minutes is not None and not 0 < request.minutes < float("inf"):
        raise UserError(
            f"--minutes {request.minutes} is not a finite number above 0",
            hint="use a number above 0",
            flags=("--minutes",),
        )
    plan = _plan(data, request)
    if as_json:
        print(json.dumps(plan.as_json()))
        return
    print(plan.text(), flush=True)
    if yes or (_is_interactive() and _confirm()):
        _run(plan)
    elif not _is_interactive():
        print("the command was not run: copy it from above, or add --yes to train quickstart")


def _plan(data: Sequence[str], request: Request) -> "Plan":
    began_s = time.perf_counter()
    from clipmill.train.quickstart.choice import survey  # without torch, to report mistakes in the data early

    surveys = []
    for folder in data:
        with Activity(f"inspecting {folder}"):
            surveys.append(survey(folder))
    with Activity("importing torch"):
        import torch

        from clipmill.train.device.precision import choose_device
        from clipmill.train.doctor.machine import examine_in_run
        from clipmill.train.quickstart.plan import make_plan, measure, propose

    device = choose_device(request.device)
    proposal = propose(request, surveys, examine_in_run(asked_device=request.device, device_type=device.type))
    device = torch.device("cuda", 0) if device.type == "cuda" else device
    spec, settings = proposal.spec, proposal.settings
    say = partial(print, file=sys.stderr, flush=True)  # standard output is for the plan
    return make_plan(proposal, measure(spec, settings, device=device, seconds=_TRIAL_S, began_s=began_s, say=say))


def _is_interactive() -> bool:
    """Return True if the program runs on a terminal, where it can ask the user."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _confirm() -> bool:
    try:
        return input("Run it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _run(plan: "Plan") -> None:
    from clipmill.train.commands.launch import launch

    if plan.proposal.num_processes > 1:
        # Replace this process with the torchrun program beside this interpreter, which also frees the GPU memory.
        programs = Path(sys.executable).parent
        torchrun, *arguments = plan.arguments
        has_train = (programs / "train").exists()
        arguments = [str(programs / word) if word == "train" and has_train else word for word in arguments]
        os.execv(programs / torchrun, [torchrun, *arguments])
    launch(plan.proposal.spec, plan.settings, resume=False, provenance=Provenance())
    out = plan.settings.out
    print(f"page: {out / 'index.html'}\ncheckpoints: {out / 'checkpoints'}")
    # With held-out clips, the run itself has already suggested the first command.
    for command in plan.next_commands[1:] if plan.proposal.held_out else plan.next_commands:
        print(f"next: {command}")

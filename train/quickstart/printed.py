"""The plan of a first run as text and as JSON."""

import textwrap
from dataclasses import asdict
from typing import Any

from clipmill.manifests.quoting import counted
from clipmill.train.doctor.examined import Examined
from clipmill.train.quickstart.plan import Plan, Proposal
from clipmill.train.quickstart.survey import describe

_LABEL_WIDTH = 12
_COLUMNS = 100
_WORTH_SAYING = 0.05  # a share of the time


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    proposal, settings = plan.proposal, plan.settings
    host, accelerator = proposal.examined.host, proposal.examined.accelerator
    return {
        "data": [one.as_json() for one in proposal.surveys],
        "machine": {
            "gpus": [asdict(gpu) for gpu in accelerator.gpus],
            "processor": host.processor,
            "cores": host.allowed_cores,
            "memory_bytes": host.memory_bytes,
            "libavcodec": proposal.examined.decoder.libavcodec,
        },
        "task": asdict(proposal.task),
        "preset": asdict(proposal.preset),
        "split": proposal.split,
        "held_out": proposal.held_out,
        "batch": settings.batch,
        "steps": settings.steps,
        "epochs": plan.length.epochs,
        "steps_reason": plan.length.reason,
        "minutes": proposal.minutes,
        "expected": asdict(plan.expected),
        "measured": plan.trial.as_json(),
        "disk_bytes": plan.disk_bytes,
        "free_bytes": plan.free_bytes,
        "out": str(settings.out),
        "warnings": list(plan.warnings),
        "argv": list(plan.words),
        "command": plan.command,
        "then": list(plan.then),
    }


def plan_text(plan: Plan) -> str:
    """The plan for a person."""
    proposal, trial, settings, expected = plan.proposal, plan.trial, plan.settings, plan.expected
    batch = counted(settings.batch, "clip")
    if proposal.num_processes > 1:
        batch += f" on {proposal.num_processes} GPUs, of which one was measured"
    halved = f"; {counted(trial.num_halved, 'larger size')} did not fit" if trial.num_halved else ""
    waiting = f", {trial.wait_share:.0%} of it waiting for data" if trial.wait_share >= _WORTH_SAYING else ""
    rows = [("data", line) for one in proposal.surveys for line in describe(one)]
    rows += [
        ("machine", _machine(proposal.examined)),
        ("task", f"{proposal.task.value} on split {proposal.split}: {proposal.task.reason}"),
        ("preset", f"{proposal.preset.value}, {_about(proposal)}: {proposal.preset.reason}"),
        ("batch", f"{batch}{halved}"),
        (
            "steps",
            f"{settings.steps:,}, {plan.length.epochs:.1f} epochs of {counted(trial.num_samples, 'sample')}: "
            f"{plan.length.reason}",
        ),
        (
            "time",
            f"about {duration(expected.seconds)}, between {duration(expected.least_s)} and "
            f"{duration(expected.most_s)}; measured: {trial.step_s:.2g} s per step{waiting}, {trial.start_s:.0f} s to "
            f"start, {sum(trial.checkpoint_s):.1f} s per checkpoint",
        ),
        ("memory", f"{trial.memory_bytes / 1e9:.1f} GB{' of GPU memory' if proposal.is_on_gpu else ''}, measured"),
        ("disk", f"{_size(plan.disk_bytes)} for checkpoints; {_size(plan.free_bytes)} are free"),
    ]
    lines = []
    last = ""
    for label, words in rows:
        lines.append(_filled(words, label="" if label == last else label))
        last = label
    lines += [_filled(words, label="warning") for words in plan.warnings]
    return "\n".join([*lines, "", f"    {plan.command}", ""])


def duration(seconds: float) -> str:
    """A time in words: 45 s, 3.5 minutes, 2.1 hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 10**9 else f"{size_bytes / 1e6:.0f} MB"


def _about(proposal: Proposal) -> str:
    settings = proposal.settings
    return f"{settings.num_frames} frames of {settings.size_px} px"


def _machine(examined: Examined) -> str:
    host, gpus = examined.host, examined.accelerator.gpus
    names = sorted({gpu.name for gpu in gpus})
    gpu = f"{counted(len(gpus), 'GPU')} ({', '.join(names)})" if gpus else "no GPU"
    memory = "" if host.memory_bytes is None else f", {host.memory_bytes / 1e9:.0f} GB of memory"
    return f"{gpu}; {counted(host.allowed_cores, 'core')}{memory}"


def _filled(words: str, *, label: str) -> str:
    return textwrap.fill(
        words,
        width=_COLUMNS,
        initial_indent=label.ljust(_LABEL_WIDTH),
        subsequent_indent=" " * _LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )

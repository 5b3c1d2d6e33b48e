"""The commands whose every point goes wrong in turn, and what must be equal in the end."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.prep.running import contents
from tests.torture import bases
from tests.torture.checks import ended_well
from tests.torture.watched import Watched
from tests.torture.workspace import Workspace, copy

# Of a step's line in metrics.jsonl: how fast it was.
_TIMES = {"samples_per_s", "step_s", "data_wait_s", "data_wait_share", "tflops"}


@dataclass(frozen=True)
class Subject:
    """A command to disturb.

    Attributes:
        arguments: of the command, given the workspace and the folder of a case.
        base: makes what the folder of a case begins with; nothing where it is None.
        status: how it ends undisturbed.
        term: point at which the command is sent SIGTERM as well, which it obeys.
        is_fresh: it runs in new interpreters, and so do its workers; see `Commands.run`.
        kept: what must be equal in the end: by name, what stands for its bytes.
        again: arguments of the command after it was disturbed; the same where it is None.
        max_cases: how many of its cases are drawn, where each takes long.
    """

    name: str
    arguments: Callable[[Workspace, Path], Sequence[object]]
    base: Callable[[Workspace], Path] | None
    program: str = "prep"
    status: int = 0
    term: str | None = None
    is_fresh: bool = False
    kept: Callable[[Path], Mapping[str, str]] = lambda folder: contents(folder / "data")
    again: Callable[[Workspace, Path], Sequence[object]] | None = None
    max_cases: int | None = None

    def watched(self, workspace: Workspace, folder: Path) -> Watched:
        """The command in a folder, to be traced or disturbed."""
        arguments = self.arguments(workspace, folder)
        return Watched(self.program, arguments, folder, term=self.term, is_fresh=self.is_fresh)

    def begin(self, workspace: Workspace, folder: Path) -> None:
        """Puts into the folder of a case what the command needs."""
        if self.base is not None:
            copy(self.base(workspace), folder)

    def watched_again(self, workspace: Workspace, folder: Path) -> Watched:
        """The command that goes on after that."""
        arguments = (self.again or self.arguments)(workspace, folder)
        return Watched(self.program, arguments, folder, is_fresh=self.is_fresh)


def _prep(*arguments: object) -> Callable[[Workspace, Path], Sequence[object]]:
    return lambda _, folder: (*arguments, "--data", folder / "data")


def _manifest(workspace: Workspace, folder: Path, *, which: str) -> Sequence[object]:
    return (*bases.manifest_arguments(workspace, which=which), "--data", folder / "data")


def _train(_: Workspace, folder: Path) -> Sequence[object]:
    return (*bases.TRAIN, "--shards", folder / "data", "--out", folder / "run")


def _resume(_: Workspace, folder: Path) -> Sequence[object]:
    return ("dual-encoder", "--out", folder / "run", "--resume")


def _train_again(workspace: Workspace, folder: Path) -> Sequence[object]:
    """Goes on with the run, or begins it where it had not begun, by one command line."""
    return (*_train(workspace, folder), "--resume", "auto")


def _run_contents(folder: Path) -> dict[str, str]:
    """What a run's files hold: without what tells of times, of the folder, and of the order of tensors in files."""
    run = folder / "run"
    found: dict[str, Any] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        content = path.read_bytes().replace(str(folder).encode(), b"FOLDER")
        if path.name in ("index.html", ".metadata") or path.suffix == ".distcp":
            found[name] = "there"  # times; a random id that nobody reads; the tensors, which stand below
        elif path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in content.splitlines()]
            found[name] = [{key: value for key, value in line.items() if key not in _TIMES} for line in lines]
        elif path.name == "checkpoint.json":
            found[name] = {k: v for k, v in json.loads(content).items() if k not in ("checksum", "files")}
        elif path.name == "run.json":
            # What it says of the machine changes: memory that is free.
            found[name] = {k: v for k, v in json.loads(content).items() if k != "doctor"}
        elif path.name == "tensors.json":
            found |= {f"{name}/{tensor}": about for tensor, about in _tensors(path.parent, json.loads(content)).items()}
        else:
            found[name] = content.decode("utf-8", "replace")
    return {name: json.dumps(value, sort_keys=True) for name, value in found.items()}


def _tensors(checkpoint: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Of each tensor: its type, size, and the SHA-256 of each piece of it as it is stored."""
    files = {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}

    def piece_of(piece: dict[str, Any]) -> tuple[Any, Any, str]:
        stored = files[piece["file"]][piece["begin"] : piece["begin"] + piece["length"]]
        return piece["offsets"], piece["sizes"], hashlib.sha256(stored).hexdigest()

    return {name: [entry["dtype"], entry["size"], *map(piece_of, entry["pieces"])] for name, entry in table.items()}


def _stopped_run(workspace: Workspace) -> Path:
    """A run that was told to stop at its third step, and saved it."""

    def make(folder: Path) -> None:
        copy(bases.with_columns(workspace), folder)
        watched = Watched("train", _train(workspace, folder), folder, term="write:run/metrics.jsonl#3")
        ran, _ = watched.traced(workspace.commands)
        ended_well(ran, status=143)
        (folder / "flags" / "term").unlink()

    return workspace.made("stopped-run", make)


_TRAINING: dict[str, Any] = {"program": "train", "kept": _run_contents}
SUBJECTS = (
    Subject("manifest-first", partial(_manifest, which="first"), None),
    Subject("manifest-second", partial(_manifest, which="later"), bases.with_manifest),
    Subject("chunk", _prep(*bases.CHUNK, *bases.ENGINE), bases.with_manifest),
    Subject("chunk-again", _prep(*bases.CHUNK, *bases.ENGINE), bases.with_later_manifest),
    Subject("chunk-fresh", _prep(*bases.CHUNK, *bases.ENGINE), bases.with_manifest, is_fresh=True),
    Subject("chunk-ray", _prep(*bases.CHUNK, *bases.RAY), bases.with_manifest, is_fresh=True, max_cases=25),
    Subject("latents", _prep(*bases.LATENTS, *bases.ENGINE), bases.with_chunks),
    Subject("text", _prep(*bases.TEXT, *bases.ENGINE), bases.with_manifest),
    Subject("text-again", _prep(*bases.TEXT, *bases.ENGINE), bases.with_later_manifest),
    Subject("text-fresh", _prep(*bases.TEXT, *bases.ENGINE), bases.with_manifest, is_fresh=True, max_cases=10),
    Subject("gc", _prep("gc"), bases.with_garbage),
    Subject("retry", _prep("retry", *bases.ENGINE), bases.with_failure),
    Subject("train", _train, bases.with_columns, again=_train_again, **_TRAINING),
    Subject(
        "train-stopped",
        _train,
        bases.with_columns,
        term="write:run/metrics.jsonl#4",
        again=_train_again,
        **_TRAINING,
    ),
    Subject("train-resumed", _resume, _stopped_run, **_TRAINING),
)

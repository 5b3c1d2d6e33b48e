"""Commands for fault injection at every point, and the results that must be identical."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from clipmill.prep.captions.answers import answers_in
from clipmill.shards.marks import TOKEN_FACT
from tests.prep.running import contents
from tests.torture import bases
from tests.torture.checks import ended_well
from tests.torture.watched import Watched
from tests.torture.workspace import Workspace, copy

# Fields of metrics.jsonl that measure speed.
_TIMES = {"samples_per_s", "step_s", "data_wait_s", "data_wait_share", "tflops"}


@dataclass(frozen=True)
class Subject:
    """Command for fault injection.

    Attributes:
        arguments: Function that takes the workspace and the folder of a case and returns the arguments of the command.
        base: Function that creates the initial folder of a case; None for an empty folder.
        status: Exit status without faults.
        term: Point at which the command also receives SIGTERM, which it handles.
        is_fresh: True to run the command and its workers in new interpreters; see `Commands.run`.
        kept: Function that returns the results that must be identical, as a map from name to digest.
        again: Arguments of the command after a fault; None for the same arguments.
        last: Arguments of the run without faults that ends a case; None for the arguments in `again`.
        max_cases: Maximum number of cases, for commands that take long.
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
    last: Callable[[Workspace, Path], Sequence[object]] | None = None
    max_cases: int | None = None

    def watched(self, workspace: Workspace, folder: Path) -> Watched:
        """Return the command in a folder, ready for tracing or fault injection."""
        arguments = self.arguments(workspace, folder)
        sources = bases.videos(workspace) if self.program == "prep" else None
        return Watched(self.program, arguments, folder, sources=sources, term=self.term, is_fresh=self.is_fresh)

    def begin(self, workspace: Workspace, folder: Path) -> None:
        """Copy the command's input to the folder of a case."""
        if self.base is not None:
            copy(self.base(workspace), folder)

    def watched_again(self, workspace: Workspace, folder: Path) -> Watched:
        """Return the command to run after a fault."""
        arguments = (self.again or self.arguments)(workspace, folder)
        return Watched(self.program, arguments, folder, is_fresh=self.is_fresh)

    def watched_last(self, workspace: Workspace, folder: Path) -> Watched:
        """Return the command that must reach the result after all faults."""
        if self.last is None:
            return self.watched_again(workspace, folder)
        return Watched(self.program, self.last(workspace, folder), folder)


def _prep(*arguments: object) -> Callable[[Workspace, Path], Sequence[object]]:
    return lambda _, folder: (*arguments, "--data", folder / "data")


def _manifest(workspace: Workspace, folder: Path, *, which: str) -> Sequence[object]:
    return (*bases.manifest_arguments(workspace, which=which), "--data", folder / "data")


def _captions(workspace: Workspace, folder: Path) -> Sequence[object]:
    return (*bases.captions_arguments(workspace), "--data", folder / "data")


def _subtitles(workspace: Workspace, folder: Path) -> Sequence[object]:
    return ("manifest", "folder", bases.videos(workspace) / "first", "--subtitles", "--data", folder / "data")


def _video_latents(workspace: Workspace, folder: Path) -> Sequence[object]:
    return (*bases.video_latents(workspace), *bases.ENGINE, "--data", folder / "data")


def _vlm(_: Workspace, folder: Path) -> Sequence[object]:
    return (*bases.vlm_arguments(), *bases.ENGINE, "--data", folder / "data")


def _asked_once(folder: Path) -> dict[str, str]:
    """Return the column, and its answers without their times.

    A chunk that was requested twice adds an answer.
    """
    data = folder / "data"
    digests = {name: digest for name, digest in contents(data).items() if "/answers/" not in name}
    answers = (answer for journals in data.glob("captions/*/answers") for answer in answers_in(journals))
    return {**digests, "answers": "\n".join(sorted(str(replace(answer, seconds=0)) for answer in answers))}


def _inspect(_: Workspace, folder: Path) -> Sequence[object]:
    return ("inspect", "--html", folder / "run" / "chunks.html", "--data", folder / "data")


def _contents_but_the_engine(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(folder / "data").items() if not name.endswith("/selection.json")}


def _page_contents(folder: Path) -> dict[str, str]:
    return {f"{name}/{path}": digest for name in ("data", "run") for path, digest in contents(folder / name).items()}


def _train(_: Workspace, folder: Path) -> Sequence[object]:
    return (*bases.TRAIN, "--shards", folder / "data", "--out", folder / "run")


def _resume(_: Workspace, folder: Path) -> Sequence[object]:
    return ("dual-encoder", "--out", folder / "run", "--resume")


def _train_again(workspace: Workspace, folder: Path) -> Sequence[object]:
    """Resume the run, or start it if it had not started, with one command line."""
    return (*_train(workspace, folder), "--resume", "auto")


def _run_contents(folder: Path) -> dict[str, str]:
    """Return the contents of a run's files, without times and paths of the folder."""
    run = folder / "run"
    values: dict[str, Any] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        content = path.read_bytes().replace(str(folder).encode(), b"FOLDER")
        if path.name == "index.html":
            values[name] = "there"  # the file contains times
        elif path.suffix == ".bin":
            values[name] = hashlib.sha256(content).hexdigest()
        elif path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in content.splitlines()]
            values[name] = [{key: value for key, value in line.items() if key not in _TIMES} for line in lines]
        elif path.name == "checkpoint.json":
            values[name] = {k: v for k, v in json.loads(content).items() if k not in ("checksum", "files")}
        elif path.name == "run.json":
            # The description of the machine varies, for example in the free memory; the mark is a random value.
            values[name] = {k: v for k, v in json.loads(content).items() if k not in ("doctor", TOKEN_FACT)}
        else:
            values[name] = content.decode("utf-8", "replace")
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}


def _stopped_run(workspace: Workspace) -> Path:
    """Create a run that was stopped at its third step and saved a checkpoint."""

    def make(folder: Path) -> None:
        copy(bases.with_columns(workspace), folder)
        watched = Watched("train", _train(workspace, folder), folder, term="write:run/metrics.jsonl#3")
        ran, _ = watched.trace(workspace.commands)
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
    # The other engine completes the work that Ray left; the data folder differs only in the name of the engine.
    Subject(
        "chunk-ray",
        _prep(*bases.CHUNK, *bases.RAY),
        bases.with_manifest,
        is_fresh=True,
        kept=_contents_but_the_engine,
        last=_prep(*bases.CHUNK, *bases.ENGINE),
        max_cases=8,
    ),
    Subject("chunk-shots", _prep(*bases.SHOTS, *bases.ENGINE), bases.with_manifest),
    Subject("chunk-part", _prep(*bases.CHUNK, *bases.ENGINE, "--part", "1/2"), bases.with_other_part),
    Subject("captions", _captions, bases.with_manifest),
    Subject("subtitles", _subtitles, None),
    Subject("scores", _prep("scores", *bases.ENGINE), bases.with_chunks),
    Subject("inspect", _inspect, bases.with_page_folder, kept=_page_contents),
    Subject("vlm", _vlm, bases.with_chunks, kept=_asked_once),
    Subject("latents", _prep(*bases.LATENTS, *bases.ENGINE), bases.with_chunks),
    Subject("latents-video", _video_latents, bases.with_chunks),
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

"""The folder of a run and the files in it.

    settings.yaml             the settings that took effect; loads back to an equal object
    run.json                  machine, versions, data, model: what the results page tells of the run
    metrics.jsonl             one object a step
    failures.jsonl            one object for each sample that failed
    checkpoints/step_*/       whole states (train.run.checkpoint)
    evaluations/*.json        results of `train eval`; those on other data than the run's have its name in theirs
    evaluations/*.coco.json   captions that it found, as COCO's programs read them
    index.html                the results page

The two .jsonl files grow by whole lines; resuming cuts off the lines that came after the checkpoint.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import TEMPORARY_PREFIX, publish_bytes, publish_json
from train.config.files import load_settings, read_values, save_settings
from train.config.training import TrainingSettings, require_same, shaping
from train.run.results import data_facts, result_name

# Captions in COCO's results format, which lie beside the results of evaluations.
COCO_SUFFIX = ".coco.json"
EVALUATIONS = "evaluations"
# Of --resume: begin a run, go on with one, or go on where there is one and begin where there is none.
Resume = bool | Literal["auto"]


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "settings.yaml"

    @property
    def facts(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def failures(self) -> Path:
        return self.path / "failures.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def page(self) -> Path:
        return self.path / "index.html"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes from training in the folder; the system lets go of it however this one ends.

        Raises:
            UserError: another process has it.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                hint = "wait until it is over, or use another --out"
                raise UserError(f"another process trains in {self.path}", hint=hint) from error
            yield
        finally:
            os.close(folder)

    def read_facts(self) -> dict[str, Any]:
        """What run.json says; nothing where it is not there yet.

        Raises:
            UserError: it is damaged.
        """
        return read_object(self.facts) if self.facts.exists() else {}

    def require_facts(self) -> dict[str, Any]:
        """What run.json says, which has to be there.

        Raises:
            UserError: it is missing or damaged.
        """
        if not self.facts.exists():
            raise UserError(f"{self.facts} is missing", hint="put back what the run wrote, or train anew")
        return self.read_facts()

    def require_task(self, task: str) -> None:
        """Raises a UserError where the run is one of another task."""
        found = self.read_facts().get("task", task)
        if found != task:
            raise UserError(f"{self.path} is a run of train {found}, not of train {task}", hint="name another run")

    def require_checkpoint(self) -> Path:
        """The latest checkpoint; raises a UserError where there is none."""
        from train.run.checkpoint import latest_checkpoint

        path = latest_checkpoint(self.checkpoints)
        if path is None:
            raise UserError(f"{self.path} has no checkpoint yet", hint="train until --checkpoint-every, or to the end")
        return path

    def evaluation(self, name: str) -> Path:
        """Result file of one evaluation."""
        return self.path / EVALUATIONS / f"{name}.json"

    def results(self) -> list[Path]:
        """The result files of all evaluations, by name."""
        files = sorted(self.evaluation("any").parent.glob("*.json"))
        return [path for path in files if not path.name.endswith(COCO_SUFFIX)]

    def data_facts(self, shards: str | None) -> dict[str, Any]:
        """What a result says of its data (see train.run.results); `shards` is None where it is the run's own."""
        own = read_values(self.settings).get("shards", TrainingSettings.shards)
        return data_facts(str(own), shards)

    def write_evaluation(self, name: str, result: dict[str, Any]) -> Path:
        """Publishes the result of an evaluation; one on other data takes the place of none on the run's own."""
        path = self.evaluation(result_name(name, result))
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_json(path, result)
        return path


def create_run(settings: TrainingSettings) -> RunFolder:
    """Makes the folder of a new run; one in which a process was killed while it made it is taken over.

    Raises:
        UserError: the folder is there already and not empty, or cannot be made; or another process has it.
    """
    run = RunFolder(settings.out)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        with run.held():
            left = _left_over(run.path, run.settings.name)
            if len(left) < len(list(run.path.iterdir())):
                raise UserError(f"{run.path} exists already", hint="use --resume to go on with it, or another --out")
            for path in left:
                path.unlink()
            save_settings(settings, run.settings)
    except OSError as error:
        raise UserError(f"cannot make the run folder {run.path}: {error.strerror}", hint="use another --out") from error
    return run


def find_run(path: Path, resume: Resume) -> RunFolder | None:
    """The run to go on with; None where a new one begins.

    Raises:
        UserError: `resume` is True, and there is no run in `path`.
    """
    if resume is False or (resume == "auto" and not RunFolder(path).settings.is_file()):
        return None
    return open_run(path)


def sweep(run: RunFolder) -> None:
    """Removes what processes that were killed left in the folder of a run; to be called by the one that holds it."""
    for folder in (run.path, run.path / EVALUATIONS):
        for path in _left_over(folder, "*"):
            path.unlink(missing_ok=True)


def _left_over(folder: Path, name: str) -> list[Path]:
    """Files that were being published under `name`."""
    return [path for path in folder.glob(f"{TEMPORARY_PREFIX}{'[0-9a-f]' * 12}-{name}") if path.is_file()]


def reopen_run(settings: TrainingSettings) -> RunFolder:
    """Opens the folder of a run to go on with it under `settings`, those that take effect.

    Raises:
        UserError: there is no run in it, or settings that shape the weights have changed; it names them.
    """
    run = open_run(settings.out)
    old = load_settings(run.settings, type(settings))
    require_same(shaping(old), shaping(settings), where=f"the run in {run.path}")
    return run


def open_run(path: Path) -> RunFolder:
    """Opens the folder of a run to read it.

    Raises:
        UserError: there is no run in it.
    """
    run = RunFolder(path)
    if not run.settings.is_file():
        raise UserError(f"there is no run in {path}", hint="name a training command's --out")
    return run


def read_object(path: Path) -> dict[str, Any]:
    """The object of a .json file of a run: of its facts, or of an evaluation, which can be made again.

    Raises:
        UserError: it cannot be read, or holds none.
    """
    is_evaluation = path.parent.name == EVALUATIONS
    hint = "put back what `train eval` wrote, or remove it" if is_evaluation else "put back what the run wrote"
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint=hint) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no object", hint=hint)
    return value


def append_lines(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Adds objects to a .jsonl file, one a line."""
    lines = "".join(json.dumps(value) + "\n" for value in objects)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a .jsonl file; a last line that a killed process left unfinished is passed over.

    Raises:
        UserError: another line is no object.
    """
    if not path.exists():
        return []
    values = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"line {number} of {path} is damaged", hint="remove that line")
        values.append(value)
    return values


def keep_lines(path: Path, belongs: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drops the objects of a .jsonl file that do not belong, and returns the others.

    Raises:
        UserError: the file is damaged, or an object lacks what `belongs` asks for.
    """
    try:
        kept = [value for value in read_lines(path) if belongs(value)]
    except (KeyError, TypeError) as error:
        raise UserError(f"a line of {path} is not as clipmill wrote it: {error}", hint="remove that line") from error
    publish_bytes(path, "".join(json.dumps(value) + "\n" for value in kept).encode())
    return kept

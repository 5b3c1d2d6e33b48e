"""Access to the folder of a training run and to its files.

    settings.yaml             effective settings; loading the file yields an equal settings object
    run.json                  facts for the results page: machine, versions, data and model
    metrics.jsonl             one JSON object per step
    failures.jsonl            one JSON object per failed sample
    checkpoints/step_*/       checkpoints (clipmill.train.run.checkpoint)
    evaluations/*.json        results of `train eval`
    evaluations/*.coco.json   generated captions in COCO's results format
    evaluations/former/       earlier results from a different checkpoint, variant or set of flags
    index.html                results page

Only complete lines are appended to the two .jsonl files. When a run is resumed, lines that were written after the
checkpoint are removed.
"""

import glob
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import lock
from clipmill.manifests.publish import TEMPORARY_PREFIX, parse_json, publish_bytes, publish_json, rename, tag_errors
from clipmill.manifests.storage.mirrors import mirror_of, show_urls
from clipmill.train.config.files import load_settings, read_values, save_settings
from clipmill.train.config.shards import Shards, absolute_address, folders_of, normalise_address
from clipmill.train.config.training import NEW_RUN, RESUME_HINT, TrainingSettings, require_same, weight_settings

# Evaluation results. A result file is named after the evaluation. For data other than the run's own, the file name also
# contains the name of the data folder and a hash of its address.

_MAX_DATA_NAME = 40
# Fields of a result that identify the evaluated weights and data, and the overridden settings.
_IDENTITY = ("source", "shards", "variant", "step", "weights", "overrides")
_NUM_WORDS_BEFORE_FLAGS = 4  # number of words in `train eval NAME WEIGHTS`
_NUM_HASH_DIGITS = 8


def data_facts(run_shards: Shards, shards: str | None) -> dict[str, Any]:
    """Return the fields of a result that describe the evaluated data.

    Args:
        run_shards: Value of --shards of the run.
        shards: Value of --shards of the evaluation; None for the run's own data.

    Returns:
        `shards`, the address of the data; `is_own_data`, True for the run's own data; and `is_part_of_own_data`,
        present only if the data are one folder of a run with several data folders.
    """
    folders = [normalise_address(folder) for folder in folders_of(run_shards)]
    if shards is None:
        return {"shards": ", ".join(folders), "is_own_data": True}
    address = normalise_address(shards)
    part = {"is_part_of_own_data": True} if len(folders) > 1 and address in folders else {}
    return {"shards": address, "is_own_data": [address] == folders, **part}


def result_name(name: str, facts: dict[str, Any]) -> str:
    """Return the file name of a result, without its extension.

    The file name is `name`. For data other than the run's own, the name of the data folder and a hash are appended.
    """
    address = other_data(facts)
    if not address:
        return name
    folder = re.sub(r"[^\w.-]+", "-", address.rpartition("/")[2])[:_MAX_DATA_NAME].strip("-.") or "data"
    return f"{name}-{folder}-{hashlib.sha256(address.encode()).hexdigest()[:_NUM_HASH_DIGITS]}"


def is_same_evaluation(result: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two results have the same weights, data and flags."""
    return all(result.get(name) == other.get(name) for name in _IDENTITY) and _flags_of(result) == _flags_of(other)


def _flags_of(result: dict[str, Any]) -> list[str]:
    """Return the flags of a result's command. Omit the data and the weights, because their paths may be relative."""
    words = shlex.split(str(result.get("command", "")))[_NUM_WORDS_BEFORE_FLAGS:]
    return [word for previous, word in zip(["", *words], words, strict=False) if "--shards" not in (previous, word)]


def other_data(result: dict[str, Any]) -> str:
    """Return the address of a result's data, or an empty string for the run's own data (the default)."""
    return "" if result.get("is_own_data", True) else str(result["shards"])


def suffix_of(differences: Mapping[str, Any]) -> str:
    """Return the suffix that distinguishes results whose settings differ from the training settings.

    Args:
        differences: Values of the evaluation that differ from the training settings, keyed by setting.
    """
    forms = {"num_frames": "-{}-frames", "sampling": "-{}", "size_px": "-{}px"}
    suffix, groups = "", dict[str, list[str]]()
    for name, value in differences.items():
        group, _, setting = name.partition(".")
        if name in forms:
            suffix += forms[name].format(value)
        else:
            groups.setdefault(group, []).append(f"{setting} {value}" if setting else str(value))
    for group, texts in groups.items():
        suffix += f"-{group}-{hashlib.sha256(' '.join(texts).encode()).hexdigest()[:8]}"
    return suffix


COCO_SUFFIX = ".coco.json"
_POLL_S = 0.2
EVALUATIONS, FORMER = "evaluations", "former"
# Types of the entries of run.json that decide which data are read.
_FACT_TYPES: dict[str, type] = {
    "task": str,
    "variants": list,
    "evaluated_variants": dict,
    "sources": list,
    "evaluations": dict,
}
# Suffix of the files with which nodes check that they share the folder (clipmill.train.run.shared_folder).
PROBE = "shared"
# Value of --resume: False starts a new run, True resumes an existing run, and "auto" resumes the run if it exists.
Resume = bool | Literal["auto"]


class RunFolder:
    """Paths and small files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.yaml"
        self.facts = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.failures = path / "failures.jsonl"
        self.checkpoints = path / "checkpoints"
        self.page = path / "index.html"

    @property
    def name(self) -> str:
        """Name of the run's folder; for a run in a bucket, the last component of its address."""
        mirror = mirror_of(self.path)
        return self.path.resolve().name if mirror is None else mirror.url.rpartition("/")[2]

    def hold(self, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Return a context manager that locks the folder against other training processes.

        The lock is released at the end of the block or when the process exits.

        Args:
            wait_s: Maximum time in seconds to wait for another process to release its lock.

        Raises:
            UserError: Another process still holds the lock after `wait_s`.
        """
        if (mirror := mirror_of(self.path)) is not None:
            from clipmill.train.run.bucket import hold_run

            return hold_run(mirror, wait_s=wait_s)
        return hold_folder(self.path, work="trains", wait_s=wait_s)

    def upload_growing_files(self) -> None:
        """Upload metrics.jsonl, failures.jsonl and the TensorBoard event files, if the run is in a bucket."""
        if (mirror := mirror_of(self.path)) is not None:
            for path in (self.metrics, self.failures, *sorted((self.path / "tensorboard").glob("events.*"))):
                mirror.upload_growing(path)

    def upload_periodically(self) -> AbstractContextManager[None]:
        """Return a context manager that calls `upload_growing_files` every half minute and at the end of the block."""
        if mirror_of(self.path) is None:
            return nullcontext()
        from clipmill.train.run.bucket import upload_periodically

        return upload_periodically(self.upload_growing_files)

    def read_facts(self) -> dict[str, Any]:
        """Return the content of run.json; {} if the file does not exist yet.

        Raises:
            UserError: The file is damaged.
        """
        return self.require_facts() if self.facts.exists() else {}

    def require_facts(self, *names: str) -> dict[str, Any]:
        """Return the content of run.json.

        Args:
            names: Names of entries that must be present.

        Raises:
            UserError: The file or an entry in `names` is missing, or the file is damaged.
        """
        if not self.facts.exists():
            raise UserError(f"{self.facts} is missing", hint="restore the run's files, or start a new run")
        facts = read_object(self.facts)
        if bad := [
            name
            for name, kind in _FACT_TYPES.items()
            if not isinstance(facts.get(name, None if name in names else kind()), kind)
        ]:
            raise UserError(f"{self.facts} has no valid entry {bad[0]!r}", hint="restore the run's files")
        return facts

    def require_task(self, task: str) -> None:
        """Raise a UserError if the run belongs to a different task."""
        trained_task = self.read_facts().get("task", task)
        if trained_task != task:
            raise UserError(
                f"{self.path} is a run of train {trained_task}, not of train {task}",
                hint="use another --out, or another run",
            )

    def latest_checkpoint(self) -> Path | None:
        """Return the latest checkpoint; None if the run has no checkpoint yet."""
        from clipmill.train.run.checkpoint import latest_checkpoint

        return latest_checkpoint(self.checkpoints)

    def require_checkpoint(self) -> Path:
        """Return the latest checkpoint.

        Raises:
            UserError: The run has no checkpoint yet.
        """
        path = self.latest_checkpoint()
        if path is None:
            raise UserError(
                f"{self.path} has no checkpoint yet",
                hint="continue training: a checkpoint is saved every --checkpoint-every steps and at the end",
            )
        return path

    def evaluation(self, name: str) -> Path:
        """Return the path of the result file of the evaluation `name`."""
        return self.path / EVALUATIONS / f"{name}.json"

    def results(self) -> list[Path]:
        """Return the paths of all result files, sorted by name. Former results are not included."""
        files = sorted(self.evaluation("any").parent.glob("*.json"))
        return [path for path in files if not path.name.endswith(COCO_SUFFIX)]

    def data_facts(self, shards: str | None) -> dict[str, Any]:
        """Return the fields of a result that describe its data; see the function `data_facts`.

        Args:
            shards: Value of --shards of the evaluation; None for the run's own data.
        """
        run_shards = read_values(self.settings).get("shards", TrainingSettings.shards)
        return data_facts(tuple(map(str, run_shards)) if isinstance(run_shards, list) else str(run_shards), shards)

    def write_evaluation(self, name: str, result: dict[str, Any]) -> Path:
        """Publish the result of an evaluation, and return the path of its file.

        An existing result is replaced only if it has the same weights, data and flags. Otherwise, the existing result
        and its accompanying files are first moved to the folder of former results.
        """
        path = self.evaluation(result_name(name, result))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not is_same_evaluation(previous_result := read_object(path), result):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
            former_path = path.parent / FORMER / f"{path.stem}-step-{previous_result.get('step')}-{digest}"
            former_path.parent.mkdir(exist_ok=True)
            for file in sorted(path.parent.glob(f"{glob.escape(path.stem)}.*")):
                rename(file, former_path.with_name(f"{former_path.name}{file.name.removeprefix(path.stem)}"))
        publish_json(path, result)
        return path


@contextmanager
def hold_folder(path: Path, *, work: str, wait_s: float = 0.0) -> Iterator[None]:
    """Lock a folder against other processes that do the same work in it.

    The lock is released at the end of the block or when the process exits.

    Args:
        work: Verb for the error message, such as "trains".
        wait_s: Maximum time in seconds to wait for another process to release its lock.

    Raises:
        UserError: Another process still holds the lock after `wait_s`.
    """
    folder = os.open(path, os.O_RDONLY)
    deadline_s = time.monotonic() + wait_s
    try:
        while not lock(folder, waits=False):
            if time.monotonic() >= deadline_s:
                hint = "wait until that process ends, or use another --out"
                raise UserError(f"another process {work} in {path}", hint=hint)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(folder)


def create_run(settings: TrainingSettings, *, comment: str = "") -> RunFolder:
    """Create the folder of a new run, or complete a folder whose creation was interrupted.

    Args:
        comment: Comment to write at the top of settings.yaml.

    Raises:
        UserError: The folder is not empty, cannot be created, or is locked by another process.
    """
    run = RunFolder(settings.out)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        with run.hold():
            leftovers = [*_leftover_files(run.path, run.settings.name), *_leftover_files(run.path, PROBE)]
            mirror = mirror_of(run.path)
            if len(leftovers) < len(list(run.path.iterdir())) if mirror is None else not mirror.is_empty:
                if is_run(run.path):
                    raise UserError(
                        f"{run.path} exists already",
                        hint="add --resume auto to continue the run, or use another --out",
                    )
                raise UserError(
                    f"{run.path} contains other files, but no run", hint="use an empty or new folder as --out"
                )
            for path in leftovers:
                path.unlink()
            folders = tuple(map(absolute_address, settings.folders))
            shards = folders if len(folders) > 1 else folders[0]
            run_settings = replace(settings, shards=shards, evaluate=settings.evaluate.with_absolute_paths())
            save_settings(run_settings, run.settings, comment=comment)
    except OSError as error:
        raise UserError(
            f"cannot create the run folder {run.path}: {error.strerror}", hint="use another --out"
        ) from error
    return run


def sweep(run: RunFolder) -> None:
    """Remove the temporary files of killed processes from the folder of a run. The caller must hold the run's lock."""
    for folder in (run.path, run.path / EVALUATIONS):
        for path in _leftover_files(folder, "*"):
            path.unlink(missing_ok=True)


def _leftover_files(folder: Path, name: str) -> list[Path]:
    """Return the temporary files that are left in `folder` after interrupted writes to the file `name`."""
    return [path for path in folder.glob(f"{TEMPORARY_PREFIX}{'[0-9a-f]' * 12}-{name}") if path.is_file()]


def reopen_run(settings: TrainingSettings) -> RunFolder:
    """Open an existing run to resume it.

    Raises:
        UserError: There is no run, or settings that affect the weights differ from the settings of the run.
    """
    from clipmill.train.run.checkpoint import all_checkpoints

    run = open_run(settings.out)
    old_settings = load_settings(run.settings, type(settings))
    checkpoints = all_checkpoints(run.checkpoints)
    hint = "the run has no checkpoint yet: use another --out, or remove the folder"
    if checkpoints:
        require_trained_with(checkpoints[max(checkpoints)], old_settings, file=run.settings)
        hint = f"the run is complete: {NEW_RUN}" if max(checkpoints) >= old_settings.steps else RESUME_HINT
    require_same(weight_settings(old_settings), weight_settings(settings), where=f"the run in {run.path}", hint=hint)
    return run


def require_trained_with(checkpoint: Path, settings: TrainingSettings, *, file: Path) -> None:
    """Check that a settings file and a checkpoint agree on the settings that affect the weights.

    Args:
        settings: Content of the settings file.
        file: Path of the settings file, for the hint.

    Raises:
        UserError: A setting that affects the weights differs.
    """
    from clipmill.train.run.checkpoint import read_content

    require_same(
        read_content(checkpoint)["settings"],
        weight_settings(settings),
        where=str(checkpoint),
        hint=f"restore the settings that the run was trained with; {file} may have been changed by hand",
    )


def is_run(folder: Path) -> bool:
    """Return True if a folder contains a run, that is, a settings.yaml."""
    return RunFolder(folder).settings.is_file()


def open_run(path: Path) -> RunFolder:
    """Open an existing run for reading.

    Raises:
        UserError: There is no run in the folder.
    """
    run = RunFolder(path)
    if not run.settings.is_file():
        raise UserError(f"there is no run in {show_urls(str(path))}", hint="use the --out folder of a training command")
    return run


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in run.json or in the file of an evaluation result.

    Raises:
        UserError: The file cannot be read, or does not contain a JSON object.
    """
    is_evaluation = path.parent.name == EVALUATIONS
    try:
        value = parse_json(path.read_bytes())
        problem = "" if isinstance(value, dict) else " is not a JSON object"
    except (OSError, ValueError) as error:
        problem = f" cannot be read: {error}"
    if problem:
        raise UserError(
            f"{path}{problem}",
            hint="restore the file that `train eval` wrote, or remove it"
            if is_evaluation
            else "restore the run's files",
        )
    return value


def append_lines(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Append JSON objects to a .jsonl file, one per line."""
    lines = "".join(json.dumps(value) + "\n" for value in objects)
    with tag_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects in a .jsonl file; return [] if the file does not exist.

    An incomplete last line, which a killed process may leave behind, is ignored.

    Raises:
        UserError: Any other line is damaged.
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
    """Remove the objects that `belongs` rejects from a .jsonl file, and return the remaining objects.

    Raises:
        UserError: A line is damaged, or was not written by clipmill.
    """
    try:
        kept_values = [value for value in read_lines(path) if belongs(value)]
    except (KeyError, TypeError) as error:
        raise UserError(f"a line of {path} was not written by clipmill: {error}", hint="remove that line") from error
    publish_bytes(path, "".join(json.dumps(value) + "\n" for value in kept_values).encode())
    return kept_values

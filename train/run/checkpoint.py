"""Checkpoints: a folder each, whole or not there, read without executing anything in it.

    step_000500/
        checkpoint.json   step, place in the data, numbers; sizes and checksums of the other files
        tensors.json      name, dtype and size of each tensor, and in which files its pieces are
        __0_0.distcp ...  the tensors, as torch.distributed.checkpoint writes them, some files from each rank
        .metadata         tensors.json for torch's own tools; never read here, because it is a pickle

Names of tensors begin with model., ema., objective. or optimizer.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import UserError
from manifests.json_text import parse_json
from train.data.cursor import LoaderState
from train.distributed.world import World

if TYPE_CHECKING:
    import torch

CHECKPOINT_FORMAT = 3
METADATA_FILE, TABLE_FILE, PICKLED_FILE = "checkpoint.json", "tensors.json", ".metadata"
_NAME = re.compile(r"step_(\d{6,})")
_MANY = 6
_MOST_DIMENSIONS = 12  # a box has 2 ** dimensions corners


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """What a checkpoint holds besides tensors.

    Attributes:
        loader: where each rank's batches end.
        precision: of train.device.precision.Precision.
        settings: that decide the weights, by the names of their flags.
        numbers: of the evaluation at this step; {} where there was none.
    """

    task: str
    step: int
    loader: list[LoaderState]
    settings: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def as_json(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """The content of checkpoint.json; `files` has the size and checksum of each other file."""
        content = {"format": CHECKPOINT_FORMAT, **asdict(self), "files": dict(files)}
        return {**content, "checksum": _checksum_of(content)}


def checkpoint_name(step: int) -> str:
    """Name of the folder of a checkpoint."""
    return f"step_{step:06d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def is_intact(path: Path) -> bool:
    """Whether a checkpoint is complete and all its checksums fit; reads all of it."""
    try:
        read_metadata(path)
    except UserError:
        return False
    return True


def all_checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints by their steps, in ascending order."""
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found)}


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = all_checkpoints(folder)
    return found[max(found)] if found else None


def read_metadata(path: Path, *, world: World | None = None) -> CheckpointMetadata:
    """Reads a checkpoint's facts, after each rank has compared its part of the files with their checksums.

    Raises:
        UserError: a file is damaged, cut short or missing, or of another format; all ranks raise it.
    """
    world = world or World()
    try:
        content = content_of(path)
        files = sorted(content["files"].items())[world.rank :: world.size]
        damage = next((why for name, about in files if (why := _damage(path / name, about))), None)
        facts = CheckpointMetadata(**{name: content[name] for name in CheckpointMetadata.__dataclass_fields__})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        damage, facts = _first_line(error), None
    damages = [one for one in world.gather_objects(damage) if one is not None]
    if damages or facts is None:
        raise _unreadable(path, damages[0])
    return facts


def content_of(path: Path) -> dict[str, Any]:
    """A checkpoint's checkpoint.json; OSError or ValueError where it cannot be read."""
    content = parse_json((path / METADATA_FILE).read_bytes())
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"not a checkpoint of format {CHECKPOINT_FORMAT}")
    if content.pop("checksum", None) != _checksum_of(content):
        raise ValueError(f"the checksum of {METADATA_FILE} does not fit")
    return content


def read_table(path: Path) -> dict[str, Any]:
    """Which tensors a checkpoint has (train.distributed.storage), each of them whole.

    Raises:
        UserError: the table cannot be read, or the pieces of a tensor leave out a part of it or overlap.
    """
    try:
        table = parse_json((path / TABLE_FILE).read_bytes())
        if not isinstance(table, dict):
            raise ValueError(f"{TABLE_FILE} is no table")
        for name, entry in table.items():
            pieces = [(piece["offsets"], piece["sizes"]) for piece in entry["pieces"]]
            if not is_tiled(entry["size"], pieces):
                raise ValueError(f"the pieces of {name} {entry['size']} in {TABLE_FILE} do not make up the tensor")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, _first_line(error)) from error
    return table


def is_tiled(size: Sequence[int], pieces: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes cover every element of a tensor exactly once, and nothing else.

    What covers is a sum of boxes, and a box is known by its corners with alternating signs. These add up to the corners
    of the whole tensor if and only if the boxes add up to it: time is linear in the number of boxes.

    Args:
        pieces: offsets and sizes of each box.

    Raises:
        TypeError: something is no whole number.
        ValueError: a box has another number of dimensions than the tensor, or a negative size.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in ((-1, [0] * len(size), size), *((1, *piece) for piece in pieces)):
        if not len(offsets) == len(sizes) == len(size) <= _MOST_DIMENSIONS or any(length < 0 for length in sizes):
            raise ValueError(f"{sizes} at {offsets} is no part of a tensor {size}")
        ends = [
            ((begin, 1), (begin + length, -1))
            for begin, length in zip(map(index, offsets), map(index, sizes), strict=True)
        ]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * prod(one for _, one in corner)
    return not any(corners.values())


def fill(path: Path, table: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"], *, world: World) -> None:
    """Reads tensors into those of the same names, which may be spread over ranks; all ranks call it.

    Raises:
        UserError: they cannot be read.
    """
    from train.distributed.storage import read_into

    try:
        read_into(path, dict(table), tensors, world=world)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unreadable(path, _first_line(error)) from error


def read_weights(path: Path) -> dict[str, "torch.Tensor"]:
    """The model's weights and buffers on the CPU by name, as one process has them: averages where the run kept some.

    Any process may call it by itself, whatever number of ranks wrote the checkpoint.

    Raises:
        UserError: the checkpoint is damaged, cut short, or of another format.
    """
    import torch

    from train.distributed.storage import dtype_of

    read_metadata(path)
    table = read_table(path)
    wanted = {name.removeprefix("model."): name for name in table if name.startswith("model.")}
    wanted |= {name.removeprefix("ema."): name for name in table if name.startswith("ema.")}
    try:
        weights = {
            name: torch.empty(table[stored]["size"], dtype=dtype_of(table[stored]["dtype"]))
            for name, stored in wanted.items()
        }
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _unreadable(path, _first_line(error)) from error
    fill(path, table, {stored: weights[name] for name, stored in wanted.items()}, world=World())
    return weights


def check_fits(path: Path, table: Mapping[str, Any], wanted: Mapping[str, "torch.Tensor"], *, prefix: str) -> None:
    """Compares the tensors whose names begin with `prefix` with those that are wanted.

    Raises:
        UserError: some are missing, unexpected, or of another size; it names them.
    """
    stored = {name: entry for name, entry in table.items() if name.startswith(prefix)}
    missing = [f"{name} {list(one.shape)}" for name, one in wanted.items() if name not in stored]
    unexpected = [f"{name} {entry['size']}" for name, entry in stored.items() if name not in wanted]
    reshaped = [
        f"{name} {stored[name]['size']} to {list(one.shape)}"
        for name, one in wanted.items()
        if name in stored and stored[name]["size"] != list(one.shape)
    ]
    parts = [
        f"{what}: {', '.join(names[:_MANY])}" + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another size", reshaped))
        if names
    ]
    if parts:
        raise UserError(
            f"{path} is of another model; {'; '.join(parts)}",
            hint="were settings changed by hand? put back what the run was trained with",
        )


def file_facts(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return {"size_bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damage(path: Path, about: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"its file {path.name} is missing"
    if (size_bytes := path.stat().st_size) != about["size_bytes"]:
        return f"its file {path.name} has {size_bytes} bytes of {about['size_bytes']}"
    return None if file_facts(path) == about else f"the checksum of its file {path.name} does not fit"


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(
        f"checkpoint {path} cannot be read: {why}",
        hint="remove it: the one before it, if there is one, is used instead",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

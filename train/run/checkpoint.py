"""Read checkpoints. A checkpoint is a folder that is either complete or missing.

    step_000500/
        checkpoint.json   step, position in the data, and metrics; size and checksum of each other file
        tensors.json      name, dtype and shape of each tensor, and the files that contain the pieces of the tensor
        __0_0.bin ...     bytes of the tensors, one file per rank

The name of each tensor begins with `model.`, `ema.`, `objective.` or `optimizer.`. Unlike unpickling, reading a
checkpoint never executes code.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.locks import open_private, private_root
from clipmill.manifests.publish import parse_json
from clipmill.manifests.storage.mirrors import is_only_in_bucket, local_copy, mirror_of
from clipmill.train.data.order import LoaderState
from clipmill.train.distributed.world import World

if TYPE_CHECKING:
    import torch

CHECKPOINT_FORMAT = 4
METADATA_FILE, TABLE_FILE = "checkpoint.json", "tensors.json"
_NAME = re.compile(r"step_(\d{6,})")
_MAX_SHOWN = 6
_MAX_DIMENSIONS = 12  # maximum number of dimensions of a tensor; a box with n dimensions has 2 ** n corners


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Contents of a checkpoint other than tensors.

    Attributes:
        task: Name of the task.
        step: Number of completed steps.
        loader: Position of each rank in the data.
        settings: Settings that affect the weights, keyed by flag.
        precision: Loss scale and counters (clipmill.train.device.precision.Precision.state_dict).
        numbers: Metrics of the evaluation at this step, keyed by name; {} if there was no evaluation.
        base: Identity of the frozen weights that the checkpoint omits (clipmill.train.weights.sources); {} if the
            checkpoint contains all weights.
    """

    task: str
    step: int
    loader: list[LoaderState]
    settings: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)

    def as_json(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of checkpoint.json.

        Args:
            files: Size and checksum of each other file of the checkpoint, keyed by file name (`file_facts`).
        """
        content = {"format": CHECKPOINT_FORMAT, **asdict(self), "files": dict(files)}
        return {**content, "checksum": _checksum_of(content)}


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the folder name of a checkpoint; None if the path does not have such a name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint at a step."""
    return f"step_{step:06d}"


def is_checkpoint_name(name: str) -> bool:
    """Return True if `name` is the folder name of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def is_intact(path: Path) -> bool:
    """Return True if a checkpoint is complete and all checksums match. The entire checkpoint is read."""
    try:
        read_metadata(path)
    except UserError:
        return False
    return True


def all_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the paths of all checkpoints in a folder, keyed by step, in ascending order.

    In a bucket, incomplete checkpoints are omitted.
    """
    checkpoints = {int(match[1]): path for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))}
    if checkpoints and mirror_of(folder) is not None:
        checkpoints = {step: path for step, path in checkpoints.items() if _is_uploaded(path)}
    return {step: checkpoints[step] for step in sorted(checkpoints)}


def _is_uploaded(path: Path) -> bool:
    """Return True if a checkpoint in a bucket contains checkpoint.json and all files that checkpoint.json lists.

    Files may be missing, because a delayed request may write checkpoint.json after the checkpoint has been removed.
    """
    if not (path / METADATA_FILE).is_file():
        return False
    try:
        return all((path / name).is_file() for name in content_of(path)["files"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return True  # the damage is reported when the checkpoint is read


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the path of the checkpoint with the highest step; None if there is no checkpoint."""
    checkpoints = all_checkpoints(folder)
    return checkpoints[max(checkpoints)] if checkpoints else None


def read_metadata(path: Path, *, world: World | None = None) -> CheckpointMetadata:
    """Read checkpoint.json, and verify the checksums of all files. The ranks divide the files among themselves.

    All ranks of `world` must call this function. In a bucket, each part is verified later, by the ranks that read it.

    Args:
        world: Ranks that share the verification; None if only this process reads the checkpoint.

    Raises:
        UserError: A file is missing or damaged. The error is raised on all ranks.
    """
    world = world or World()
    try:
        content = content_of(path)
        files = sorted(content["files"].items())[world.rank :: world.size]
        damage = next((problem for name, facts in files if (problem := _find_damage(path / name, facts))), None)
        content.setdefault("base", {})  # checkpoints from versions without adapters lack this key
        metadata = CheckpointMetadata(**{name: content[name] for name in CheckpointMetadata.__dataclass_fields__})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        damage, metadata = first_line(error), None
    damages = [rank_damage for rank_damage in world.gather_objects(damage) if rank_damage is not None]
    if damages or metadata is None:
        raise _unreadable_error(path, damages[0])
    return metadata


def read_content(path: Path) -> dict[str, Any]:
    """Parse checkpoint.json like `content_of`. The other files are not read.

    Raises:
        UserError: checkpoint.json cannot be read.
    """
    try:
        return content_of(path)
    except (OSError, ValueError) as error:
        raise _unreadable_error(path, first_line(error)) from error


def content_of(path: Path) -> dict[str, Any]:
    """Parse checkpoint.json, and verify its checksum.

    Raises:
        OSError: checkpoint.json cannot be read.
        ValueError: checkpoint.json is damaged or has a different format.
    """
    content = parse_json((path / METADATA_FILE).read_bytes())
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"not a checkpoint of format {CHECKPOINT_FORMAT}")
    if content.pop("checksum", None) != _checksum_of(content):
        raise ValueError(f"the checksum of {METADATA_FILE} does not match")
    return content


def read_table(path: Path) -> dict[str, Any]:
    """Read the table of tensors, tensors.json (clipmill.train.distributed.storage).

    Raises:
        UserError: The table cannot be read, or the pieces of a tensor overlap or leave gaps.
    """
    try:
        table = parse_json((path / TABLE_FILE).read_bytes())
        if not isinstance(table, dict):
            raise ValueError(f"{TABLE_FILE} is not a table")
        for name, entry in table.items():
            pieces = [(piece["offsets"], piece["sizes"]) for piece in entry["pieces"]]
            if not is_tiled(entry["size"], pieces):
                raise ValueError(f"the pieces of {name} {entry['size']} in {TABLE_FILE} overlap or leave gaps")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unreadable_error(path, first_line(error)) from error
    return table


def is_tiled(size: Sequence[int], pieces: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if pieces cover each element of a tensor exactly once, and nothing outside the tensor.

    A piece is a box. The boxes tile the tensor if and only if the sum of their signed corners equals the signed corners
    of the tensor. The sum takes O(number of boxes) time.

    Args:
        size: Shape of the tensor.
        pieces: Offsets and sizes of each piece, one number per dimension.

    Raises:
        TypeError: A number is not an integer.
        ValueError: The numbers do not describe a box.
    """
    tensor_box = ([0] * len(size), size)
    boxes = [(list(map(index, offsets)), list(map(index, sizes))) for offsets, sizes in (tensor_box, *pieces)]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size) <= _MAX_DIMENSIONS or min(sizes, default=0) < 0:
            raise ValueError(f"{sizes} at {offsets} is not part of a tensor {size}")
    if boxes[1:] == boxes[:1]:
        return True  # most tensors have a single piece
    corners: Counter[tuple[int, ...]] = Counter()
    for box_index, (offsets, sizes) in enumerate(boxes):
        sign = 1 if box_index else -1
        ends = [((start, 1), (start + length, -1)) for start, length in zip(offsets, sizes, strict=True)]
        for corner in product(*ends):
            corners[tuple(offset for offset, _ in corner)] += sign * prod(factor for _, factor in corner)
    return not any(corners.values())


def fill(path: Path, table: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"], *, world: World) -> None:
    """Load stored values into `tensors`, which may be sharded. All ranks of `world` must call this function.

    Args:
        table: Table of the stored tensors (`read_table`).
        tensors: Tensors to fill, keyed by their names in the checkpoint.

    Raises:
        UserError: A file of the checkpoint cannot be read.
    """
    from clipmill.train.distributed.storage import read_into

    is_shared = world.size > 1 and mirror_of(path) is not None
    try:
        with _shared_parts() if is_shared else nullcontext(open_part) as opener:
            read_into(path, dict(table), tensors, world=world, open_part=opener)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unreadable_error(path, first_line(error)) from error


def read_weights(path: Path) -> dict[str, "torch.Tensor"]:
    """Load the weights and buffers of a checkpoint on the CPU. If the run used EMA, load the averaged weights.

    The checkpoint may have been written by any number of ranks. If the checkpoint has a `base`, the frozen weights are
    not included (`clipmill.train.weights.sources.complete_weights` adds them).

    Returns:
        Weights and buffers, keyed by their names in the model.

    Raises:
        UserError: The checkpoint is damaged or truncated, or has a different format.
    """
    import torch

    from clipmill.train.distributed.storage import dtype_of

    read_metadata(path)
    table = read_table(path)
    entries = {name.removeprefix("model."): name for name in table if name.startswith("model.")}
    entries |= {name.removeprefix("ema."): name for name in table if name.startswith("ema.")}
    try:
        weights = {
            name: torch.empty(table[stored_name]["size"], dtype=dtype_of(table[stored_name]["dtype"]))
            for name, stored_name in entries.items()
        }
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _unreadable_error(path, first_line(error)) from error
    fill(path, table, {stored_name: weights[name] for name, stored_name in entries.items()}, world=World())
    return weights


def check_fits(path: Path, table: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"], *, prefix: str) -> None:
    """Check that the stored tensors whose names begin with `prefix` have the names and shapes of `tensors`.

    Raises:
        UserError: A stored tensor is missing, unexpected, or of a different shape.
    """
    stored_entries = {name: entry for name, entry in table.items() if name.startswith(prefix)}
    missing = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in stored_entries]
    unexpected = [f"{name} {entry['size']}" for name, entry in stored_entries.items() if name not in tensors]
    reshaped = [
        f"{name} {stored_entries[name]['size']} instead of {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in stored_entries and stored_entries[name]["size"] != list(tensor.shape)
    ]
    parts = [
        f"{label}: {', '.join(names[:_MAX_SHOWN])}"
        + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
        for label, names in (("missing", missing), ("unexpected", unexpected), ("of a different shape", reshaped))
        if names
    ]
    if parts:
        raise UserError(
            f"{path} belongs to a different model; {'; '.join(parts)}",
            hint="restore the settings that the run was trained with; they may have been changed by hand",
        )


def file_facts(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return {"size_bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def open_part(path: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading. A file that exists only in a bucket is downloaded and verified.

    Raises:
        OSError: The file cannot be read.
        ValueError: The checksum of the file does not match.
    """
    if not is_only_in_bucket(path):
        return path.open("rb")
    from clipmill.shards.opening import open_regular

    file = os.fdopen(open_regular(path), "rb")
    if hashlib.file_digest(file, "sha256").hexdigest() != content_of(path.parent)["files"][path.name]["sha256"]:
        file.close()
        raise ValueError(f"the checksum of {path.name} does not match")
    file.seek(0)
    return file


@contextmanager
def _shared_parts() -> Iterator[Callable[[Path], BinaryIO]]:
    """Yield a replacement for `open_part` that downloads each file only once per node.

    The downloaded files stay on the disk until the block has ended on all ranks of the node.
    """
    from clipmill.manifests.storage.cache import DamagedCopy, ObjectCache

    folder = private_root("parts")
    os.close(open_private(folder))
    cache = ObjectCache(folder, limit_bytes=sys.maxsize, is_durable=False)

    def open_shared(path: Path) -> BinaryIO:
        if not is_only_in_bucket(path):
            return path.open("rb")

        def fetch(target: Path) -> None:
            with local_copy(path):
                os.link(path, target)

        facts = content_of(path.parent)["files"][path.name]
        try:
            copy = cache.get(facts["sha256"], **facts, fetch=fetch)
        except DamagedCopy as error:
            raise ValueError(f"the checksum of {path.name} does not match") from error
        assert copy is not None
        copies.enter_context(copy)
        return os.fdopen(os.dup(copy.descriptor), "rb")

    try:
        with ExitStack() as copies:
            yield open_shared
    finally:
        cache.remove_unused()


def _find_damage(path: Path, facts: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    if (size_bytes := path.stat().st_size) != facts["size_bytes"]:
        return f"{path.name} has {size_bytes} of {facts['size_bytes']} bytes"
    # The checksum of a part that exists only in a bucket is verified when the part is opened.
    is_sound = is_only_in_bucket(path) or file_facts(path) == facts
    return None if is_sound else f"the checksum of {path.name} does not match"


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def removal_hint(path: Path) -> str:
    """Return a hint to remove an unusable checkpoint. The hint also says which checkpoint is used instead."""
    step = checkpoint_step(path)
    earlier_checkpoints = [
        checkpoint
        for other_step, checkpoint in all_checkpoints(path.parent).items()
        if step is not None and other_step < step
    ]
    if not earlier_checkpoints:
        return "remove this checkpoint; training then restarts at step 0, because there is no earlier checkpoint"
    return f"remove this checkpoint; {earlier_checkpoints[-1].name} is then used instead"


def _unreadable_error(path: Path, reason: str) -> UserError:
    return UserError(
        f"checkpoint {path} cannot be read: {reason}",
        hint=removal_hint(path),
    )

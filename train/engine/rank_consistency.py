"""Check that all ranks run the same command with the same settings, versions and data.

Paths to data may differ between machines, so the content of the data is compared. The flags in MACHINE_FLAGS may differ
too.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_manifest
from clipmill.shards.commit_table import committed_tars
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.train.config.shards import folder_names, is_local_folder
from clipmill.train.config.training import TrainingSettings, flatten, plain_values
from clipmill.train.data.loader import TrainingSet
from clipmill.train.distributed.launch import COMMAND, Start, difference
from clipmill.train.distributed.world import World
from clipmill.train.run.environment import versions

# Flags for the location of the data and the speed of reading. They do not affect the trained weights.
MACHINE_FLAGS = frozenset({"shards", "cache", "cache_size", "workers", "batches_ahead"})
SAME_LAUNCH = (
    "start every rank with the same command and flags, and the same versions of clipmill and torch; only "
    f"{', '.join('--' + name.replace('_', '-') for name in sorted(MACHINE_FLAGS))} may differ"
)


class NamedSamples(TrainingSet, Protocol):
    """Training set that reports the variant of its data."""

    @property
    def variant_name(self) -> str:
        """Names of the variants that the samples are read from."""
        ...


Samples = TypeVar("Samples", bound=NamedSamples)


def launch_facts(settings: TrainingSettings, *, resume: object) -> Start:
    """Return the command, versions and settings of this rank, to compare them with the other ranks."""
    values = flatten(
        {name: value for name, value in plain_values(asdict(settings)).items() if name not in MACHINE_FLAGS}
    )
    # The paths of the evaluated data may differ too.
    evaluations = [f"{data.name}: split {data.split}, {data.protocol}" for data in settings.evaluate.evaluated_data()]
    values["evaluate.shards"] = evaluations if settings.evaluate.shards else []
    installed_versions = versions()
    return {
        COMMAND: f"train {settings.command}",
        "clipmill": installed_versions["clipmill"],
        # Patch releases of torch may differ.
        "torch": ".".join(installed_versions["torch"].split(".")[:2]),
        **{f"--{name.replace('_', '-')}": value for name, value in flatten({**values, "resume": resume}).items()},
    }


def open_consistent(
    open_samples: Callable[[], Samples], settings: TrainingSettings, *, columns: tuple[str, ...], world: World
) -> Samples:
    """Open the training set on every rank, and check that all ranks have the same data.

    Args:
        columns: Columns of the data folder that the samples are read from.

    Raises:
        UserError: The data differ, or a rank cannot open its data. All ranks raise the same error.
    """
    samples = world.each(open_samples)
    if world.size == 1:
        return samples
    ranks: list[Start] = world.gather_objects(world.each(lambda: _content(samples, settings, columns=columns)))
    if content_difference := difference(ranks):
        paths = difference([{"--shards": " ".join(folders)} for folders in world.gather_objects(settings.folders)])
        raise UserError(
            f"the ranks do not have the same data: {content_difference}" + (f"; {paths}" if paths else ""),
            hint="use the same data folder, or an exact copy of it, on every rank",
        )
    return samples


def _content(samples: NamedSamples, settings: TrainingSettings, *, columns: tuple[str, ...]) -> Start:
    """Return values that identify the training and evaluation data of a rank."""
    content: dict[str, object] = {}
    folders = settings.folders
    named_folders = dict(zip([f" of {name}" for name in folder_names(folders)], folders, strict=True))
    named_folders = named_folders if len(folders) > 1 else {"": settings.folder}
    evaluated_folders = {
        f" of {data.name}": data.shards for data in settings.evaluated_data() if data.shards is not None
    }
    for name, shards in {**named_folders, **(evaluated_folders if settings.evaluate.every else {})}.items():
        if is_local_folder(shards):
            content[f"manifest{name}"] = str(read_manifest(Path(shards))["fingerprint"])[:16]
            for column in columns:
                content[f"column {column}{name}"] = _column(Path(shards), column)
    return {**content, "variant": samples.variant_name, "set of samples": samples.fingerprint[:16]}


def _column(data_dir: Path, column: str) -> str:
    """Return the hash of the committed shards of a column."""
    variant = current_variant(data_dir, column)
    if variant is None:
        return "missing"
    digest = hashlib.sha256()
    for shard_id, split, tar_sha256 in committed_tars(variant_dir(data_dir, column, variant)):
        digest.update(f"{shard_id} {split} {tar_sha256}\n".encode())
    return digest.hexdigest()[:16]

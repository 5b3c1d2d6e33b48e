"""Flags that the commands of all columns share, as the dataclass `Request`. A column may add flags in a subclass.

The command line passes the request as one object to the functions of the column. `model_folder` resolves the value of a
flag that selects a model.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.formatting import parse_size
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.monitoring import Monitoring
from clipmill.manifests.settings import Checked, Range, errors_of, mistakes, raise_mistakes
from clipmill.manifests.storage.mirrors import is_remote, reject_mistyped_url
from clipmill.prep.core.column import DATA_VARIABLE
from clipmill.prep.core.recipe import KEPT, marked_fields
from clipmill.prep.engines.execution import Execution

if TYPE_CHECKING:
    from clipmill.prep.engines import Engine


_CLUSTER = re.compile(r"auto|local|(ray://)?[^\s/]+:\d{1,5}", re.ASCII)
EXECUTION = Parameter(group=Group("Execution", sort_key=8))


def _data_folder(_type: Any, tokens: Sequence[Token]) -> Path:
    """Convert --data to a local path: the path itself, or the working copy of a data folder in a bucket."""
    value = tokens[0].value
    if not is_remote(value):
        reject_mistyped_url(value)
        return Path(value)
    from clipmill.manifests.storage.mounting import open_data

    return open_data(value)


Data = Annotated[
    Path,
    FIRST_RUN,
    Parameter(
        name="--data",
        env_var=DATA_VARIABLE,
        converter=_data_folder,
        help="Data folder: a path, or the URL of a folder in a bucket, such as s3://BUCKET/data.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
EngineName = Annotated[
    Literal["ray", "processes"] | None,
    EXECUTION,
    FIRST_RUN,
    Parameter(
        help="Execution engine. processes: worker processes on this machine; ray: a Ray cluster, or Ray on this "
        "machine. Default: processes; with --address or RAY_ADDRESS, ray."
    ),
]
Address = Annotated[
    str | None,
    EXECUTION,
    Parameter(help="Address of a running Ray cluster: auto or HOST:PORT. Default: RAY_ADDRESS, if it is set."),
]
Workers = Annotated[
    int | None,
    EXECUTION,
    FIRST_RUN,
    Range(least=1),
    Parameter(help="Number of shards to make in parallel, 1 or more. Default: one per CPU core."),
]
MaxFailures = Annotated[
    str,
    EXECUTION,
    Parameter(
        help="Maximum number or percentage of videos that may fail, such as 10 or 1%. If more videos fail, the exit "
        "code is 1."
    ),
]
ScratchSize = Annotated[
    str | None,
    EXECUTION,
    Parameter(
        env_var="CLIPMILL_SCRATCH_SIZE",
        help="Maximum total size of the copies of remote videos in TMPDIR on each node, such as 200GB. Default: 80 % "
        "of the free space.",
    ),
]
PartOf = Annotated[
    str | None,
    EXECUTION,
    Parameter(
        name="--part",
        allow_leading_hyphen=True,  # so that Part.parse explains what is wrong with -1/2
        help="Part of the shards to make, such as 3/16 for part 3 of 16. Use it if several commands, such as the tasks "
        "of a SLURM array, share the work. Default: all shards.",
    ),
]
ModelWorkers = Annotated[
    int | None,
    EXECUTION,
    FIRST_RUN,
    Range(least=1),
    Parameter(help="Number of model replicas, 1 or more. Default: one per GPU, or one per CPU core."),
]
NumGpus = Annotated[
    float | None,
    EXECUTION,
    Range(least=0),
    Parameter(
        help="Number of GPUs per worker, such as 1 or 0.5. With 0, the model runs on the CPU. Default: 1 if this "
        "machine, or the Ray cluster at --address, has a GPU; otherwise 0."
    ),
]
_HIDDEN = Parameter(parse=False)


@dataclass(frozen=True, kw_only=True)
class Request(Checked):
    """Flags of a command that are not settings of its column.

    Attributes:
        execution: Settings of the Ray engine.
        monitoring: Flags for metrics and the log.
        part: Value of `--part`, or None.
        num_gpus: Number of GPUs per worker; None for the default.
        batch: Batch size of the model; None for the default.
        scratch_size: Maximum size of the copies of remote videos on a node, such as 200GB; None for the default.
        trial: Number of samples to make for the estimate of a plan.
        retry_codes: Codes of failures to retry even if nothing has changed.
        only_variant: Name of the variant that the recipe must produce, or None.
        part_run: Part that this command runs (`clipmill.prep.core.parts.PartRun`), or None.
    """

    data: Data = Path("data")
    engine: EngineName = None
    address: Address = None
    execution: Annotated[Execution, Parameter(name="*")] = Execution()  # noqa: RUF009 - frozen
    monitoring: Annotated[Monitoring, Parameter(name="*")] = Monitoring()  # noqa: RUF009 - frozen
    workers: Workers = None
    max_failures: MaxFailures = "0"
    # `part`, `num_gpus`, `batch` and `scratch_size` are flags only in subclasses that declare them again.
    part: Annotated[str | None, _HIDDEN] = None
    num_gpus: Annotated[float | None, _HIDDEN] = None
    batch: Annotated[int | None, _HIDDEN] = None
    scratch_size: Annotated[str | None, _HIDDEN] = None
    json: Json = False
    # The next fields are set by the program, not by flags.
    trial: Annotated[int, _HIDDEN] = 0
    retry_codes: Annotated[frozenset[str], _HIDDEN] = frozenset()
    only_variant: Annotated[str | None, _HIDDEN] = None
    part_run: Annotated[Any, _HIDDEN] = None

    @property
    def scratch_bytes(self) -> int | None:
        """Value of `scratch_size` in bytes.

        Raises:
            UserError: `scratch_size` is not a size.
        """
        return None if self.scratch_size is None else parse_size(self.scratch_size, flag="--scratch-size")

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster to run on; None for this machine."""
        from clipmill.prep.engines.choice import cluster_address

        return None if self.engine == "processes" else cluster_address(self.address)

    @property
    def engine_name(self) -> str:
        """Value of `engine`, or the default engine."""
        return self.engine or ("processes" if self.address is None and self.cluster is None else "ray")

    @property
    def recorded_flags(self) -> dict[str, str]:
        """Flags to record with a run: flags that `prep retry` uses again and that differ from their defaults."""
        default = type(self)()
        values = {name: getattr(self, name) for name in marked_fields(type(self), KEPT)}
        flags = {name: str(value) for name, value in values.items() if value != getattr(default, name)}
        # Record the engine unless it is the default engine.
        if self.address is not None:
            flags["address"] = self.address
        elif self.engine is not None and self.engine != replace(self, engine=None).engine_name:
            flags["engine"] = self.engine
        return flags

    @property
    def lag_limit_s(self) -> float:
        """Maximum time in seconds until files written on other nodes are visible on this node."""
        from clipmill.prep.core.data_folder import VISIBILITY_LIMIT_S

        return VISIBILITY_LIMIT_S if self.cluster is not None else 0.0

    def __post_init__(self) -> None:
        """Skip the checks, which `check` runs: some depend on the environment, but defaults are created at import."""

    def check(self) -> None:
        """Check the flags.

        Raises:
            UserError: Flags have invalid values or contradict each other. The error lists all of them.
        """
        raise_mistakes(mistakes(self))

    def rules(self) -> Iterator[UserError]:
        """Yield an error for each invalid size or cluster address, and for flags that contradict each other."""
        yield from errors_of(lambda: self.scratch_bytes)
        if self.address is not None and not _CLUSTER.fullmatch(self.address):
            yield UserError(
                f'--address "{self.address}" is not the address of a Ray cluster',
                hint="use auto, or HOST:PORT such as 10.0.0.1:6379",
                flags=("--address",),
            )
        elif self.address is not None and self.engine == "processes":
            yield UserError(
                f"--address {self.address} requires --engine ray",
                hint="omit --engine processes, or omit --address",
                flags=("--address", "--engine"),
            )
        elif self.address is None and self.cluster is not None and not _CLUSTER.fullmatch(self.cluster):
            yield UserError(
                f'RAY_ADDRESS "{self.cluster}" is not the address of a Ray cluster',
                hint="set RAY_ADDRESS to auto, or to HOST:PORT such as 10.0.0.1:6379; or use --engine processes",
            )
        if (changed_flags := self.execution.changed_flags) and self.engine_name != "ray":
            flags = ", ".join(changed_flags)
            yield UserError(
                f"{flags} requires --engine ray",
                hint=f"use --engine ray or --address, or omit {flags}",
                flags=(*changed_flags, "--engine"),
            )
        # Ray already distributes the work over the nodes.
        if self.cluster is not None and self.part is not None:
            source = "RAY_ADDRESS=" if self.address is None else "--address "
            yield UserError(
                f"--part {self.part} cannot be used with {source}{self.cluster}: Ray distributes the work itself",
                hint="omit --part to use all nodes of the cluster, or use --engine processes without --address",
                flags=("--part",),
            )

    def gpus_per_worker(self, *, has_work: bool) -> float:
        """Return the number of GPUs per worker: `num_gpus`, or its default.

        Args:
            has_work: False if there is nothing to make. The result is then 0.0, because detecting GPUs takes seconds.

        Raises:
            UserError: No cluster is running at the address.
        """
        from clipmill.prep.engines.choice import resolve_gpus_per_worker

        return resolve_gpus_per_worker(self.num_gpus, address=self.cluster) if has_work else 0.0

    def open_engine(self, *, memory_gb: float, gpus_per_worker: float = 0.0) -> "Engine":
        """Return the engine that the flags select.

        Args:
            memory_gb: Memory to reserve for a worker on a cluster in GB, unless a flag sets it.
            gpus_per_worker: Number of GPUs per worker.

        Raises:
            UserError: This machine has fewer GPUs than a worker needs.
        """
        from clipmill.prep.engines.choice import open_engine

        return open_engine(
            self.engine_name,
            address=self.cluster,
            workers=self.workers,
            gpus_per_worker=gpus_per_worker,
            execution=self.execution,
            memory_gb=memory_gb,
        )

    def require_variant(self, variant: str, *, command: str) -> None:
        """Check that the settings still produce the variant to retry, `only_variant`.

        Args:
            variant: Name of the variant that the settings produce now.
            command: Command line that makes this variant.

        Raises:
            UserError: The settings produce a different variant, because the model weights, the libraries or the current
                variant of `video` have changed.
        """
        if self.only_variant is not None and variant != self.only_variant:
            raise UserError(
                f"cannot continue variant {self.only_variant}: its model weights, libraries or chunks have changed",
                hint=f"run {command} to create a new variant",
            )


@dataclass(frozen=True, kw_only=True)
class PartRequest(Request):
    """Flags of a column whose shards can be divided among several commands (`--part`)."""

    part: PartOf = None


@dataclass(frozen=True, kw_only=True)
class ModelRequest(PartRequest):
    """Flags of a column that a model computes. Each worker loads a replica of the model."""

    workers: ModelWorkers = None
    num_gpus: NumGpus = None


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Checked):
    """Flags of `prep plan NAME` that are not settings of the column.

    Attributes:
        explain: Chunk key or video ID whose state to explain; None to report the plan.
        trial: Number of samples to make for the estimate.
    """

    # `explain` and `trial` are flags only in subclasses that declare them again.
    trial: Annotated[int, _HIDDEN] = 0
    data: Data = Path("data")
    explain: Annotated[str | None, _HIDDEN] = None
    json: Json = False


def model_folder(name: str, *, files: Sequence[str], what: str, flag: str, hint: str) -> Path:
    """Return the absolute path of a model's folder: a local folder, or a model downloaded from the Hugging Face Hub.

    Args:
        name: Path of a local folder, or name of a model on the Hub, such as google/umt5-xxl.
        files: Glob patterns of the files to download.
        what: Noun for the model in messages, such as "VAE"; "" for none.
        flag: Flag that selects the model, for messages, followed by its value if the value differs from `name`.
        hint: Hint for the errors.

    Raises:
        UserError: The folder does not exist, the model is not in the cache and cannot be downloaded, or huggingface_hub
            is not installed.
    """
    from clipmill.manifests.hub import hub_if_reachable

    folder, noun = Path(name).expanduser(), f"{what} " if what else ""
    if folder.is_dir():
        return folder.resolve()
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(f"the {noun}folder {name} (requested by {flag}) does not exist", hint=hint)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise UserError("huggingface_hub is not installed", hint="install clipmill[columns]") from None
    try:
        with hub_if_reachable():
            return Path(snapshot_download(name, allow_patterns=list(files)))
    # All exceptions for network, cache and server errors derive from these classes.
    except (OSError, HFValidationError, ValueError) as error:
        subject = f"the {what} " if what else ""
        raise UserError(
            f'{subject}"{name}" cannot be downloaded from the Hugging Face Hub: {first_line(error)}', hint=hint
        ) from None

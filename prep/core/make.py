"""Planning and making a column: code shared by `prep chunk`, `prep latents`, `prep text` and `prep plan`.

It also defines the flags that these commands share; their values form a `Request`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.manifests.storage.mirrors import is_remote, require_not_mistyped
from clipmill.prep.core.column import DATA_VARIABLE, ColumnPlan, ColumnSpec, RunSummary
from clipmill.prep.core.lag import LIMIT_S
from clipmill.prep.engines.execution import Execution

_CLUSTER = re.compile(r"auto|local|(ray://)?[^\s/]+:\d{1,5}", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kMGT])B", re.ASCII)

if TYPE_CHECKING:
    from clipmill.prep.core.parts import PartRun
    from clipmill.prep.core.report import Report

EXECUTION = Parameter(group=Group("Execution", sort_key=8))
OPTIONS = Group("Options", sort_key=9)  # of flags without another group


def _data_folder(_type: Any, tokens: Sequence[Token]) -> Path:
    """Convert --data: a local path, or the address of a folder in a bucket, which a local folder then mirrors."""
    value = tokens[0].value
    if not is_remote(value):
        require_not_mistyped(value)
        return Path(value)
    from clipmill.manifests.storage.attaching import open_data

    return open_data(value)


Data = Annotated[
    Path,
    FIRST_RUN,
    Parameter(
        name="--data",
        env_var=DATA_VARIABLE,
        converter=_data_folder,
        help="Data folder: a path, or a folder in a bucket such as s3://BUCKET/data.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
EngineName = Annotated[
    Literal["ray", "processes"],
    EXECUTION,
    FIRST_RUN,
    Parameter(help="Execution engine. ray: this machine or a cluster; processes: worker processes on this machine."),
]
Address = Annotated[
    str | None,
    EXECUTION,
    Parameter(help="Address of an existing Ray cluster: auto or host:port. Default: start Ray on this machine."),
]
Workers = Annotated[
    int | None,
    EXECUTION,
    FIRST_RUN,
    Parameter(help="Number of shards to make in parallel, 1 or more. Default: one per CPU core."),
]
MaxFailures = Annotated[
    str,
    EXECUTION,
    Parameter(help="Number or percentage of videos that may fail before the command exits with 1, such as 10 or 1%."),
]
ScratchSize = Annotated[
    str | None,
    EXECUTION,
    Parameter(
        env_var="CLIPMILL_SCRATCH_SIZE",
        help="Maximum total size of the copies of remote videos on a node, in its $TMPDIR, such as 200GB. Default: "
        "80 % of the free space.",
    ),
]
PartOf = Annotated[
    str | None,
    EXECUTION,
    Parameter(
        name="--part",
        allow_leading_hyphen=True,  # so that Part.parse says what is wrong with -1/2
        help="Part of the shards to make, such as 3/16, for commands on several nodes (a SLURM array). Default: all.",
    ),
]
ModelWorkers = Annotated[
    int | None,
    EXECUTION,
    FIRST_RUN,
    Parameter(help="Number of model replicas, 1 or more. Default: one per GPU, or one per CPU core."),
]
NumGpus = Annotated[
    float | None,
    EXECUTION,
    Parameter(
        help="GPUs per worker, such as 1 or 0.5; 0: run on the CPU. Default: 1 if this machine, or the Ray cluster at "
        "--address, has a GPU, else 0."
    ),
]
ExecutionFlags = Annotated[Execution, Parameter(name="*")]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of a command that are not settings of its column.

    Attributes:
        execution: settings of the Ray engine.
        num_gpus: number of GPUs per worker; None if not given.
        batch: batch size of the model; None if not given.
        retry_codes: failure codes to try again even if nothing changed.
        only_variant: name of the variant that the settings must produce, or None.
        scratch_size: limit of the copies of remote videos on a node, such as 200GB; None for most of the free space.
        part: value of `--part`, or None.
        part_run: set while a part runs; columns pass it to `clipmill.prep.core.run.execute`.
    """

    data: Path
    engine: str = "ray"
    address: str | None = None
    execution: Execution = field(default_factory=Execution)
    workers: int | None = None
    num_gpus: float | None = None
    batch: int | None = None
    max_failures: str = "0"
    json: bool = False
    retry_codes: frozenset[str] = frozenset()
    only_variant: str | None = None
    scratch_size: str | None = None
    part: str | None = None
    part_run: "PartRun | None" = None

    @property
    def scratch_bytes(self) -> int | None:
        """`scratch_size` in bytes.

        Raises:
            UserError: it is not a size.
        """
        if self.scratch_size is None:
            return None
        found = _SIZE.fullmatch(self.scratch_size)
        if found is None:
            raise UserError(
                f'--scratch-size "{self.scratch_size}" is not a size', hint="give a number with a unit, such as 200GB"
            )
        return int(float(found[1]) * 1000 ** "kMGT".index(found[2]) * 1000)

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster that does the work; None for this machine."""
        from clipmill.prep.engines.ray_connection import cluster_address

        return cluster_address(self.address) if self.engine == "ray" else None

    @property
    def lag_limit_s(self) -> float:
        """How long files that workers have written may take to become visible here."""
        return LIMIT_S if self.cluster is not None else 0.0

    def check(self) -> None:
        """Validate the flags.

        Raises:
            UserError: a flag has an invalid value, or flags contradict each other.
        """
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers} is out of range", hint="give 1 or more, or omit it")
        if self.num_gpus is not None and not 0 <= self.num_gpus < float("inf"):
            raise UserError(
                f"--num-gpus {self.num_gpus:g} is out of range", hint="give 1, a fraction such as 0.5, or 0 for the CPU"
            )
        _ = self.scratch_bytes
        if self.address is not None and not _CLUSTER.fullmatch(self.address):
            raise UserError(
                f'--address "{self.address}" is not the address of a Ray cluster',
                hint="give auto, or host:port such as 10.0.0.1:6379",
            )
        if self.address is not None and self.engine != "ray":
            raise UserError(
                f"--address {self.address} requires --engine ray", hint="omit --engine processes, or omit --address"
            )
        if self.execution.changed and self.engine != "ray":
            flags = ", ".join(self.execution.changed)
            raise UserError(f"{flags} requires --engine ray", hint=f"omit --engine processes, or omit {flags}")
        if self.address is not None and self.part is not None:
            raise UserError(
                f"--part {self.part} has no effect with --address {self.address}: Ray divides the work itself",
                hint="omit --part to use all nodes of the cluster, or omit --address",
            )

    def require_variant(self, found: str, *, command: str) -> None:
        """Check that the recipe read from a variant still produces that variant.

        Raises:
            UserError: the weights, the libraries or the current variant of `video` have changed since.
        """
        if self.only_variant is not None and found != self.only_variant:
            raise UserError(
                f"cannot continue variant {self.only_variant}: its model weights, libraries or chunks have changed",
                hint=f"create a new variant: {command}",
            )


def parse_budget(text: str) -> Callable[[int], float]:
    """Parse `--max-failures` into a function from the number of videos to the number that may fail.

    Raises:
        UserError: `text` is neither a number nor a percentage.
    """
    share = text.removesuffix("%")
    try:
        value = float(share) if share != text else int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if share != text else float("inf")):
        raise UserError(
            f'--max-failures "{text}" is not a number or percentage',
            hint="give a number of videos such as 10, or a percentage such as 1%",
        )
    return (lambda num_videos: int(num_videos * value / 100)) if share != text else (lambda num_videos: value)


def plan_column(column: ColumnSpec, settings: Any, *, data: Path, json: bool) -> None:
    """Print what making the column would do, and why.

    Raises:
        UserError: a record is damaged.
    """
    with Activity("planning"):
        from clipmill.prep.core.data_folder import require_data_folder
        from clipmill.prep.core.report import show, with_file_problems

        data_dir = require_data_folder(data)
        plan = column.plan(data_dir, settings, Request(data=data))
        report = with_file_problems(column.plan_report(plan), column, plan.variant_dir, data_dir=data_dir)
    show(report, json=json)


def make_column(column: ColumnSpec, settings: Any, request: Request) -> None:
    """Plan and make the column, and print a summary.

    Raises:
        UserError: the request is invalid, or this machine lacks something that the settings need.
        FailedWork: the run gave up, or more videos failed than `--max-failures` allows.
    """
    budget = parse_budget(request.max_failures)
    request.check()
    with Activity("planning") as now:
        plan, summary, report, listed = _made(column, settings, request, now)
    from clipmill.prep.core.report import show

    show(report, json=request.json)
    if summary.gave_up is not None:
        raise FailedWork(f"{summary.gave_up}; finished work is kept; run the same command again to resume")
    if summary.num_failed_videos > budget(plan.num_videos):
        failed = f"{summary.num_failed_videos} of {counted(plan.num_videos, 'video')}"
        raise FailedWork(f"{failed} failed; failures are listed in {listed}")
    if summary.failures:
        failed = counted(summary.num_failed_videos, "video")
        sys.stderr.write(f"{failed} failed, within --max-failures {request.max_failures}\n")


def _made(
    column: ColumnSpec, settings: Any, request: Request, now: Activity
) -> "tuple[ColumnPlan, RunSummary, Report, Path]":
    """Plan and make the column; return the plan, the summary, its report, and the path of the list of failures."""
    from clipmill.prep.core.data_folder import require_data_folder, writing
    from clipmill.prep.core.ending import with_ending
    from clipmill.prep.core.part_locks import Part
    from clipmill.prep.core.parts import writing_part
    from clipmill.prep.core.report import with_part
    from clipmill.prep.core.run import FAILURES_FILE
    from clipmill.shards.dataset import current_variant

    part = None if request.part is None else Part.parse(request.part)
    data_dir = require_data_folder(request.data)
    column.require(settings)
    with (
        writing(data_dir, column=column.name)
        if part is None
        else writing_part(data_dir, part, column=column.name) as part_run
    ):
        plan = column.plan(data_dir, settings, request)
        now.say("", what=column.doing)
        summary = column.run(plan, settings, replace(request, part_run=part_run))
        assert part_run is None or part_run.is_last is not None, f"{column.package} does not run its plan in parts"
    listed = plan.variant_dir / FAILURES_FILE
    report = column.summary_report(summary, settings, listed)
    if part_run is not None:
        report = with_part(report, part_run)
    # Videos that failed do not keep the others from being used, unless an earlier variant has stayed the current one.
    has_ended = (part_run is None or bool(part_run.is_last)) and summary.gave_up is None
    is_done = has_ended and current_variant(data_dir, column.name) == plan.variant_dir.name
    return plan, summary, with_ending(report, column, plan.variant_dir, data=request.data, is_done=is_done), listed

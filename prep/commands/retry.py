"""`prep retry`: try again what failed in one column."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.make import (
    Address,
    Data,
    EngineName,
    ExecutionFlags,
    Json,
    MaxFailures,
    Request,
    ScratchSize,
    Workers,
)
from clipmill.prep.engines.execution import Execution
from clipmill.prep.registry import column_named, column_names

if TYPE_CHECKING:
    AnyColumn = str
else:
    AnyColumn = Literal[column_names()]
ColumnOfFailures = Annotated[AnyColumn, Parameter(help="Column whose failures to retry.")]


def retry(
    *,
    column: ColumnOfFailures = "video",
    only: Annotated[
        list[str] | None,
        Parameter(help="Failure codes to retry, as shown by prep status. Default: all.", negative=""),
    ] = None,
    weights: Annotated[
        str | None,
        Parameter(
            help="Local folder or file of the model weights, which recipes do not record; other columns ignore it."
        ),
    ] = None,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    execution: ExecutionFlags = Execution(),  # noqa: B008 - frozen
    workers: Workers = None,
    max_failures: MaxFailures = "0",
    scratch_size: ScratchSize = None,
    json: Json = False,
) -> None:
    """Retry the failures in the current variant of a column, for example after repairing a source video.

    Example:

        prep retry --only timeout
    """
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.failures import FailureCode
    from clipmill.prep.core.selection import stored_request
    from clipmill.shards.reader import Variant

    codes = frozenset(only or FailureCode)
    if unknown := sorted(codes - set(FailureCode)):
        raise UserError(f"unknown failure code: {', '.join(unknown)}", hint=f"failure codes: {', '.join(FailureCode)}")
    stored = stored_request(Variant.open(require_data_folder(data), column=column))
    request = Request(
        data=data,
        engine=engine,
        address=address,
        execution=execution,
        workers=workers,
        max_failures=max_failures,
        scratch_size=scratch_size,
        json=json,
        retry_codes=codes,
    )
    column_named(column).retry(stored, weights, request)

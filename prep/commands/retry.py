"""`prep retry`: try again what failed in one column."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.request import Request, ScratchSize
from clipmill.prep.registry import column_named, column_names
from clipmill.shards.columns import VIDEO

if TYPE_CHECKING:
    AnyColumn = str
else:
    AnyColumn = Literal[column_names()]
ColumnOfFailures = Annotated[AnyColumn, Parameter(help="Column whose failures to retry.")]


@dataclass(frozen=True, kw_only=True)
class RetryRequest(Request):
    """The flags of `prep retry`; a column ignores those that it does not need."""

    scratch_size: ScratchSize = None


def retry(
    *,
    column: ColumnOfFailures = VIDEO,
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
    request: Annotated[RetryRequest, Parameter(name="*")] = RetryRequest(),
) -> None:
    """Retry the failures of a column, for example after repairing a source video.

    They are those of the variant that the last run has made with failures beside the current one, which then becomes
    the current one, otherwise those of the current variant.

    Example:

        prep retry --only timeout
    """
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.failure_list import FAILURES_FILE
    from clipmill.prep.core.failures import FailureCode
    from clipmill.prep.core.selection import stored_request
    from clipmill.shards.dataset import unfinished_variant, variant_dir
    from clipmill.shards.reader import Variant

    codes = frozenset(only or FailureCode)
    if unknown := sorted(codes - set(FailureCode)):
        raise UserError(f"unknown failure code: {', '.join(unknown)}", hint=f"failure codes: {', '.join(FailureCode)}")
    data_dir = require_data_folder(request.data)
    unfinished = unfinished_variant(data_dir, column)
    # A run that was killed has listed no failures: whether it is wanted is unknown.
    if unfinished is not None and not (variant_dir(data_dir, column, unfinished) / FAILURES_FILE).exists():
        unfinished = None
    stored = stored_request(Variant.open(data_dir, column=column, variant=unfinished))
    column_named(column).retry(stored, weights, replace(request, retry_codes=codes))

"""`prep retry`: try again what failed in one column."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.prep.core.column import ENGINE_FLAGS
from clipmill.prep.core.make import retry_column
from clipmill.prep.core.request import EXECUTION, Request, ScratchSize
from clipmill.prep.registry import column_named, column_names
from clipmill.shards.columns import VIDEO

if TYPE_CHECKING:
    AnyColumn = str
else:
    AnyColumn = Literal[column_names()]
ColumnOfFailures = Annotated[AnyColumn, FIRST_RUN, Parameter(help="Column whose failures to retry.")]


@dataclass(frozen=True, kw_only=True)
class RetryRequest(Request):
    """The flags of `prep retry`; a column ignores those that it does not need."""

    scratch_size: ScratchSize = None
    in_flight: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Parameter(help="Number of requests to a server at a time, 1 to 4096. Default: as in the last run."),
    ] = None
    max_tokens_total: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Parameter(
            help="Number of tokens that all answers of the variant may take, earlier ones included. Default: as in the "
            "last run."
        ),
    ] = None


def retry(
    *,
    column: ColumnOfFailures = VIDEO,
    only: Annotated[
        list[str] | None,
        FIRST_RUN,
        Parameter(help="Failure codes to retry, as shown by prep status. Default: all.", negative=""),
    ] = None,
    variant: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(
            help="Variant whose failures to retry. Default: the current one, or if it has none, the other that has."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(
            help="Local folder or file of the model weights. Default: that of the last run; other columns ignore it."
        ),
    ] = None,
    request: Annotated[RetryRequest, Parameter(name="*")] = RetryRequest(),
) -> None:
    """Retry the failures of a column, for example after repairing a source video.

    Without --variant, they are those of the variant that the last run has made with failures beside the current one,
    which then becomes the current one, otherwise those of the current variant.

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
    # A run that was killed has listed no failures: whether its variant is wanted is unknown.
    has_failed = unfinished is not None and (variant_dir(data_dir, column, unfinished) / FAILURES_FILE).exists()
    if variant is None and has_failed:
        variant = unfinished
        sys.stderr.write(f"note: a variant that is not the current one is retried: {variant}\n")
    opened = Variant.open(data_dir, column=column, variant=variant)
    stored = stored_request(opened)
    if request.engine is None and request.address is None:  # the engine of the run that failed
        request = replace(request, **{name: stored[name] for name in ENGINE_FLAGS if name in stored})
    request = replace(request, retry_codes=codes, only_variant=opened.directory.name)
    retry_column(column_named(column), stored, weights=weights, request=request)

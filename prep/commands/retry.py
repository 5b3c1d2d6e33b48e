"""`prep retry`: try again what failed in one column."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
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
    """Retry the failures in a variant of a column, for example after repairing a source video.

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
    data_dir = require_data_folder(request.data)
    name = variant or _variant_with_failures(data_dir, column, codes)
    stored = stored_request(Variant.open(data_dir, column=column, variant=name))
    column_named(column).retry(stored, weights, replace(request, retry_codes=codes))


def _variant_with_failures(data_dir: Path, column: str, codes: frozenset[str]) -> str | None:
    """Return the variant to retry: the current one if it has failures, else another one that has; None for the current.

    Raises:
        UserError: only other variants than the current one have failures, and several of them.
    """
    from clipmill.shards.commits import read_commits
    from clipmill.shards.dataset import current_variant, list_variants, variant_dir

    failed = [
        name
        for name in list_variants(data_dir, column)
        for commits in [read_commits(variant_dir(data_dir, column, name)).commits.values()]
        if any(failure.code in codes for commit in commits for failure in commit.failures)
    ]
    current = current_variant(data_dir, column)
    others = [name for name in failed if name != current]
    if current not in failed and len(others) > 1:
        raise UserError(f"several variants of {column} have failures", hint=f"give --variant: {', '.join(others)}")
    if others:
        rest = f"is retried: {others[0]}" if current not in failed else f"has failures too: {', '.join(others)}"
        sys.stderr.write(f"note: a variant that is not the current one {rest}\n")
    return others[0] if others and current not in failed else None

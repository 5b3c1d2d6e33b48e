"""The column `captions`: its flags and its `ColumnSpec`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Range
from clipmill.prep.captions.recipe import CAPTIONS_SCHEMA, CaptionsSettings
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.recipe import KEPT, settings_from
from clipmill.prep.core.request import EXECUTION, ModelRequest, PlanRequest
from clipmill.shards.columns import CAPTIONS

BATCH = 1
_SHOWN_CHARS = 80  # maximum length of a prompt in messages


@dataclass(frozen=True, kw_only=True)
class CaptionsRequest(ModelRequest):
    """Flags of `prep captions` that are not settings: options for requests to a model or a server."""

    workers: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Range(least=1),
        Parameter(
            help="Number of shards to caption in parallel, 1 or more: by a model each, or by requests to the server. "
            "Default: one per GPU, or 1 on a CPU; with --endpoint one per CPU core, or 4 if there are fewer cores."
        ),
    ] = None
    batch: Annotated[
        int,
        EXECUTION,
        KEPT,
        Range(1, 1 << 16),
        Parameter(help="Batch size of a model that runs here, in chunks, 1 or more."),
    ] = BATCH
    in_flight: Annotated[
        int,
        EXECUTION,
        KEPT,
        FIRST_RUN,
        Range(1, 4096),
        Parameter(help="Number of requests to the server at a time, shared by all workers, 1 to 4096."),
    ] = 64
    retries: Annotated[
        int,
        EXECUTION,
        KEPT,
        Range(0, 1000),
        Parameter(
            help="Number of times that a request is repeated after 429, 5xx, a broken connection or --timeout, after "
            "pauses that grow to 8 s, or after the time that the server requests; 10: about a minute."
        ),
    ] = 10
    timeout: Annotated[
        float,
        EXECUTION,
        KEPT,
        Range(above=0, most=86_400),
        Parameter(help="Time limit of a request in seconds, above 0."),
    ] = 300.0
    max_tokens_total: Annotated[
        int | None,
        EXECUTION,
        KEPT,
        FIRST_RUN,
        Range(least=1),
        Parameter(
            help="Maximum number of tokens, in and out, of all answers of this variant, including earlier runs. Then "
            "no further request is sent; requests in flight are still answered. Default: no limit."
        ),
    ] = None

    def rules(self) -> Iterator[UserError]:
        yield from super().rules()
        if self.max_tokens_total is not None and self.part is not None:
            yield UserError(
                "--max-tokens-total does not apply to --part: a part does not know the tokens of the other parts",
                hint="run one command with more --in-flight, or omit --max-tokens-total",
                flags=("--max-tokens-total", "--part"),
            )


@dataclass(frozen=True, kw_only=True)
class CaptionsPlanRequest(PlanRequest):
    """Flags of `prep plan captions` that are not settings."""

    trial: Annotated[
        int,
        Range(0, 100),
        Parameter(help="Number of chunks to caption now, for the estimate of tokens and time; a run keeps them."),
    ] = 0


def _read_settings(stored: Mapping[str, Any], weights: str | None) -> CaptionsSettings:
    settings = settings_from(stored, CaptionsSettings, column=CAPTIONS, schema=CAPTIONS_SCHEMA)
    return settings if settings.endpoint is not None or weights is None else replace(settings, model=weights)


def _settings_line(stored: Mapping[str, Any]) -> str:
    names = ("model", "endpoint", "frames", "size", "max_tokens", "temperature")
    settings = [f"{name}={stored[name]}" for name in names if stored.get(name) is not None]
    prompt = on_one_line(str(stored.get("prompt")))
    shown = prompt if len(prompt) <= _SHOWN_CHARS else f"{prompt[:_SHOWN_CHARS]}..."
    return f'{" ".join(settings)} prompt="{shown}"'


COLUMN = ColumnSpec(
    name=CAPTIONS,
    package="clipmill.prep.captions",
    work="clipmill.prep.captions.work:WORK",
    check_sample="clipmill.prep.captions.answers:check_caption",
    settings=CaptionsSettings,
    schema=CAPTIONS_SCHEMA,
    request="clipmill.prep.captions.column:CaptionsRequest",
    plan_request="clipmill.prep.captions.column:CaptionsPlanRequest",
    help="""Caption the chunks with a vision-language model, here or on a server with OpenAI's interface.

    Each run captions only what is new, changed or missing; another prompt or model makes another variant. Each answer
    is on disk as soon as it arrives, so that a killed run asks for none of them again. `prep manifest captions` makes
    the captions a source for training. The key of a server is taken from the environment variable OPENAI_API_KEY.

    Examples:

        prep captions --model Qwen/Qwen3-VL-2B-Instruct
        prep captions --endpoint http://localhost:8000/v1 --model qwen3-vl
    """,
    plan_help="""
    Print what `prep captions` would do with the same settings, and why; tokens and time from the answers so far.

    No model is asked (dry run), unless --trial gives a number of chunks.

    Example:

        prep plan captions --model Qwen/Qwen3-VL-2B-Instruct --trial 3
    """,
    verb="caption",
    read_settings=_read_settings,
    settings_line=_settings_line,
)

"""Flags and `ColumnSpec` of the column `captions`."""

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
_MAX_SHOWN_CHARS = 80  # maximum length of a prompt in messages


@dataclass(frozen=True, kw_only=True)
class CaptionsRequest(ModelRequest):
    """Flags of `prep captions` that are not settings: workers, batch size, and limits on requests to a server."""

    workers: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Range(least=1),
        Parameter(
            help="Number of shards to caption in parallel, 1 or more. Each worker loads the model, or sends requests "
            "to the server. Default: one per GPU, or 1 on a CPU; with --endpoint, one per CPU core, but at least 4."
        ),
    ] = None
    batch: Annotated[
        int,
        EXECUTION,
        KEPT,
        Range(1, 1 << 16),
        Parameter(help="Batch size of a local model in chunks, 1 to 65536."),
    ] = BATCH
    in_flight: Annotated[
        int,
        EXECUTION,
        KEPT,
        FIRST_RUN,
        Range(1, 4096),
        Parameter(help="Maximum number of parallel requests to the server, shared by all workers, 1 to 4096."),
    ] = 64
    retries: Annotated[
        int,
        EXECUTION,
        KEPT,
        Range(0, 1000),
        Parameter(
            help="Maximum number of times to retry a request after status 408, 409, 429 or 5xx, a broken connection or "
            "--timeout, 0 to 1000. Pauses grow to 8 s unless the server sets them; 10 retries take about a minute."
        ),
    ] = 10
    timeout: Annotated[
        float,
        EXECUTION,
        KEPT,
        Range(above=0, most=86_400),
        Parameter(help="Timeout of each request in seconds, above 0 and up to 86400."),
    ] = 300.0
    max_tokens_total: Annotated[
        int | None,
        EXECUTION,
        KEPT,
        FIRST_RUN,
        Range(least=1),
        Parameter(
            help="Maximum number of input and output tokens for this variant, including earlier runs. At the limit, no "
            "further requests are sent, but requests in flight still complete. Default: no limit."
        ),
    ] = None

    def rules(self) -> Iterator[UserError]:
        yield from super().rules()
        if self.max_tokens_total is not None and self.part is not None:
            yield UserError(
                "--max-tokens-total cannot be used with --part: a part does not know how many tokens other parts use",
                hint="omit --part and use a larger --in-flight, or omit --max-tokens-total",
                flags=("--max-tokens-total", "--part"),
            )


@dataclass(frozen=True, kw_only=True)
class CaptionsPlanRequest(PlanRequest):
    """Flags of `prep plan captions` that are not settings."""

    trial: Annotated[
        int,
        Range(0, 100),
        Parameter(
            help="Number of chunks to caption now, 0 to 100, to estimate tokens and time. A run reuses the answers."
        ),
    ] = 0


def _read_settings(stored: Mapping[str, Any], weights: str | None) -> CaptionsSettings:
    settings = settings_from(stored, CaptionsSettings, column=CAPTIONS, schema=CAPTIONS_SCHEMA)
    return settings if settings.endpoint is not None or weights is None else replace(settings, model=weights)


def _settings_line(stored: Mapping[str, Any]) -> str:
    names = ("model", "endpoint", "frames", "size", "max_tokens", "temperature")
    settings = [f"{name}={stored[name]}" for name in names if stored.get(name) is not None]
    prompt = on_one_line(str(stored.get("prompt")))
    shown_prompt = prompt if len(prompt) <= _MAX_SHOWN_CHARS else f"{prompt[:_MAX_SHOWN_CHARS]}..."
    return f'{" ".join(settings)} prompt="{shown_prompt}"'


COLUMN = ColumnSpec(
    name=CAPTIONS,
    package="clipmill.prep.captions",
    work="clipmill.prep.captions.work:WORK",
    check_sample="clipmill.prep.captions.answers:check_caption",
    settings=CaptionsSettings,
    schema=CAPTIONS_SCHEMA,
    request="clipmill.prep.captions.column:CaptionsRequest",
    plan_request="clipmill.prep.captions.column:CaptionsPlanRequest",
    help="""Caption the chunks with a vision-language model, either a local model or a server with OpenAI's API.

    Each run captions only new, changed and missing chunks; a different prompt or model creates a new variant. Each
    answer is stored as soon as it arrives, so a killed run does not lose answers. `prep manifest captions` adds the
    captions to the manifest, for training. The API key is read from the environment variable OPENAI_API_KEY.

    Examples:

        prep captions --model Qwen/Qwen3-VL-2B-Instruct
        prep captions --endpoint http://localhost:8000/v1 --model qwen3-vl
    """,
    plan_help="""
    Print what `prep captions` would do with the same settings, and why, and estimate tokens and time.

    The estimate uses the stored answers. This is a dry run: no chunk is captioned unless --trial is passed.

    Example:

        prep plan captions --model Qwen/Qwen3-VL-2B-Instruct --trial 3
    """,
    verb="caption",
    read_settings=_read_settings,
    settings_line=_settings_line,
)

"""The column `captions`: its commands and its `ColumnSpec`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.quoting import on_one_line
from clipmill.manifests.settings import Range, refuse
from clipmill.prep.captions.recipe import CAPTIONS, CaptionsSettings, captions_recipe_from_dict
from clipmill.prep.core.column import ColumnSpec, changed_flags, short_path
from clipmill.prep.core.make import make_column, plan_column
from clipmill.prep.core.request import EXECUTION, Data, Json, ModelRequest, Request
from clipmill.prep.core.selection import WEIGHTS

Settings = Annotated[CaptionsSettings, Parameter(name="*")]
BATCH = 1
_SHOWN_CHARS = 80  # of a prompt
_KEPT: dict[str, Callable[[str], float]] = {  # flags that the records of a run keep, with their types
    "batch": int,
    "in_flight": int,
    "retries": int,
    "timeout": float,
    "max_tokens_total": int,
}


@dataclass(frozen=True, kw_only=True)
class CaptionsRequest(ModelRequest):
    """The flags of `prep captions` that are not settings: how a model or a server is asked."""

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
        int, EXECUTION, Range(1, 1 << 16), Parameter(help="Batch size of a model that runs here, in chunks, 1 or more.")
    ] = BATCH
    in_flight: Annotated[
        int,
        EXECUTION,
        FIRST_RUN,
        Range(1, 4096),
        Parameter(help="Number of requests to the server at a time, shared by all workers, 1 to 4096."),
    ] = 64
    retries: Annotated[
        int,
        EXECUTION,
        Range(0, 1000),
        Parameter(
            help="Number of times that a request is repeated after 429, 5xx, a broken connection or --timeout, after "
            "pauses that grow to 8 s, or when the server says; 10: about a minute."
        ),
    ] = 10
    timeout: Annotated[
        float, EXECUTION, Range(above=0, most=86_400), Parameter(help="Time limit of a request in seconds, above 0.")
    ] = 300.0
    max_tokens_total: Annotated[
        int | None,
        EXECUTION,
        FIRST_RUN,
        Range(least=1),
        Parameter(
            help="Number of tokens, in and out, that all answers of this variant may take, those of earlier runs "
            "included. Then no request is sent any more; those in flight are still answered. Default: no limit."
        ),
    ] = None
    trial: Annotated[int, Parameter(parse=False)] = 0  # of `prep plan captions`

    @property
    def kept(self) -> dict[str, str]:
        """The flags that differ from their defaults and that a later `prep retry` uses again."""
        defaults = CaptionsRequest()
        return {name: str(value) for name in _KEPT if (value := getattr(self, name)) != getattr(defaults, name)}

    def rules(self) -> Iterator[UserError]:
        yield from super().rules()
        if self.max_tokens_total is not None and self.part is not None:
            yield UserError(
                "--max-tokens-total does not apply to --part: the parts do not know of each other's tokens",
                hint="run one command with more --in-flight, or omit --max-tokens-total",
                flags=("--max-tokens-total", "--part"),
            )


def captions(
    settings: Settings,
    request: Annotated[CaptionsRequest, Parameter(name="*")] = CaptionsRequest(),
) -> None:
    """Caption the chunks with a vision-language model, here or on a server with OpenAI's interface.

    Each run captions only what is new, changed or missing; another prompt or model makes another variant. Each answer
    is on disk as soon as it arrives, so that a killed run asks for none of them again. `prep manifest captions` makes
    the captions a source for training. The key of a server is taken from the environment variable OPENAI_API_KEY.

    Examples:

        prep captions --model Qwen/Qwen3-VL-2B-Instruct
        prep captions --endpoint http://localhost:8000/v1 --model qwen3-vl
    """
    make_column(COLUMN, settings, request)


def plan_captions(
    settings: Settings,
    *,
    trial: Annotated[
        int,
        Parameter(help="Number of chunks to caption now, for the estimate of tokens and time; a run keeps them."),
    ] = 0,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Print what `prep captions` would do with the same settings, and why; tokens and time from the answers so far.

    No model is asked (dry run), unless --trial gives a number of chunks.

    Example:

        prep plan captions --model Qwen/Qwen3-VL-2B-Instruct --trial 3
    """
    refuse(Range(0, 100).mistakes("--trial", trial))
    plan_column(COLUMN, settings, data=data, json=json, request=CaptionsRequest(data=data, trial=trial))


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = captions_recipe_from_dict(stored)
    settings = recipe.settings
    if settings.endpoint is None and (folder := weights or stored.get(WEIGHTS)) is not None:
        settings = replace(settings, model=folder)
    given = {field.name: getattr(request, field.name) for field in fields(Request) if field.name != "batch"}
    kept = {name: parse(stored[name]) for name, parse in _KEPT.items() if name in stored}
    changed = {name: value for name in _KEPT if (value := getattr(request, name, None)) is not None}
    make_column(COLUMN, settings, CaptionsRequest(**{**given, **kept, **changed, "only_variant": recipe.variant}))


def _flags(stored: Mapping[str, Any]) -> list[str]:
    settings = captions_recipe_from_dict(stored).settings
    default = asdict(CaptionsSettings(model=settings.model))
    kept = {name: stored.get(name) for name in _KEPT}
    changed = [*changed_flags(asdict(settings), default), *changed_flags(kept, dict.fromkeys(kept))]
    return ["--model", short_path(Path(stored[WEIGHTS])) if WEIGHTS in stored else settings.model, *changed]


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
    check_sample="clipmill.prep.captions.sample:check_caption",
    verb="describe",
    make_command=captions,
    plan_command=plan_captions,
    flags=_flags,
    settings_line=_settings_line,
    retry=_retry,
)

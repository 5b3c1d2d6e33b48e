"""The `video` column: the settings and flags of `prep chunk` and `prep index`, and the `ColumnSpec` of each command.

In a `Recipe`, None stands for a default that depends on the named recipe, the codec or another setting. `resolve` fills
in these defaults and adds the ffmpeg version. The resolved recipe is fingerprinted, stored beside the shards, and
compared in later runs. It does not contain the name of the named recipe.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, cast

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import bitrate_text, parse_bitrate, parse_length
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Checked, Needs, Range, errors_of
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.recipe import KEPT, changed_flags, setting_flags
from clipmill.prep.core.request import PartRequest, PlanRequest, ScratchSize
from clipmill.prep.sources.detector import DEFAULT_DETECTOR, DEFAULT_THRESHOLD, DetectorName, scenedetect_version
from clipmill.prep.video.codecs import DEFAULT_KEYINT, INTRA, arguments_hash, find_codec
from clipmill.prep.video.settings import (
    RECIPE_SCHEMA,
    SHOT_SETTINGS,
    SPAN_CHUNKS,
    Audio,
    ChunkSettings,
    Cut,
    Gop,
    IndexSettings,
    ResolvedRecipe,
    Scaler,
    Tail,
    canonical_length,
)
from clipmill.shards.columns import INDEXED, VIDEO

ENCODING = Parameter(group=Group("Encoding", sort_key=1))
CUTTING = Parameter(group=Group("Cutting", sort_key=2))
_NEEDS_SHOTS = Needs("cut", ("shots",))

_SETTING_NAMES = tuple(field.name for field in fields(ChunkSettings))

RecipeName = Literal["balanced", "small", "fast"]
# docs/encoding.md explains the values. If a named recipe omits a setting, the codec provides its default.
NAMED_RECIPES: Mapping[RecipeName, Mapping[str, Any]] = {
    "balanced": {"codec": "h264", "crf": 24, "preset": "faster", "gop": "comb", "keyint": 90},
    "small": {"codec": "av1", "crf": 45, "preset": "9", "gop": "closed", "keyint": 90},
    "fast": {"codec": "mjpeg", "crf": 8, "gop": "intra"},
}


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """Settings of `prep chunk` that affect the bytes of chunks; None for a default that depends on other settings."""

    recipe: Annotated[RecipeName, ENCODING, FIRST_RUN] = "balanced"
    """Named set of defaults: balanced (H.264), small (AV1) or fast (MJPEG, fast to decode). Flags override its
    values."""

    len: Annotated[str, ENCODING, FIRST_RUN, Parameter(allow_leading_hyphen=True)] = "15s"
    """Chunk length with a unit, up to 1 hour, such as 15s, 2.5s or 500ms. With --cut shots, the maximum length."""

    codec: Annotated[str | None, ENCODING, FIRST_RUN] = None
    """Video codec: h264, hevc, av1, vp9, mjpeg, h264_nvenc, hevc_nvenc. If it differs from the codec of --recipe, the
    other settings take the defaults of this codec. Default: the codec of --recipe."""

    crf: Annotated[int | None, ENCODING, FIRST_RUN] = None
    """Constant rate factor; lower values give better quality. Range: 1 to 51 for H.264 and HEVC, 1 to 63 for AV1 and
    VP9; for MJPEG, the quantiser scale, 2 to 31. Default: the value of --recipe, 24 for balanced."""

    bitrate: Annotated[str | None, ENCODING, FIRST_RUN] = None
    """Average bitrate in bit/s, such as 800k, 0.8M or 2M. Used in place of --crf."""

    preset: Annotated[str | None, ENCODING] = None
    """Speed preset of the encoder, such as faster for H.264 or 9 for AV1. Default: the value of --recipe."""

    gop: Annotated[Gop | None, ENCODING] = None
    """GOP layout. comb: a P frame every 16 frames, with non-reference B frames between P frames; star: a comb with a
    single P frame; closed: closed GOPs with frame types chosen by the encoder; intra: key frames only. Default: the
    value of --recipe."""

    keyint: Annotated[int | None, ENCODING, Range(1, 600)] = None
    """Key frame interval in frames, 1 to 600. Default: the value of --recipe, or 90 for comb, 16 for star, 30 for
    closed."""

    fps: Annotated[str, ENCODING] = "30"
    """Constant frame rate of the chunks in frames per second, 1 to 240, such as 25 or 30000/1001."""

    short_side: Annotated[int, ENCODING, Range(16, 4320)] = 288
    """Length of the shorter frame side in pixels, an even number from 16 to 4320. Smaller videos are not upscaled."""

    scaler: Annotated[Scaler, ENCODING] = "bicubic"
    """Scaling filter."""

    tail: Annotated[Tail, ENCODING] = "keep"
    """Handling of the frames at the end of a video that do not fill a chunk. keep: make a shorter chunk; drop: discard
    them; merge: append them to the previous chunk."""

    audio: Annotated[Audio, ENCODING] = "drop"
    """Handling of audio. keep: encode the first audio stream as AAC; drop: omit the audio."""

    cut: Annotated[Cut, CUTTING] = "even"
    """Positions of chunk boundaries. even: every --len; shots: at the shot boundaries detected in each source."""

    detector: Annotated[DetectorName | None, CUTTING, _NEEDS_SHOTS] = None
    """PySceneDetect detector for --cut shots. adaptive: compares the change between two frames with the nearby changes,
    which tolerates camera motion; content: compares it with a fixed threshold. Default: adaptive."""

    threshold: Annotated[float | None, CUTTING, Range(above=0, most=255), _NEEDS_SHOTS] = None
    """Threshold of --detector, above 0 and up to 255; lower values produce more cuts. Default: 3 for adaptive, 27 for
    content."""

    min_scene_len: Annotated[str | None, CUTTING, _NEEDS_SHOTS] = None
    """Minimum time between two cuts that --detector reports, such as 500ms. Default: 500ms."""

    min_len: Annotated[str | None, CUTTING, _NEEDS_SHOTS] = None
    """Minimum chunk length for --cut shots, at most half of --len. A shorter shot is merged with a neighbour if
    the result is no longer than --len, and omitted otherwise. Default: 2s, or half of --len if that is less."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors about settings that conflict, and about settings that the codec does not support."""
        if self.crf is not None and self.bitrate is not None:
            yield UserError(
                "--crf and --bitrate are mutually exclusive", hint="use only one of them", flags=("--crf", "--bitrate")
            )
        yield from errors_of(self.settings)

    def resolve(self) -> ResolvedRecipe:
        """Return the resolved recipe, with the version of the installed ffmpeg program."""
        from clipmill.prep.video.ffmpeg import find_ffmpeg

        return resolve(self, ffmpeg_version=find_ffmpeg().version)

    def settings(self) -> ChunkSettings:
        """Return all settings, with defaults filled in and values normalised.

        Raises:
            UserError: The settings conflict.
        """
        flags = {field.name: getattr(self, field.name) for field in fields(ChunkSettings)}
        recipe = NAMED_RECIPES[self.recipe]
        codec = find_codec(self.codec or recipe["codec"])
        defaults: dict[str, Any] = {
            "crf": codec.default_crf,
            "preset": codec.default_preset or None,
            "gop": codec.gops[0],
            "codec": recipe["codec"],
        }
        if self.codec in (None, recipe["codec"]):
            defaults |= recipe
        if self.bitrate is not None:
            defaults["crf"] = None
        gop = self.gop or defaults["gop"]
        if gop != defaults["gop"] or "keyint" not in defaults:
            defaults["keyint"] = DEFAULT_KEYINT[gop]
        values: dict[str, Any] = {name: defaults.get(name) if value is None else value for name, value in flags.items()}
        values["len"] = canonical_length("--len", self.len)
        if self.bitrate is not None:
            values["bitrate"] = bitrate_text(parse_bitrate(self.bitrate, flag="--bitrate"))
        if self.cut == "shots":
            detector = self.detector or DEFAULT_DETECTOR
            threshold = DEFAULT_THRESHOLD[detector] if self.threshold is None else self.threshold
            half_ms = int(parse_length(values["len"], flag="--len") * 1000) // 2
            values |= {
                "detector": detector,
                "threshold": float(threshold),
                "min_scene_len": canonical_length("--min-scene-len", self.min_scene_len or "500ms"),
                "min_len": canonical_length("--min-len", self.min_len or f"{min(2000, half_ms)}ms"),
            }
        settings = ChunkSettings(**values)
        return replace(settings, fps=str(settings.fps_exact))


@dataclass(frozen=True, kw_only=True)
class IndexRecipe(Checked):
    """Settings of `prep index`."""

    command: ClassVar[str] = "index"
    verb: ClassVar[str] = "index"

    len: Annotated[str, FIRST_RUN, Parameter(allow_leading_hyphen=True)] = "15s"
    """Chunk length with a unit, up to 1 hour, such as 15s or 2.5s."""

    fps: str = "30"
    """Nominal frame rate of the chunks in frames per second, such as 25 or 30000/1001. Other columns count frames at
    this rate; clips take their frames directly from the source."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors about invalid lengths and frame rates."""
        yield from errors_of(self.settings)

    def settings(self) -> IndexSettings:
        """Return the settings with normalised values."""
        settings = IndexSettings(len=canonical_length("--len", self.len), fps=self.fps)
        return replace(settings, fps=str(settings.fps_exact))

    def resolve(self) -> ResolvedRecipe:
        """Return the resolved recipe."""
        settings = self.settings()
        values = {
            "schema": RECIPE_SCHEMA,
            "span_chunks": SPAN_CHUNKS,
            "codec": INDEXED,
            "len": settings.len,
            "fps": settings.fps,
            "tail": settings.tail,
        }
        name = f"source{settings.fps.replace('/', '-')}-{settings.len}"
        return ResolvedRecipe(cast("ChunkSettings", settings), values, name)


def resolve(recipe: Recipe, *, ffmpeg_version: str) -> ResolvedRecipe:
    """Fill in the settings that are None. Recipes that produce the same bytes become equal.

    Args:
        ffmpeg_version: Version of the ffmpeg program, which is part of the recipe because other builds may produce
            different bytes.
    """
    settings = recipe.settings()
    stored, hash_text = asdict(settings), arguments_hash(settings.codec, settings.gop)
    if settings.cut == "even":  # recipes that predate --cut shots lack these settings, and must stay equal
        for name in ("cut", *SHOT_SETTINGS):
            del stored[name]
    values = {
        "schema": RECIPE_SCHEMA,
        "ffmpeg": ffmpeg_version,
        "span_chunks": SPAN_CHUNKS,
        "threads": 1,
        **stored,
        # A different version of PySceneDetect may detect different cuts.
        **({"scenedetect": scenedetect_version()} if settings.cut == "shots" else {}),
        **({} if hash_text is None else {"arguments": hash_text}),
    }
    rate = f"crf{settings.crf}" if settings.bitrate is None else settings.bitrate
    gop = INTRA if settings.gop == INTRA else f"{settings.gop}{settings.keyint}"
    fps = settings.fps.replace("/", "-")
    cut = settings.len if settings.cut == "even" else f"{settings.len}-{settings.cut}"
    return ResolvedRecipe(settings, values, f"{settings.codec}-{settings.short_side}p{fps}-{rate}-{gop}-{cut}")


def settings_line(stored: Mapping[str, Any]) -> str:
    """Return the settings in a recipe.json that affect the chunks, as one line."""
    names = [*_SETTING_NAMES, "ffmpeg", "scenedetect"]
    return " ".join(f"{name}={stored[name]}" for name in names if stored.get(name) is not None)


@dataclass(frozen=True, kw_only=True)
class ChunkRequest(PartRequest):
    """Flags of `prep chunk` that do not affect the chunks, including the scratch size for copies of remote videos."""

    scratch_size: Annotated[ScratchSize, KEPT] = None


@dataclass(frozen=True, kw_only=True)
class ChunkPlanRequest(PlanRequest):
    """Flags of `prep plan` that are not settings."""

    explain: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(help="Chunk key, video ID or source name; print what a run does with it, and why."),
    ] = None


def read_recipe(stored: Mapping[str, Any], _weights: str | None = None) -> Recipe | IndexRecipe:
    """Return the settings in a stored recipe of `prep chunk` or `prep index`."""
    if stored.get("codec") == INDEXED:
        return IndexRecipe(len=stored["len"], fps=stored["fps"])
    return Recipe(**{name: stored[name] for name in _SETTING_NAMES if name in stored})


def _flags(recipe: Recipe | IndexRecipe) -> list[str]:
    if isinstance(recipe, IndexRecipe):
        return setting_flags(recipe)
    settings = recipe.settings()
    names = [name for name, values in NAMED_RECIPES.items() if values["codec"] == settings.codec]
    name, codec = (names[0], None) if names else (Recipe().recipe, settings.codec)
    # Some defaults depend on the GOP layout, so they are computed for the layout in `settings`. The default of the
    # layout itself comes from a recipe that does not set a layout.
    defaults = asdict(Recipe(recipe=name, codec=codec, gop=settings.gop).settings())
    base = Recipe(recipe=name, codec=codec).settings()
    defaults |= {"len": settings.len, "gop": base.gop, "codec": base.codec if names else None}
    if settings.cut == "shots":
        shots = Recipe(len=settings.len, fps=settings.fps, cut="shots", detector=settings.detector).settings()
        defaults |= {name: getattr(shots, name) for name in SHOT_SETTINGS} | {"detector": DEFAULT_DETECTOR}
    recipe_flag = [] if name == Recipe().recipe else ["--recipe", name]
    return ["--len", settings.len, *recipe_flag, *changed_flags(asdict(settings), defaults)]


COLUMN = ColumnSpec(
    name=VIDEO,
    package="clipmill.prep.video",
    work="clipmill.prep.video.work:WORK",
    check_sample="clipmill.prep.video.inspection:check_video",
    settings=Recipe,
    schema=RECIPE_SCHEMA,
    request="clipmill.prep.video.column:ChunkRequest",
    plan_request="clipmill.prep.video.column:ChunkPlanRequest",
    help="""Encode the videos of the manifest as chunks, and write them to WebDataset shards.

    Chunks have the length --len or, with --cut shots, start and end at shot boundaries. Each run encodes only chunks
    that are new, changed, missing or damaged. Different settings create a new variant and keep the existing variant.

    Example:

        prep chunk --len 15s --crf 21
    """,
    plan_help="""Print what `prep chunk` would do with the same settings, why, and the estimated cost (dry run).

    Example:

        prep plan --bitrate 800k
    """,
    checked_noun="decoded frame",
    page="chunks that play in place, with totals, distributions, search and filters; clips of more "
    "than 8 MB in total are written to a folder beside the page; --where limits the page to matching chunks",
    read_settings=read_recipe,
    write_flags=_flags,
    settings_line=settings_line,
)

# `prep index` makes the same column, but the packets of the chunks stay in the source files.
INDEX = replace(
    COLUMN,
    settings=IndexRecipe,
    verb="index",
    help="""Index the videos of the manifest without encoding them; packets stay in the source files.

    Training, embedding, search and the other columns use indexed chunks in the same way as encoded chunks. Each source
    is read completely, once, and must not be moved afterwards. Supported: MP4, MOV, MKV and WebM files with H.264,
    HEVC, VP9 or AV1.

    If you pass a folder of videos, its manifest is written first, as `prep manifest folder` does.

    Example:

        prep index VIDEOS
    """,
    plan_help="""Print what `prep index` would do, and why (dry run).

    Example:

        prep plan index
    """,
)


def column_of(recipe: ResolvedRecipe) -> ColumnSpec:
    """Return the spec of the command that makes a variant."""
    return INDEX if recipe.settings.codec == INDEXED else COLUMN

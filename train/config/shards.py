"""Settings that select the training data (`--shards`, `--mix`), the kinds of data, and checks that paths exist.

`KINDS` has one row per kind of data. Other modules use a kind only through its row.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, parse_size
from clipmill.manifests.plugins import import_object
from clipmill.manifests.settings import Checked, errors_of, no_effect_error
from clipmill.manifests.storage.mirrors import is_remote, reject_mistyped_url
from clipmill.train.config import fields as groups
from clipmill.train.config.fields import FIRST_RUN

# Value of --shards: one data folder, or several.
Shards = str | tuple[str, ...]
_REPEATABLE = Parameter(negative=())  # flag that may be repeated: --shards A --shards B
_MAX_TERM = 10**6  # maximum numerator or denominator of a weight

Content = Literal["captions", "labels", "frames"]

_ANY_ADDRESS = re.compile("")
_TARS = re.compile(r"\{|\.tar$")
_PRODUCERS = "clipmill.train.data.producers"


@dataclass(frozen=True)
class Kind:
    """Kind of data, such as image tars.

    Attributes:
        openers: Import paths of the functions that open samples of this kind, keyed by content. A run imports only the
            modules that its data require.
        noun: Plural noun for messages, such as "video tars" in "DIR/0.tar names video tars, but chunks are in a data
            folder".
        missing_reasons: Reasons why samples of this kind have no labels or no frames, keyed by content, such as "chunks
            are in a data folder" in the same message.
        spelling: Pattern that matches addresses of this kind.
        test: Import path of a function that reads the data at a matching address, and returns True if the data are of
            this kind. Empty if the pattern identifies the kind.
        has_manifest: True if the data have a manifest: splits, sources of captions, labels, scores, and variants.
        can_be_mixed: True if samples are accessed by index, so that data from several addresses can be mixed.
        has_images: True if samples are images, which have no time axis.
        class_names: Import path of a function that reads the class names of a label from data without a manifest.
            Empty if data of this kind have a manifest or no labels.
    """

    openers: Mapping[Content, str]
    noun: str = "data folders"
    missing_reasons: Mapping[Content, str] = field(default_factory=dict)
    spelling: re.Pattern[str] = _ANY_ADDRESS
    test: str = ""
    has_manifest: bool = True
    can_be_mixed: bool = True
    has_images: bool = False
    class_names: str = ""


IMAGES = Kind(
    dict.fromkeys(("captions", "labels", "frames"), f"{_PRODUCERS}.tar_images:open_images"),
    noun="image tars",
    spelling=_TARS,
    test="clipmill.train.data.image_tars:names_images",
    has_manifest=False,
    has_images=True,
    class_names="clipmill.train.data.image_tars:class_names_of_images",
)
STREAM = Kind(
    {"captions": "clipmill.train.data.video_stream:open_stream"},
    noun="video tars",
    missing_reasons={"labels": "labels are in the manifest of a data folder", "frames": "chunks are in a data folder"},
    spelling=_TARS,
    has_manifest=False,
    can_be_mixed=False,
)
LATENTS = Kind(
    {
        "captions": f"{_PRODUCERS}.latent_segments:open_captions",
        "labels": f"{_PRODUCERS}.latent_segments:open_labels",
        "frames": f"{_PRODUCERS}.latent_segments:open_frames",
    }
)
CLIPS = Kind(
    {
        "captions": f"{_PRODUCERS}.captioned_clips:open_captions",
        "labels": f"{_PRODUCERS}.chunk_clips:open_labels",
        "frames": f"{_PRODUCERS}.chunk_clips:open_frames",
    }
)
KINDS = (IMAGES, STREAM, CLIPS)  # in the order in which they are tried; the first match wins


def kind_of(address: str, settings: "DataSettings | None" = None) -> Kind:
    """Return the kind of data at an address.

    Args:
        settings: Settings for reading the data. If None, the data are not read, and the result is the first kind whose
            pattern matches the address. Only `has_manifest` of this kind is reliable, because kinds with the same
            pattern share its value.

    Raises:
        UserError: The address refers to tars, but a tar is missing or cannot be read.
    """
    if settings is not None and settings.reads_latents:
        return LATENTS
    candidates = (kind for kind in KINDS if kind.spelling.search(address))
    if settings is None:
        return next(candidates)
    cache = {"cache": settings.cache, "cache_size": settings.cache_size}
    return next(kind for kind in candidates if not kind.test or import_object(kind.test)(address, **cache))


def data_folder_error(address: str, reason: str, *, kind: Kind | None = None, flags: tuple[str, ...] = ()) -> UserError:
    """Return the error for tars where a data folder is required.

    Args:
        address: Address of the data.
        reason: End of the message, which begins with "DIR/0.tar names video tars, ".
        kind: Kind of the data; None to name all kinds whose pattern the address matches.
        flags: Flags that the error refers to.
    """
    pattern = kind_of(address).spelling.pattern
    kinds = [candidate for candidate in KINDS if candidate.spelling.pattern == pattern] if kind is None else [kind]
    nouns = " or ".join(kind.noun for kind in kinds)
    return UserError(f"{address} names {nouns}, {reason}", hint="use the data folder that prep made", flags=flags)


def is_local_folder(address: str) -> bool:
    """Return True if an address is the path of a data folder on this machine."""
    return kind_of(address).has_manifest and not is_remote(address)


def absolute_address(address: str) -> str:
    """Return an address with absolute paths, so that it is valid in any working directory.

    The address of tars may consist of several patterns, joined by `::`.
    """
    parts = address.split("::")
    return "::".join(part if is_remote(part) or part.startswith("$") else str(Path.cwd() / part) for part in parts)


def normalise_address(address: str) -> str:
    """Return an address in canonical form, for comparisons.

    Symbolic links are resolved, except links that form a loop.
    """
    parts = address.split("::")
    return "::".join(part.rstrip("/") if is_remote(part) else os.path.realpath(part) for part in parts)


def folders_of(shards: Shards) -> tuple[str, ...]:
    """Return the data folders in a value of --shards."""
    return (shards,) if isinstance(shards, str) else tuple(shards)


def short_name(text: str) -> str:
    """Convert text to a name of letters, digits, '.', '-' and '_', for metrics and failures."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "data"


def folder_names(folders: Sequence[str]) -> tuple[str, ...]:
    """Return a short, unique name for each folder, for metrics and failures.

    A name consists of the last components of the path, as many as are needed to distinguish the folders.
    """
    parts = [[part for part in normalise_address(folder).split("/") if part] or ["data"] for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [short_name("-".join(part[-depth:])) for part in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name}-{number}" for number, name in enumerate(names, start=1))


def parse_mix(mix: str) -> tuple[Fraction, ...]:
    """Parse a value of --mix, such as `2,1`, into exact weights.

    Raises:
        UserError: A weight is not a number above 0, or has too many digits.
    """
    weights: list[Fraction] = []
    for part in mix.split(","):
        try:
            weights.append(Fraction(part.strip()))
        except (ValueError, ZeroDivisionError):
            weights.append(Fraction(0))
        if weights[-1] <= 0:
            raise UserError(
                f"--mix {mix}: {part.strip()!r} is not a number above 0",
                hint="use a number above 0 for each --shards, and omit folders that should not be used",
                flags=("--mix",),
            )
        if max(weights[-1].as_integer_ratio()) > _MAX_TERM:
            raise UserError(
                f"--mix {mix}: {part.strip()!r} has too many digits",
                hint="use weights such as 2,1 or 0.7,0.3",
                flags=("--mix",),
            )
    return tuple(weights)


@dataclass(frozen=True, kw_only=True)
class DataSettings(Checked):
    """Location of the training data, and the mixture if there are several data folders."""

    shards: Annotated[Shards, groups.WHERE, FIRST_RUN, _REPEATABLE] = "data"
    """Data folder made by prep, or video or image tars. A path, an address (s3://bucket/data), or a pattern of tars
    ('DIR/{000000..000099}.tar'). Repeat the flag to mix several: --shards A --shards B."""
    mix: Annotated[str | None, groups.WHERE] = None
    """Sampling weights of several --shards, in the same order, such as 2,1. Default: in proportion to their sizes, so
    that each sample is visited once per epoch."""
    cache: Annotated[Path | None, groups.WHERE] = None
    """Folder for local copies of remote --shards. Default: the user's cache folder."""
    cache_size: Annotated[str | None, groups.WHERE] = None
    """Maximum size of the complete tars in the cache, such as 100GB; the least recently used tars are removed first.
    Default: 80% of the free disk space, where the content of the cache counts as free."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Data folders listed by --shards."""
        return folders_of(self.shards)

    @property
    def folder(self) -> str:
        """The only data folder that --shards lists.

        Raises:
            UserError: --shards lists several data folders.
        """
        if len(self.folders) == 1:
            return self.folders[0]
        raise UserError(
            f"this command reads one data folder, but --shards names {len(self.folders)}: {', '.join(self.folders)}",
            hint=f"use one of them: --shards {self.folders[0]}",
            flags=("--shards",),
        )

    @property
    def reads_latents(self) -> bool:
        """True if samples are precomputed latents, which need no decoding."""
        return False

    def rules(self) -> Iterator[UserError]:
        """Yield errors for repeated data folders, a wrong number of weights, and an invalid cache size."""
        if self.cache_size is not None:
            yield from errors_of(parse_size, self.cache_size, flag="--cache-size")
        if len(self.folders) > 1:
            folder_by_path: dict[str, str] = {}
            for folder in self.folders:
                if (earlier_folder := folder_by_path.get(path := normalise_address(folder))) is not None:
                    ending = (
                        "twice" if earlier_folder == folder else f"and {earlier_folder}, but they are the same folder"
                    )
                    yield UserError(
                        f"--shards names {folder} {ending}",
                        hint="use the folder once, with a larger weight in --mix",
                        flags=("--shards",),
                    )
                    break
                folder_by_path[path] = folder
            yield from () if self.mix is None else errors_of(_require_weights, self.mix, num_folders=len(self.folders))

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield errors for --cache and --cache-size with local data, and for --mix with a single folder."""
        shards = f"--shards {' '.join(self.folders)}"
        for flag in ("--cache", "--cache-size"):
            if flag in typed and not any(map(is_remote, self.folders)):
                yield no_effect_error(flag, typed, f"{shards} is on this machine", use="a remote address")
        if "--mix" in typed and len(self.folders) == 1:
            yield no_effect_error("--mix", typed, f"{shards} is one folder", use="--shards once for each folder")


def _require_weights(mix: str, *, num_folders: int) -> None:
    if (num_weights := len(parse_mix(mix))) != num_folders:
        weights = count_noun(num_weights, "weight")
        raise UserError(
            f"--mix {mix} has {weights} for {num_folders} data folders",
            hint=f"use one weight for each --shards, in the same order, such as {','.join('1' * num_folders)}",
            flags=("--mix",),
        )


def local_folder(address: str | Path) -> Path:
    """Return the local path of a run or of weights: for a run in a bucket, an up-to-date mirror of the run.

    Raises:
        UserError: A run cannot be stored at the address, or the bucket cannot be read.
    """
    if isinstance(address, Path) or not is_remote(address):
        return Path(address)
    from clipmill.manifests.storage.mounting import open_run

    return open_run(address)


def _run_folder(_type: Any, tokens: Sequence[Token]) -> Path:
    """Convert the value of --out to a local folder. A run in a bucket is mirrored to a local folder."""
    reject_mistyped_url(tokens[0].value)
    return local_folder(tokens[0].value)


RUN_FOLDER = Parameter(converter=_run_folder)


NAME_AND_TAG = re.compile(r"([\w.@-]+):([\w.-]+)")
HUB_PREFIX = "hf:"  # prefix of a model name on the Hugging Face Hub


def is_name_and_tag(weights: str) -> bool:
    """Return True if `weights` is NAME:TAG of open_clip, or hf:NAME on the Hugging Face Hub."""
    return NAME_AND_TAG.fullmatch(weights) is not None or weights.startswith(HUB_PREFIX)


def require_paths(*, shards: tuple[str | None, ...] = (), init: tuple[str, ...] = ()) -> None:
    """Check that local data folders and initial weights exist.

    Nothing is checked if there are several processes: the folders may differ between nodes, but all ranks must raise
    the same error.

    Args:
        shards: Addresses of data; None values are ignored.
        init: Paths, addresses or names of initial weights.

    Raises:
        UserError: A local data folder or a weights file does not exist.
    """
    if "RANK" in os.environ:
        return
    for address in shards:
        if address is not None and is_local_folder(address) and not Path(address).exists():
            raise UserError(
                f"there is no data folder {address}",
                hint="use --shards with the data folder that prep made",
                flags=("--shards",),
            )
    for weights in init:
        if not is_name_and_tag(weights) and not local_folder(weights).exists():
            raise UserError(
                f"cannot read the weights {weights}: no such file or folder", hint="use an existing file or folder"
            )


def require_weights_exist(weights: str | Path, *, takes_tags: bool) -> None:
    """Check that `weights` is an existing path or run, or a name such as NAME:TAG.

    Args:
        takes_tags: True if the hint should mention names such as NAME:TAG.

    Raises:
        UserError: There are no weights with this path, address or name.
    """
    if not local_folder(weights).exists() and not is_name_and_tag(str(weights)):
        raise missing_weights_error(weights, takes_tags=takes_tags)


def missing_weights_error(weights: str | Path, *, takes_tags: bool) -> UserError:
    """Return the error for a path or address without weights.

    Args:
        takes_tags: True if open_clip's NAME:TAG is allowed.
    """
    kinds = ["a run (a training command's --out)", "an exported folder", "a weights file"]
    kinds += [*(["NAME:TAG of open_clip"] if takes_tags else []), "hf:NAME on the Hugging Face Hub"]
    return UserError(
        f"there is no run in {weights}, and there are no other weights",
        hint=f"use {', '.join(kinds[:-1])}, or {kinds[-1]}",
    )

"""`--shards` and `--mix`: the data of a run, their kinds, names and proportions. `KINDS` has a row for each kind."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, parse_size
from clipmill.manifests.plugins import import_object
from clipmill.manifests.settings import Checked, errors_of, without_effect
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.config import fields as groups
from clipmill.train.config.fields import FIRST_RUN

# One data folder, or several.
Shards = str | tuple[str, ...]
_REPEATED = Parameter(negative=())  # --shards A --shards B
_MAX_WHOLE = 10**6  # of a weight as a whole number

Content = Literal["captions", "labels", "frames"]

_ANY = re.compile("")
_TARS = re.compile(r"\{|\.tar$")
_PRODUCERS = "clipmill.train.data.producers"


@dataclass(frozen=True)
class Kind:
    """A kind of data.

    Attributes:
        openers: Import paths of the functions that open its samples, by their content, so that a run loads only the
            modules of its own data.
        lacks: Why samples have no other content.
        spelling: Regular expression that is found in addresses of this kind.
        test: Import path of a function that looks whether an address spelled so names this kind. Empty: it does.
        has_manifest: The data have a manifest: splits, sources of captions, labels, scores, and variants.
        can_be_mixed: Samples are found by number, so that several addresses can be mixed.
    """

    openers: Mapping[Content, str]
    lacks: Mapping[Content, str] = field(default_factory=dict)
    spelling: re.Pattern[str] = _ANY
    test: str = ""
    has_manifest: bool = True
    can_be_mixed: bool = True


IMAGES = Kind(
    dict.fromkeys(("captions", "labels", "frames"), f"{_PRODUCERS}.tar_images:open_images"),
    spelling=_TARS,
    test="clipmill.train.data.images.query:names_images",
    has_manifest=False,
)
STREAM = Kind(
    {"captions": "clipmill.train.data.streams.stream:open_stream"},
    lacks={"labels": "labels are in the manifest of a data folder", "frames": "chunks are in a data folder"},
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
        "labels": f"{_PRODUCERS}.labelled_clips:open_labels",
        "frames": f"{_PRODUCERS}.chunk_clips:open_frames",
    }
)
KINDS = (IMAGES, STREAM, CLIPS)  # the first one that fits


def kind_of(address: str, settings: "DataSettings | None" = None) -> Kind:
    """The kind of data that an address names.

    Args:
        settings: Settings with which the data are read. Without them, nothing is looked at: of kinds that are spelled
            alike, which have the same kind of manifest, it is the first one.

    Raises:
        UserError: the address names tars, and one is missing or cannot be read.
    """
    if settings is not None and settings.reads_latents:
        return LATENTS
    spelled = (kind for kind in KINDS if kind.spelling.search(address))
    if settings is None:
        return next(spelled)
    cache = {"cache": settings.cache, "cache_size": settings.cache_size}
    return next(kind for kind in spelled if not kind.test or import_object(kind.test)(address, **cache))


def is_local_folder(address: str) -> bool:
    """Return True if an address is the path of a data folder on this machine."""
    return kind_of(address).has_manifest and not is_remote(address)


def absolute_address(address: str) -> str:
    """`--shards` with absolute paths, valid in any working directory; patterns of tars are joined by `::`."""
    parts = address.split("::")
    return "::".join(one if is_remote(one) or one.startswith("$") else str(Path.cwd() / one) for one in parts)


def normalise_address(address: str) -> str:
    """An address as it is compared with others; a loop of links stays as it is."""
    parts = address.split("::")
    return "::".join(one.rstrip("/") if is_remote(one) else os.path.realpath(one) for one in parts)


def folders_of(shards: Shards) -> tuple[str, ...]:
    """The data folders."""
    return (shards,) if isinstance(shards, str) else tuple(shards)


def folder_names(folders: Sequence[str]) -> tuple[str, ...]:
    """A short name for each of several folders, for metrics and failures: their last parts, as many as differ."""
    parts = [[one for one in normalise_address(folder).split("/") if one] or ["data"] for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [re.sub(r"[^\w.-]+", "-", "-".join(part[-depth:])).strip("-.") or "data" for part in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name}-{number}" for number, name in enumerate(names, start=1))


def parse_mix(mix: str) -> tuple[Fraction, ...]:
    """The weights of `--mix 2,1`, exactly as they are written.

    Raises:
        UserError: one is not a number above 0, or they have too many digits.
    """
    weights: list[Fraction] = []
    for part in mix.split(","):
        try:
            weights.append(Fraction(part.strip()))
        except (ValueError, ZeroDivisionError):
            weights.append(Fraction(0))
        if weights[-1] <= 0:
            raise UserError(
                f"--mix is {mix}, and {part.strip()!r} is not a weight",
                hint="give a number above 0 for each --shards; leave out folders that are not to be trained on",
                flags=("--mix",),
            )
        if max(weights[-1].as_integer_ratio()) > _MAX_WHOLE:
            raise UserError(
                f"--mix is {mix}, and {part.strip()!r} has too many digits",
                hint="use weights such as 2,1 or 0.7,0.3",
                flags=("--mix",),
            )
    return tuple(weights)


@dataclass(frozen=True, kw_only=True)
class DataSettings(Checked):
    """Where the training data is."""

    shards: Annotated[Shards, groups.WHERE, FIRST_RUN, _REPEATED] = "data"
    """Data folder made by prep, or tars; several are mixed. A path, an address (s3://bucket/data), or tars of videos or
    images: 'DIR/{000000..000099}.tar'. Several are given as --shards A --shards B."""
    mix: Annotated[str | None, groups.WHERE] = None
    """Sampling weights of several --shards, in their order, such as 2,1. Default: in proportion to their sizes, so that
    each sample is visited once per epoch."""
    cache: Annotated[Path | None, groups.WHERE] = None
    """Folder for local copies of remote --shards. Default: the user's cache folder."""
    cache_size: Annotated[str | None, groups.WHERE] = None
    """Maximum size of the whole tars in the cache, such as 100GB; the least recently used are removed first. Default:
    80% of the free disk, counting what the cache holds."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The data folders."""
        return folders_of(self.shards)

    @property
    def folder(self) -> str:
        """The data folder; raises UserError if there are several, for what reads a single one."""
        if len(self.folders) == 1:
            return self.folders[0]
        raise UserError(
            f"--shards names {len(self.folders)} data folders, and this reads one: {', '.join(self.folders)}",
            hint=f"name one of them: --shards {self.folders[0]}",
            flags=("--shards",),
        )

    @property
    def reads_latents(self) -> bool:
        """True if samples are latents, which are not decoded."""
        return False

    def rules(self) -> Iterator[UserError]:
        """Yields repeated data folders, a wrong number of weights, and an invalid size of the cache."""
        if self.cache_size is not None:
            yield from errors_of(parse_size, self.cache_size, flag="--cache-size")
        if len(self.folders) > 1:
            yield from _same_folders(self.folders)
            yield from () if self.mix is None else errors_of(_require_weights, self.mix, num_folders=len(self.folders))

    def without_effect(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yields --cache and --cache-size with data that is read in place, and --mix with a single folder."""
        shards = f"--shards {' '.join(self.folders)}"
        for flag in ("--cache", "--cache-size"):
            if flag in typed and not any(map(is_remote, self.folders)):
                yield without_effect(flag, typed, f"{shards} is on this machine", use="a remote address")
        if "--mix" in typed and len(self.folders) == 1:
            yield without_effect("--mix", typed, f"{shards} is one folder", use="--shards once for each folder")


def _same_folders(folders: Sequence[str]) -> Iterator[UserError]:
    seen: dict[str, str] = {}
    for folder in folders:
        if (other := seen.get(normalise_address(folder))) is not None:
            same = "twice" if other == folder else f"and {other}, which are the same folder"
            yield UserError(
                f"--shards names {folder} {same}",
                hint="name it once, and give it more weight with --mix",
                flags=("--shards",),
            )
            return
        seen[normalise_address(folder)] = folder


def _require_weights(mix: str, *, num_folders: int) -> None:
    if (num_weights := len(parse_mix(mix))) != num_folders:
        weights = count_noun(num_weights, "weight")
        raise UserError(
            f"--mix is {mix}: {weights} for {num_folders} data folders",
            hint=f"give a weight for each --shards, in their order, as {','.join('1' * num_folders)}",
            flags=("--mix",),
        )

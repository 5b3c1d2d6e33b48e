"""`prep manifest KIND`: commands that read a dataset into the manifest, which lists videos and captions.

`datasets.py` lists the kinds of datasets. The input of a command is a folder of videos with a caption table, a folder
of videos with annotation files, a folder that contains videos and annotations, or lists of clips. For a different
input, add a function to this module that builds the command. `prep manifest captions` adds caption tables for videos
that are already in the manifest.
"""

import json as json_module
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, Token

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, on_one_line, quote_value
from clipmill.manifests.help_text import OPTIONS
from clipmill.manifests.settings import Range, raise_mistakes
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.storage.urls import folder_of, parse_location
from clipmill.manifests.store import check_data_dir, location_of
from clipmill.prep.commands.datasets import ADAPTERS, Adapter
from clipmill.prep.core.request import Data

if TYPE_CHECKING:
    import pyarrow as pa

    from clipmill.manifests.adapters.reading import Reading
    from clipmill.manifests.storage.urls import Location
    from clipmill.manifests.write import FurtherResult
    from clipmill.prep.core.failure_list import FailureEntry
else:
    Location = Path  # a converter turns the values into local paths or URLs


Dataset = Annotated[
    str | None,
    Parameter(name="--dataset", help="Name of the dataset in the manifest. Default: the name of the command."),
]
Yes = Annotated[
    bool,
    Parameter(
        name="--yes",
        negative="",
        help="Remove videos that no longer exist, even if they make up more than a third of the dataset.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the summary as JSON.")]
Annotations = Annotated[
    list[Location],
    Parameter(
        name="--annotations",
        consume_multiple=True,
        negative="",
        converter=lambda _type, tokens: _parse_locations(tokens),
        help="Paths or URLs of the annotation files.",
    ),
]


def _parse_locations(tokens: Sequence[Token]) -> "list[Location]":
    return [parse_location(token.value) for token in tokens]


_LIKELIHOOD = Range(most=0, hint="use the logarithm of a probability, 0 or less, such as -1.5")

ONE_LOCATION = Parameter(converter=lambda _type, tokens: _parse_locations(tokens)[0])
app = App(name="manifest", help="Read videos and captions of a dataset into the manifest.", group_parameters=OPTIONS)


def _with_captions(adapter: Adapter) -> Callable[..., None]:
    def command(
        directory: Annotated[Location | None, ONE_LOCATION] = None,
        *,
        captions: Annotated[
            Location | None,
            ONE_LOCATION,
            Parameter(help="Caption table: path or URL of a .csv, .tsv, .jsonl, .json or .parquet file."),
        ] = None,
        subtitles: Annotated[
            bool,
            Parameter(
                negative="",
                help="Read captions with times from files beside the videos: subtitles (.srt, .vtt) and transcripts "
                "in Whisper's format (.json), named NAME.srt or NAME.en.srt for NAME.mp4.",
            ),
        ] = False,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        into = Target(data, name, directory, allows_removal=yes, as_json=json)
        read_captioned(adapter, captions, subtitles=subtitles, into=into)

    return command


def read_captioned(
    adapter: Adapter, captions: "Location | None", *, subtitles: bool = False, into: "Target", has_next: bool = True
) -> None:
    """Read a folder of videos, with an optional caption table, into the manifest (see `write_dataset`)."""

    def read(tables: list[Path]) -> "Reading":
        from clipmill.manifests.store import known_files

        known, data = known_files(into.data, into.dataset), location_of(into.data)
        table = tables[0] if tables else None
        return adapter.read(
            into.videos, captions=table, subtitles=subtitles, dataset=into.dataset, skip=data, known_files=known
        )

    write_dataset(read, [] if captions is None else [captions], into=into, has_next=has_next)


def _with_annotations(adapter: Adapter) -> Callable[..., None]:
    def command(
        directory: Annotated[Location, ONE_LOCATION],
        *,
        annotations: Annotations,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        write_dataset(
            lambda tables: adapter.read(directory, annotations=tables, dataset=name, skip=location_of(data)),
            annotations,
            into=Target(data, name, directory, allows_removal=yes, as_json=json),
        )

    return command


def _with_lists(adapter: Adapter) -> Callable[..., None]:
    def command(
        lists: Annotated[
            list[Location], Parameter(negative="", converter=lambda _type, tokens: _parse_locations(tokens))
        ],
        /,
        *,
        videos: Annotated[
            Location | None,
            ONE_LOCATION,
            Parameter(help="Folder of the videos. Default: the folder of the first list."),
        ] = None,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        directory = folder_of(lists[0]) if videos is None else videos
        write_dataset(
            lambda tables: adapter.read(tables, videos=directory, dataset=name, skip=location_of(data)),
            lists,
            into=Target(data, name, directory, allows_removal=yes, as_json=json),
        )

    return command


def _with_folder(adapter: Adapter) -> Callable[..., None]:
    def command(
        directory: Annotated[Location, ONE_LOCATION],
        *,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        write_dataset(
            lambda _: adapter.read(directory, dataset=name),
            into=Target(data, name, directory, allows_removal=yes, as_json=json),
        )

    return command


_COMMANDS = {"captions": _with_captions, "annotations": _with_annotations, "lists": _with_lists, "folder": _with_folder}
for _adapter in ADAPTERS.list_usable():
    _command = _COMMANDS[_adapter.takes](_adapter)
    _command.__doc__ = _adapter.text
    app.command(_command, name=_adapter.name)


@app.command
def synthetic(
    *,
    videos: Annotated[int, Parameter(help="Number of videos, 1 or more. Every fifth video is in the split val.")] = 24,
    minutes: Annotated[float, Parameter(help="Length of each video in minutes, up to 600.")] = 1.0,
    seed: Annotated[int, Parameter(help="Random seed for the scenes.")] = 0,
    mode: Annotated[
        Literal["shapes", "frame-numbers"],
        Parameter(
            help="Content of the videos. shapes: moving shapes, with captions that describe them; frame-numbers: "
            "frames that encode their number, for tests."
        ),
    ] = "shapes",
    out: Annotated[
        Path | None, Parameter(help="Folder to write the videos to. Default: the folder synthetic in --data.")
    ] = None,
    data: Data = Path("data"),
    dataset: Dataset = None,
    json: Json = False,
) -> None:
    """Create synthetic videos with captions, for trials and tests.

    Example:

        prep manifest synthetic --videos 24 --minutes 1
    """
    from clipmill.manifests.progress import Activity
    from clipmill.prep.synthetic import Mode, make_synthetic

    raise_mistakes(
        [*Range(least=1).mistakes("--videos", videos), *Range(above=0, most=600).mistakes("--minutes", minutes)]
    )
    name = dataset or "synthetic"
    if out is None and (mirror := mirror_of(data)) is not None:
        raise UserError(
            f"synthetic videos cannot be written to the bucket {mirror.url}", hint="use --out with a local folder"
        )
    directory = data / "synthetic" if out is None else out

    def make(_tables: list[Path]) -> "Reading":
        activity_text = f"creating {count_noun(videos, 'video')}"
        with Activity(activity_text) as activity:
            show = activity.counter(activity_text)
            return make_synthetic(
                directory,
                num_videos=videos,
                minutes=minutes,
                seed=seed,
                mode=Mode(mode),
                dataset=name,
                on_video=lambda num_done: show(num_done, videos),
            )

    write_dataset(make, into=Target(data, name, directory, allows_removal=True, as_json=json))


@dataclass(frozen=True)
class Target:
    """Destination of a dataset, the folder of its videos, and flags for writing it.

    Attributes:
        data: Data folder.
        dataset: Name of the dataset in the manifest.
        videos: Folder of the videos; None if the tables contain the URLs of the videos.
        allows_removal: True to remove missing videos, even if they make up more than a third of the dataset.
        as_json: True to print the summary as JSON.
    """

    data: Path
    dataset: str
    videos: "Location | None"
    allows_removal: bool
    as_json: bool


def write_dataset(
    read: "Callable[[list[Path]], Reading]", tables: "Sequence[Location]" = (), *, into: Target, has_next: bool = True
) -> None:
    """Read a dataset and write it to the manifest.

    Args:
        read: Function that takes local copies of the tables and returns the dataset.
        tables: Paths or URLs of caption tables or annotation files.
        into: Destination of the dataset.
        has_next: True to print the next command.

    Raises:
        UserError: The dataset has no usable videos, its name is invalid, or the data folder cannot be created.
        FailedWork: A table has no usable rows.
    """
    from clipmill.manifests.adapters.reading import is_encodable, read_with_local_tables
    from clipmill.manifests.errors import DISK_ERRORS
    from clipmill.manifests.formatting import quote_value
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import DamagedManifest, read_manifest, read_rejected_rows
    from clipmill.manifests.write import write_manifest
    from clipmill.prep.commands import manifest_text
    from clipmill.prep.core.data_folder import lock_for_writing
    from clipmill.prep.core.failure_list import first_rejected

    data, dataset = into.data, into.dataset
    check_data_dir(data, videos=into.videos)
    # Report an unsupported manifest format before reading the dataset, because reading may take long.
    if (data / "manifest" / "manifest.json").exists():
        with suppress(DamagedManifest):  # writing the manifest repairs it, or reports the damage
            read_manifest(data)
    if not is_encodable(dataset):
        raise UserError(f"--dataset {quote_value(dataset)} is not valid Unicode", hint="use a different name")
    with Activity(f"reading dataset {on_one_line(dataset)}"):
        reading = read_with_local_tables(tables, read)
    if not reading.videos.num_rows:
        message, hint = manifest_text.no_video_text(reading, dataset)
        raise UserError(message, hint=hint)
    # Writing a dataset without usable rows would replace the existing captions, and their IDs would be lost.
    manifest_text.require_usable_rows(reading, as_json=into.as_json)
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot create the data folder {data}: {reason}", hint="use --data with a different folder"
        ) from error
    with lock_for_writing(data), Activity("writing the manifest"):
        written = write_manifest(
            data,
            dataset,
            reading.videos,
            reading.captions,
            reading.rejected,
            num_captions_lost=reading.num_captions_lost,
            allows_removal=into.allows_removal,
        )
        rejected = first_rejected(read_rejected_rows(data), dataset=dataset) if written.num_rejected else []
    notes = list(reading.notes)
    if count := written.num_captions_repeated:
        equal = "equals an earlier caption" if count == 1 else "equal earlier captions"
        notes.append(f"{count_noun(count, 'caption')} {equal} in video, times, source and text; all are kept")
    if into.as_json:
        values = manifest_text.written_values(written, rejected=rejected, notes=notes)
        print(json_module.dumps(values, indent=1, sort_keys=True))
    else:
        print(manifest_text.written_text(written, rejected=rejected, notes=notes))
        if has_next:
            print(f"next: {manifest_text.chunk_command(data)}")


@app.command(name="captions")
def add_captions(
    tables: Annotated[
        list[Path] | None,
        Parameter(
            negative="",
            help="CSV, JSON or Parquet files with the columns video and text, and optionally begin_s, end_s or "
            "duration_s (in seconds), source and likelihood.",
        ),
    ] = None,
    /,
    *,
    remove: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="Caption source to remove instead of adding tables: a name shown by prep status, or the name of a "
            "model without its version. May be repeated.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        Parameter(
            help="Source name for all captions. Default: the values in the column source of the table or, without "
            "this column, the file name."
        ),
    ] = None,
    min_likelihood: Annotated[
        float | None,
        Parameter(
            help="Minimum likelihood of a caption (mean log-probability per token), 0 or less; less likely captions "
            "are dropped. Captions without a likelihood are kept."
        ),
    ] = None,
    drop_duplicates: Annotated[
        bool,
        Parameter(
            negative="",
            help="Drop duplicate captions of the same clip and source, ignoring case and whitespace. The most likely "
            "duplicate is kept.",
        ),
    ] = False,
    data: Data = Path("data"),
    json: Annotated[bool, Parameter(name="--json", negative="", help="Print the summary as JSON.")] = False,
) -> None:
    """Add captions from tables to the manifest, such as the output of `train caption-chunks`, or remove them again.

    New captions replace only captions of the same source, or of an earlier version of the same model. Added captions
    are kept when a dataset is read again. Training uses model captions only if --captions.sources lists their source.

    Examples:

        prep manifest captions captions.parquet --min-likelihood -1.5
        prep manifest captions --remove captioner
    """
    from clipmill.manifests.adapters.further import Limits, read_caption_tables
    from clipmill.manifests.further_sources import SOURCE_CHARS, is_source_name
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import read_rejected_rows, read_videos
    from clipmill.manifests.write import FURTHER, write_further_captions
    from clipmill.prep.commands import manifest_text
    from clipmill.prep.core.data_folder import lock_for_writing, require_data_folder
    from clipmill.prep.core.failure_list import entry_values, first_rejected
    from clipmill.prep.upkeep.caption_sources import chunk_finder, ends_of_videos, other_variants
    from clipmill.shards.columns import VIDEO
    from clipmill.shards.dataset import current_variant

    raise_mistakes(_LIKELIHOOD.mistakes("--min-likelihood", min_likelihood))
    if source is not None and not is_source_name(source):
        raise UserError(
            f"--source {quote_value(source)} is not a valid name", hint=f"use a name that consists of {SOURCE_CHARS}"
        )
    folder = require_data_folder(data)
    if remove:
        others = {"tables": tables, "--source": source, "--min-likelihood": min_likelihood}
        _remove_sources(folder, remove, others={**others, "--drop-duplicates": drop_duplicates or None}, as_json=json)
        return
    if not tables:
        raise UserError("no caption tables were passed", hint="pass tables, or --remove with the name of a source")
    # Hold the lock while reading the tables, because their rows refer to videos in the manifest.
    with lock_for_writing(folder), Activity("reading captions"):
        videos = read_videos(folder)
        limits = Limits(ends_of_videos(folder, videos), chunk_finder(folder, videos))
        content = read_caption_tables(tables, videos=videos, dataset=FURTHER, source=source, limits=limits)
        manifest_text.require_usable_rows(content.reading, as_json=json)
        captions, num_dropped = _select_captions(
            content.reading.captions, min_likelihood=min_likelihood, drop_duplicates=drop_duplicates
        )
        criteria = {"min_likelihood": min_likelihood, "drop_duplicates": drop_duplicates}
        written = write_further_captions(
            folder,
            captions,
            content.reading.rejected,
            records={name: {**record, **criteria} for name, record in content.records.items()},
        )
        has_rejected = content.reading.rejected.num_rows > 0
        rejected = first_rejected(read_rejected_rows(folder), dataset=FURTHER) if has_rejected else []
    current = current_variant(folder, VIDEO)
    variants = {name: other_variants(record["models"], current=current) for name, record in content.records.items()}
    values = {
        **_further_values(written, reading=content.reading, num_dropped=num_dropped),
        "other_variants": {name: names for name, names in variants.items() if names},
    }
    if json:
        print(json_module.dumps({**values, "first_rejected": entry_values(rejected)}, indent=1, sort_keys=True))
    else:
        num_files = content.reading.rejected["row"].null_count
        print("\n".join(_further_lines(written, values, rejected=rejected, num_files_rejected=num_files)))
        print(f"next: {manifest_text.chunk_command(data)}")


def _remove_sources(folder: Path, names: Sequence[str], *, others: Mapping[str, object], as_json: bool) -> None:
    """Remove caption sources. `others` contains the arguments that cannot be used with `--remove`, keyed by name."""
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import manifest_dir
    from clipmill.manifests.write import remove_further_sources
    from clipmill.prep.commands.manifest_text import chunk_command
    from clipmill.prep.core.data_folder import lock_for_writing

    for name, value in others.items():
        if value is not None:
            raise UserError(f"--remove and {name} cannot be used together", hint="run two commands, one for each")
    with lock_for_writing(folder), Activity("writing the manifest"):
        removed = remove_further_sources(folder, names)
    if as_json:
        values = {"num_captions_removed": removed, "manifest": os.fspath(manifest_dir(folder))}
        print(json_module.dumps(values, indent=1, sort_keys=True))
        return
    for name, count in removed.items():
        print(f"{on_one_line(name)}: {count_noun(count, 'caption')} removed")
    print(f"manifest: {manifest_dir(folder)}")
    print(f"next: {chunk_command(folder)}")


def _select_captions(
    table: "pa.Table", *, min_likelihood: float | None, drop_duplicates: bool
) -> tuple["pa.Table", dict[str, int]]:
    """Return the captions to keep, and the number of dropped captions, keyed by reason.

    Args:
        table: Captions in the passed tables, of all sources.

    Raises:
        UserError: `min_likelihood` is set, but no caption has a likelihood.
        FailedWork: All captions of a source are dropped, which would also remove its earlier captions.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from clipmill.manifests.previous import is_duplicate, is_unlikely

    num_dropped, captions = {}, table
    if min_likelihood is not None:
        if table["likelihood"].null_count == table.num_rows:
            raise UserError(
                f"--min-likelihood {min_likelihood:g} has no effect: no caption in the tables has a likelihood",
                hint="omit --min-likelihood, or use tables with the column likelihood",
            )
        unlikely = is_unlikely(captions, min_likelihood=min_likelihood)
        num_dropped["unlikely"], captions = int(unlikely.sum()), captions.filter(pa.array(~unlikely))
    if drop_duplicates:
        duplicates = is_duplicate(captions)
        num_dropped["duplicate"], captions = int(duplicates.sum()), captions.filter(pa.array(~duplicates))
    # New captions of a source replace its earlier captions. A source without new captions would lose all its captions.
    kept_sources = set(pc.unique(captions["source"]).to_pylist())
    for name in pc.unique(table["source"]).to_pylist():
        if name not in kept_sources:
            raise FailedWork(
                f"no captions of {name} are left: all are below --min-likelihood {min_likelihood:g}; "
                "the manifest was not changed"
            )
    return captions, num_dropped


def _further_values(written: "FurtherResult", *, reading: "Reading", num_dropped: dict[str, int]) -> dict[str, Any]:
    reasons = reading.rejected["reason"].value_counts().to_pylist()
    return {
        "sources": {
            name: {
                "num_captions": count,
                "num_captions_added": written.num_added[name],
                "num_captions_removed": written.num_removed[name],
            }
            for name, count in written.num_captions.items()
        },
        "stale": written.num_stale,
        "num_dropped": num_dropped,
        "notes": list(reading.notes),
        "num_captions_lost": reading.num_captions_lost,
        "num_rejected": {entry["values"]: entry["counts"] for entry in reasons},
        "manifest": os.fspath(written.folder),
    }


def _further_lines(
    written: "FurtherResult", values: dict[str, Any], *, rejected: "Sequence[FailureEntry]", num_files_rejected: int
) -> Iterator[str]:
    from clipmill.manifests.adapters.annotations import Reason
    from clipmill.manifests.caption_spans import is_model_source
    from clipmill.manifests.further_sources import source_name
    from clipmill.prep.commands.manifest_text import ADVICE, rejected_lines

    for name, count in written.num_captions.items():
        changes = f"{written.num_added[name]:,} new"
        if written.num_removed[name]:
            changes += f", {written.num_removed[name]:,} removed"
        yield f"{on_one_line(name)}: {count_noun(count, 'caption')} ({changes})"
    for name, count in written.num_stale.items():
        yield f"stale: {count_noun(count, 'caption')} of the earlier version {on_one_line(name)} replaced"
    for name, variants in values["other_variants"].items():
        captions = f"the captions of {on_one_line(name)}"
        yield f"note: {captions} describe chunks of {', '.join(variants)}, not of the current variant"
    if models := [name for name in written.num_captions if is_model_source(name)]:
        names = ", ".join(f"{source_name(name)}@*=1" for name in models)
        yield f"note: training uses model captions only if --captions.sources lists them, such as human=1,{names}"
    yield from (f"note: {on_one_line(note)}" for note in values["notes"])
    if values["num_dropped"]:
        yield "dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in values["num_dropped"].items())
    if reasons := values["num_rejected"]:
        yield from rejected_lines(
            reasons,
            rejected,
            num_files=num_files_rejected,
            num_captions_lost=values["num_captions_lost"],
            folder=written.folder,
        )
        if Reason.MISSING_CHUNK in reasons:
            yield f"  hint: {ADVICE[Reason.MISSING_CHUNK]}"
    yield f"manifest: {written.folder}"

"""`prep manifest KIND`: the commands that read datasets into the manifest, one per kind of dataset.

`datasets.py` lists the kinds. A kind takes a table of captions, annotation files, lists of clips, or a folder with
everything; a kind with another input needs a function here that makes its command.
"""

import json as json_module
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter, Token

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.help_text import OPTIONS
from clipmill.manifests.settings import Range, refuse
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.storage.urls import folder_of, place_of
from clipmill.manifests.store import address_of, check_data_dir
from clipmill.prep.commands import manifest_captions
from clipmill.prep.commands.datasets import ADAPTERS, Adapter
from clipmill.prep.core.request import Data

if TYPE_CHECKING:
    from clipmill.manifests.adapters.reading import Reading
    from clipmill.manifests.storage.urls import Place
else:
    Place = Path  # with a converter: flags are local paths or URLs

Dataset = Annotated[
    str | None,
    Parameter(name="--dataset", help="Name of the dataset in the manifest. Default: the name of the command."),
]
Yes = Annotated[
    bool,
    Parameter(
        name="--yes",
        negative="",
        help="Remove videos that are no longer found even if they are more than a third of the dataset.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the summary as JSON.")]
Annotations = Annotated[
    list[Place],
    Parameter(
        name="--annotations",
        consume_multiple=True,
        negative="",
        converter=lambda _type, tokens: _places(tokens),
        help="Annotation files, paths or URLs.",
    ),
]


def _places(tokens: Sequence[Token]) -> "list[Place]":
    return [place_of(token.value) for token in tokens]


ONE_PLACE = Parameter(converter=lambda _type, tokens: _places(tokens)[0])
app = App(name="manifest", help="Read videos and captions of a dataset into the manifest.", group_parameters=OPTIONS)


def _with_captions(adapter: Adapter) -> Callable[..., None]:
    def command(
        directory: Annotated[Place | None, ONE_PLACE] = None,
        *,
        captions: Annotated[
            Place | None,
            ONE_PLACE,
            Parameter(help="Caption table, a path or URL of a .csv, .tsv, .jsonl, .json or .parquet file."),
        ] = None,
        subtitles: Annotated[
            bool,
            Parameter(
                negative="",
                help="Read files beside the videos as captions with times: subtitles (.srt, .vtt) and speech "
                "recognition in the form of Whisper (.json), named NAME.srt or NAME.en.srt for NAME.mp4.",
            ),
        ] = False,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        into = Target(data, name, directory, may_remove=yes, as_json=json)
        read_captioned(adapter, captions, subtitles=subtitles, into=into)

    return command


def read_captioned(
    adapter: Adapter, captions: "Place | None", *, subtitles: bool = False, into: "Target", has_next: bool = True
) -> None:
    """Read a folder of videos, and a table of captions if there is one, into the manifest; see `write_dataset`."""

    def read(tables: list[Path]) -> "Reading":
        from clipmill.manifests.store import known_files

        known, data = known_files(into.data, into.dataset), address_of(into.data)
        table = tables[0] if tables else None
        return adapter.read(
            into.videos, captions=table, subtitles=subtitles, dataset=into.dataset, skip=data, known=known
        )

    write_dataset(read, [] if captions is None else [captions], into=into, has_next=has_next)


def _with_annotations(adapter: Adapter) -> Callable[..., None]:
    def command(
        directory: Annotated[Place, ONE_PLACE],
        *,
        annotations: Annotations,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        write_dataset(
            lambda tables: adapter.read(directory, annotations=tables, dataset=name, skip=address_of(data)),
            annotations,
            into=Target(data, name, directory, may_remove=yes, as_json=json),
        )

    return command


def _with_lists(adapter: Adapter) -> Callable[..., None]:
    def command(
        lists: Annotated[list[Place], Parameter(negative="", converter=lambda _type, tokens: _places(tokens))],
        /,
        *,
        videos: Annotated[
            Place | None, ONE_PLACE, Parameter(help="Folder of the videos. Default: the folder of the first list.")
        ] = None,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        directory = folder_of(lists[0]) if videos is None else videos
        write_dataset(
            lambda tables: adapter.read(tables, videos=directory, dataset=name, skip=address_of(data)),
            lists,
            into=Target(data, name, directory, may_remove=yes, as_json=json),
        )

    return command


def _with_folder(adapter: Adapter) -> Callable[..., None]:
    def command(
        directory: Annotated[Place, ONE_PLACE],
        *,
        data: Data = Path("data"),
        dataset: Dataset = None,
        yes: Yes = False,
        json: Json = False,
    ) -> None:
        name = dataset or adapter.name
        write_dataset(
            lambda _: adapter.read(directory, dataset=name),
            into=Target(data, name, directory, may_remove=yes, as_json=json),
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
    seed: Annotated[int, Parameter(help="Random seed of the scenes.")] = 0,
    mode: Annotated[
        Literal["shapes", "frame-numbers"],
        Parameter(
            help="Content. shapes: moving shapes with captions that describe them; frame-numbers: frames that "
            "encode their number, for tests."
        ),
    ] = "shapes",
    out: Annotated[
        Path | None, Parameter(help="Folder of the videos. Default: the folder synthetic in --data.")
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

    refuse([*Range(least=1).mistakes("--videos", videos), *Range(above=0, most=600).mistakes("--minutes", minutes)])
    name = dataset or "synthetic"
    if out is None and (mirror := mirror_of(data)) is not None:
        raise UserError(
            f"synthetic videos are files, and {mirror.address} is a bucket", hint="give a local folder with --out"
        )
    directory = data / "synthetic" if out is None else out

    def make(_tables: list[Path]) -> "Reading":
        creating = f"creating {count_noun(videos, 'video')}"
        with Activity(creating) as now:
            show = now.counter(creating)
            return make_synthetic(
                directory,
                num_videos=videos,
                minutes=minutes,
                seed=seed,
                mode=Mode(mode),
                dataset=name,
                on_video=lambda num_done: show(num_done, videos),
            )

    write_dataset(make, into=Target(data, name, directory, may_remove=True, as_json=json))


app.command(manifest_captions.captions)


@dataclass(frozen=True)
class Target:
    """Destination of a dataset, and flags for writing it.

    Attributes:
        dataset: Name in the manifest.
        videos: Folder of its videos, or None if the tables name them.
        may_remove: Value of `--yes`.
        as_json: Value of `--json`.
    """

    data: Path
    dataset: str
    videos: "Place | None"
    may_remove: bool
    as_json: bool


def write_dataset(
    read: "Callable[[list[Path]], Reading]", tables: "Sequence[Place]" = (), *, into: Target, has_next: bool = True
) -> None:
    """Read a dataset and write it to the manifest.

    Args:
        read: Function that is called with local copies of the tables.
        tables: Annotation files.
        has_next: Print the next command.
    """
    from clipmill.manifests.adapters.reading import is_encodable, read_with_local_tables
    from clipmill.manifests.errors import DISK_ERRORS
    from clipmill.manifests.formatting import quote_value
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.store import DamagedManifest, read_manifest, read_rejected_rows
    from clipmill.manifests.write import write_manifest
    from clipmill.prep.commands import manifest_text
    from clipmill.prep.core.data_folder import writing
    from clipmill.prep.core.failure_list import first_rejected

    data, dataset = into.data, into.dataset
    check_data_dir(data, videos=into.videos)
    # A manifest of another format is an error before the work begins rather than at its end.
    if (data / "manifest" / "manifest.json").exists():
        with suppress(DamagedManifest):  # writing the manifest repairs it, or fails with the reason
            read_manifest(data)
    if not is_encodable(dataset):
        raise UserError(f"--dataset {quote_value(dataset)} is not valid Unicode", hint="give another name")
    with Activity(f"reading dataset {on_one_line(dataset)}"):
        reading = read_with_local_tables(tables, read)
    if not reading.videos.num_rows:
        message, hint = manifest_text.no_video_text(reading, dataset)
        raise UserError(message, hint=hint)
    if manifest_text.unused_files(reading):
        # If it were written, it would replace the existing captions, and their ids would be lost for good.
        raise FailedWork(manifest_text.unused_text(reading))
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        why = error.strerror or str(error)
        raise UserError(
            f"cannot create the data folder {data}: {why}", hint="give another folder with --data"
        ) from error
    with writing(data), Activity("writing the manifest"):
        written = write_manifest(
            data,
            dataset,
            reading.videos,
            reading.captions,
            reading.rejected,
            num_captions_lost=reading.num_captions_lost,
            may_remove=into.may_remove,
        )
        rejected = first_rejected(read_rejected_rows(data), dataset=dataset) if written.num_rejected else []
    if into.as_json:
        values = manifest_text.written_values(written, rejected=rejected, notes=reading.notes)
        print(json_module.dumps(values, indent=1, sort_keys=True))
    else:
        print(manifest_text.written_text(written, rejected=rejected, notes=reading.notes))
        if has_next:
            print(f"next: {manifest_text.chunk_command(data)}")

"""`prep manifest KIND`: the commands that read datasets into the manifest, one per kind of dataset.

`ADAPTERS` has the kinds: each entry has the reader, its parameters and the help text. To add a kind of dataset, write a
reader in `manifests/adapters/` and add an entry here, or declare it in a package of your own (docs/plugins.md).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter, Token

from clipmill.manifests.data_location import address_of
from clipmill.manifests.errors import UserError
from clipmill.manifests.flag_values import OPTIONS
from clipmill.manifests.plugins import Parts
from clipmill.manifests.quoting import counted
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.storage.urls import folder_of, place_of
from clipmill.prep.commands import manifest_captions
from clipmill.prep.commands.datasets import DATASETS, Adapter
from clipmill.prep.commands.manifest_write import Target, write_dataset
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


_ADAPTERS = (
    Adapter(
        "folder",
        "clipmill.manifests.adapters.folder:read_folder",
        "captions",
        """Read all video files in a folder, with an optional caption table.

        The table has the columns video and text, and optionally begin_s, end_s or duration_s (in seconds), source,
        likelihood, split (train, val or test), label, and label_NAME for other labels; with a label, text may be
        missing. Common other names of these columns, separators and encodings are recognized. If none of its rows is
        valid, the manifest is not changed.

        Videos on a web server, which cannot be listed, are those that the table names by URLs, or by paths below the
        URL given as the folder.

        Example: prep manifest folder VIDEOS --captions captions.csv

        Parameters
        ----------
        directory
            Folder of the videos, a path or a URL such as s3://bucket/videos; subfolders are included. Omit it if the
            table has the URLs of the videos.
        """,
    ),
    Adapter(
        "vatex",
        "clipmill.manifests.adapters.vatex:read_vatex",
        "annotations",
        """Read VATEX: clips with ten English captions each.

        Example: prep manifest vatex VIDEOS --annotations vatex_training_v1.0.json

        Parameters
        ----------
        directory
            Folder of the videos, named <videoID>.mp4 or with another extension.
        """,
    ),
    Adapter(
        "ego4d",
        "clipmill.manifests.adapters.ego4d:read_ego4d",
        "annotations",
        """Read Ego4D narrations: the official JSON files, the pickled lists of AVION and LaViLa, or EgoVLP's files.

        The files are all_narrations_redacted.json or narration.json. Their timestamps are expanded to intervals by
        EgoVLP's rule. With ego4d.json, videos of any validation or test split are not in train. Pickles may contain
        only lists, tuples, strings and numbers; any other pickle is rejected without being executed. EgoVLP's
        egoclip.csv has training pairs, and the clips of its egomcq.json are in val. A .txt file lists videos to leave
        out, one ID per line.

        Example: prep manifest ego4d VIDEOS --annotations narration.json ego4d.json

        Parameters
        ----------
        directory
            Folder of the videos, named <video_uid>.mp4.
        """,
    ),
    *DATASETS,
)
ADAPTERS = Parts(
    "adapter",
    group="adapters",
    kind=Adapter,
    own={adapter.name: adapter for adapter in _ADAPTERS},
    taken=("captions", "synthetic"),
)


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

        def read(tables: list[Path]) -> "Reading":
            from clipmill.manifests.store import known_files

            known = known_files(data, name)
            table = tables[0] if tables else None
            return adapter.read(
                directory, captions=table, subtitles=subtitles, dataset=name, skip=address_of(data), known=known
            )

        into = Target(data, name, directory, may_remove=yes, as_json=json)
        write_dataset(read, [] if captions is None else [captions], into=into)

    return command


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


_COMMANDS = {"captions": _with_captions, "annotations": _with_annotations, "lists": _with_lists}
for _adapter in ADAPTERS.working():
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
    from clipmill.prep.synthetic.make import Mode, make_synthetic

    if videos < 1:
        raise UserError(f"--videos {videos} is out of range", hint="give 1 or more")
    if not 0 < minutes <= 600:
        raise UserError(f"--minutes {minutes} is out of range", hint="give a number greater than 0 and at most 600")
    name = dataset or "synthetic"
    if out is None and (mirror := mirror_of(data)) is not None:
        raise UserError(
            f"synthetic videos are files, and {mirror.address} is a bucket", hint="give a local folder with --out"
        )
    directory = data / "synthetic" if out is None else out

    def make(_tables: list[Path]) -> "Reading":
        creating = f"creating {counted(videos, 'video')}"
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

"""The commands `prep export KIND`: `KINDS` contains a row for each kind, with its flags, writer and help."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import OPTIONS
from clipmill.manifests.locks import try_lock
from clipmill.manifests.plugins import import_object
from clipmill.manifests.publish import TEMPORARY_PREFIX, rename, target_of, temporary_path
from clipmill.manifests.settings import Checked, Range
from clipmill.prep.core.request import Data, Json

Progress = Callable[[int, int | None], None]  # function that is called with (samples done, total number of samples)


@dataclass(frozen=True)
class ExportResult:
    """Numbers of samples in an export after a run.

    Attributes:
        noun: Singular noun for a sample of the export, such as "segment".
        num_samples: Number of samples in the export.
        num_written: Number of samples that this run wrote. All other samples were already up to date.
        left_out: Reason -> number of samples that were omitted for this reason.
    """

    noun: str
    num_samples: int
    num_written: int
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportKind:
    """A format that `prep export` writes.

    Attributes:
        name: Name of the command.
        flags: Frozen dataclass whose fields are the flags. All fields have defaults.
        writer: Import path `package.module:function` of the function that writes the export. The function takes the
            data folder, the destination, an instance of `flags` and a `Progress`, and returns an `ExportResult`. A
            rerun without changes must write nothing, and a killed run must not leave anything that looks like a
            complete export.
        help_text: Help text of the command.
    """

    name: str
    flags: type[Any]
    writer: str
    help_text: str


@dataclass(frozen=True, kw_only=True)
class ZarrFlags(Checked):
    """Flags of `prep export zarr`."""

    split: str = "train"
    """Split of the manifest to export."""

    segment: str = "5s"
    """Length of a segment, such as 5s. It must contain a whole number of latent frames."""

    chunk: Annotated[int, Parameter(allow_leading_hyphen=True), Range(least=1)] = 1
    """Number of segments per Zarr chunk, 1 or more, for example the training batch size."""

    level: Annotated[int, Parameter(allow_leading_hyphen=True), Range(0, 9)] = 5
    """Compression level of Blosc with Zstandard, 0 to 9."""


@dataclass(frozen=True, kw_only=True)
class TrainerFlags(Checked):
    """Flags of the exports for trainers of video models."""

    split: str = "train"
    """Split of the manifest to export."""


@dataclass(frozen=True, kw_only=True)
class DiffusionPipeFlags(TrainerFlags):
    """Flags of `prep export diffusion-pipe`."""

    model: str | None = None
    """Name of the model in diffusion-pipe, and of its folder in the cache. Default: wan, wan2.2_5b, hunyuan-video or
    hunyuan_video_1.5, depending on the latents. Required for LTX-Video: the name of the file in single_file_path,
    without .safetensors."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error if the model is not a valid folder name."""
        if self.model is not None and (not self.model or Path(self.model).name != self.model):
            yield UserError(
                f'--model "{self.model}" is not a folder name',
                hint="use a name such as wan",
                flags=("--model",),
            )


KINDS = (
    ExportKind(
        "zarr",
        ZarrFlags,
        "clipmill.prep.exports.zarr_store:write_zarr_store",
        """Write latents and text embeddings as a Zarr store for segment loaders.

        The arrays are base_frames [segments, frames, C, h, w], clip_emb [videos, D] and segment_to_video [segments].
        The embedding of a video is the embedding of its first caption. A rerun does nothing if columns and flags are
        unchanged and no file is missing.

        Example: prep export zarr segments.zarr --chunk 32

        Parameters
        ----------
        destination
            Folder of the store. An existing store is replaced if `prep export` wrote it.
        """,
    ),
    ExportKind(
        "musubi",
        TrainerFlags,
        "clipmill.prep.exports.trainers:write_musubi_cache",
        """Write a cache for musubi-tuner: latents and texts for Wan, or latents for HunyuanVideo and HunyuanVideo-1.5.

        Each segment has the overlapping caption with the lowest ID. If texts are exported, captions without a text
        sequence are ignored. A rerun links the files of unchanged segments.

        Example: prep export musubi cache

        Parameters
        ----------
        destination
            Folder of the cache: cache_directory in the dataset configuration of musubi-tuner. An existing cache is
            replaced if `prep export` wrote it.
        """,
    ),
    ExportKind(
        "finetrainers",
        TrainerFlags,
        "clipmill.prep.exports.trainers:write_finetrainers_data",
        """Write precomputed data for finetrainers: latents and texts for Wan, LTX-Video and CogVideoX.

        Each segment has the overlapping caption with the lowest ID. If texts are exported, captions without a text
        sequence are ignored. A rerun links the files of unchanged segments.

        Example: prep export finetrainers precomputed

        Parameters
        ----------
        destination
            Folder of the data: --precomputation_dir of finetrainers, with --precomputation_reuse. An existing folder is
            replaced if `prep export` wrote it.
        """,
    ),
    ExportKind(
        "diffusion-pipe",
        DiffusionPipeFlags,
        "clipmill.prep.exports.diffusion_pipe:write_diffusion_pipe_cache",
        """Write a cache for diffusion-pipe: latents and texts for Wan and LTX-Video, or latents for HunyuanVideo and
        HunyuanVideo-1.5.

        Each segment has the overlapping caption with the lowest ID. If texts are exported, captions without a text
        sequence are ignored. A rerun links the files of unchanged shards.

        Example: prep export diffusion-pipe dataset

        Parameters
        ----------
        destination
            Folder for the cache and dataset.toml. Start the trainer with this dataset.toml and --trust_cache. An
            existing folder is replaced if `prep export` wrote it.
        """,
    ),
)


app = App(name="export", help="Write columns in a format that other tools read.", group_parameters=OPTIONS)


def _command(kind: ExportKind) -> Callable[..., None]:
    defaults = kind.flags()

    def command(destination: Path, *, flags: Any = defaults, data: Data = Path("data"), json: Json = False) -> None:
        from dataclasses import asdict

        from clipmill.manifests.formatting import count_noun
        from clipmill.manifests.progress import Activity
        from clipmill.prep.core.data_folder import require_data_folder
        from clipmill.prep.core.report import NOTHING_TO_DO, show
        from clipmill.prep.core.work import Report

        title = f"exporting to {destination}"
        with Activity(title) as activity:
            write: Callable[..., ExportResult] = import_object(kind.writer)
            export = write(require_data_folder(data), destination, flags, activity.counter(title))
        lines = [
            f"exported  {count_noun(export.num_written, export.noun)} to {destination}"
            if export.num_written
            else f"{NOTHING_TO_DO}: {destination} is up to date with {count_noun(export.num_samples, export.noun)}"
        ]
        lines += [f"left out  {num:,}: {reason}" for reason, num in export.left_out.items() if num]
        show(Report("\n".join(lines), asdict(export)), json=json)

    command.__annotations__["flags"] = Annotated[kind.flags, Parameter(name="*")]
    command.__doc__ = kind.help_text
    return command


for _kind in KINDS:
    app.command(_command(_kind), name=_kind.name)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` when the block succeeds. Leftovers of killed runs are removed.

    If `folder` is a symbolic link, the target of the link is replaced.
    """
    folder = folder.resolve()
    for leftover in folder.parent.glob(f"{TEMPORARY_PREFIX}*"):
        if target_of(leftover.name) == folder.name and (lock := try_lock(leftover)) is not None:
            shutil.rmtree(leftover)
            os.close(lock)
    temporary = temporary_path(folder)
    temporary.mkdir(parents=True)
    lock = try_lock(temporary)
    try:
        yield temporary
        os.sync()  # faster than syncing thousands of files one by one
        if folder.exists():
            old_folder = rename(folder, temporary_path(folder))
            rename(temporary, folder)
            shutil.rmtree(old_folder)
        else:
            rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)

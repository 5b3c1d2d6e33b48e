"""The kinds of `prep export`: a row each, with its flags and the function that writes it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import import_object
from clipmill.manifests.settings import Checked, Range

Progress = Callable[[int, int | None], None]  # is called with the number of samples done and of all


@dataclass(frozen=True)
class Exported:
    """What is in an export after a run.

    Attributes:
        noun: what a sample is called, singular.
        num_samples: number of samples in the export.
        num_written: how many of them this run has written; the others were up to date.
        left_out: number of samples that are not in it, by reason.
    """

    noun: str
    num_samples: int
    num_written: int
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportKind:
    """A format that `prep export` writes.

    Attributes:
        name: of the command.
        flags: frozen dataclass, whose fields are the flags; all have defaults.
        writer: import path `package.module:function`; it is called with the data folder, the destination, an instance
            of `flags` and `Progress`, and returns `Exported`. A rerun writes only what has changed; a run that is
            killed leaves nothing that looks like a finished export.
        text: help text of the command.
    """

    name: str
    flags: type[Any]
    writer: str
    text: str

    def write(self, data_dir: Path, destination: Path, flags: Any, show: Progress) -> Exported:
        """Call the writer."""
        written: Exported = import_object(self.writer)(data_dir, destination, flags, show)
        return written


@dataclass(frozen=True, kw_only=True)
class ZarrFlags(Checked):
    """The flags of `prep export zarr`."""

    split: str = "train"
    """Split of the manifest."""

    segment: str = "5s"
    """Length of a segment, a whole number of latent frames, such as 5s."""

    chunk: Annotated[int, Parameter(allow_leading_hyphen=True), Range(least=1)] = 1
    """Number of segments per Zarr chunk, 1 or more, such as the batch size of training."""

    level: Annotated[int, Parameter(allow_leading_hyphen=True), Range(0, 9)] = 5
    """Compression level of Blosc with Zstandard, 0 to 9."""


@dataclass(frozen=True, kw_only=True)
class TrainerFlags(Checked):
    """The flags of exports for trainers of video models."""

    split: str = "train"
    """Split of the manifest."""


@dataclass(frozen=True, kw_only=True)
class DiffusionPipeFlags(TrainerFlags):
    """The flags of `prep export diffusion-pipe`."""

    model: str | None = None
    """Name of the trainer's model, that of its folder in the cache. Default: wan, wan2.2_5b, hunyuan-video or
    hunyuan_video_1.5; for LTX-Video, the name of the file of single_file_path, without .safetensors."""

    def rules(self) -> Iterator[UserError]:
        """Yield a model that is not the name of a folder."""
        if self.model is not None and (not self.model or Path(self.model).name != self.model):
            yield UserError(
                f'--model "{self.model}" is not the name of a folder',
                hint="give a name such as wan",
                flags=("--model",),
            )


KINDS = (
    ExportKind(
        "zarr",
        ZarrFlags,
        "clipmill.prep.exports.zarr_store:write_zarr_store",
        """Write latents and text embeddings as a Zarr store for loaders of segments.

        The arrays are base_frames [segments, frames, C, h, w], clip_emb [videos, D] and segment_to_video [segments].
        A video has the embedding of its first caption. A rerun does nothing if columns and flags have not changed
        and no file is missing.

        Example: prep export zarr segments.zarr --chunk 32

        Parameters
        ----------
        destination
            Folder of the store. An existing one is replaced if prep export wrote it.
        """,
    ),
    ExportKind(
        "musubi",
        TrainerFlags,
        "clipmill.prep.exports.musubi:write_musubi_cache",
        """Write latents and texts as a cache of musubi-tuner: Wan, and the latents of HunyuanVideo and -1.5.

        Each segment has the first caption that overlaps it. A rerun links the files of segments that have not changed.

        Example: prep export musubi cache

        Parameters
        ----------
        destination
            Folder of the cache: cache_directory of musubi-tuner's dataset. An existing one is replaced if prep export
            wrote it.
        """,
    ),
    ExportKind(
        "finetrainers",
        TrainerFlags,
        "clipmill.prep.exports.finetrainers:write_finetrainers_data",
        """Write latents and texts as precomputed data of finetrainers: Wan, LTX-Video and CogVideoX.

        Each segment has the first caption that overlaps it. A rerun links the files of segments that have not changed.

        Example: prep export finetrainers precomputed

        Parameters
        ----------
        destination
            Folder of the data: --precomputation_dir of finetrainers, with --precomputation_reuse. An existing one is
            replaced if prep export wrote it.
        """,
    ),
    ExportKind(
        "diffusion-pipe",
        DiffusionPipeFlags,
        "clipmill.prep.exports.diffusion_pipe:write_diffusion_pipe_cache",
        """Write latents and texts as a cache of diffusion-pipe: Wan, LTX-Video, and the latents of HunyuanVideo and
        -1.5.

        Each segment has the first caption that overlaps it. A rerun links the files of shards that have not changed.

        Example: prep export diffusion-pipe dataset

        Parameters
        ----------
        destination
            Folder of the cache and of dataset.toml, with which the trainer starts by --trust_cache. An existing one is
            replaced if prep export wrote it.
        """,
    ),
)

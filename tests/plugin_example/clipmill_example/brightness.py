"""Column with the mean brightness of every n-th frame of each chunk."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.settings import Checked, Range
from clipmill.prep.core.chunk_input import Chunk, Chunks
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.column import CheckedSample, ColumnSpec, DeepCode
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.shards.column_fields import ColumnFields
from clipmill.shards.format import chunk_fields
from clipmill.shards.npy import load_npy, npy_bytes
from clipmill.shards.writer import Sample

NAME = "brightness"
EXTENSION = "brightness.npy"
MEAN, MEASURED = "brightness_mean", "brightness_frames"


@dataclass(frozen=True, kw_only=True)
class BrightnessSettings(Checked):
    """Settings of `prep brightness`; each field becomes a flag and is part of the recipe."""

    every: Annotated[int, Range(least=1)] = 1
    """Interval of the measured frames, at least 1."""


COLUMN = ColumnSpec(
    name=NAME,
    package="clipmill_example",
    work="clipmill_example.brightness:WORK",
    check_sample="clipmill_example.brightness:check_sample",
    settings=BrightnessSettings,
    schema=1,  # incremented when the same settings give different values
    help="""Measure how bright the chunks are.

    Example:

        prep brightness --every 10
    """,
    verb="measure",
    checked_noun="checked frame",
)

# The field that `--where` can use, in training and `open_clips` too.
FIELDS = ColumnFields(name=NAME, fields={MEAN: pa.float64()})


def make(chunks: Chunks, recipe: Recipe[BrightnessSettings]) -> Iterator[Sample | SourceFailure]:
    """Yield the sample of each chunk, or the reason why it is missing; workers call this function."""
    return chunks.each(partial(measure, every=recipe.settings.every))


def measure(chunk: Chunk, *, every: int) -> Sample:
    """Measure a chunk: the brightness of its frames becomes a member, and their mean a field of the index."""
    numbers = range(0, chunk["num_frames"], every)
    measured = np.array([frame.to_ndarray(format="gray").mean() for frame in chunk.frames(numbers)], np.float32)
    return chunk.sample({EXTENSION: npy_bytes(measured)}, {MEASURED: len(measured), MEAN: float(measured.mean())})


def check_sample(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare a sample with its index row, for `prep verify --deep`."""
    array = load_npy(members[EXTENSION])
    if array is None or array.shape != (row[MEASURED],) or not bool(((array >= 0) & (array <= 255)).all()):
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, "the array is not as its row says")], 0)
    return CheckedSample([], len(array))


WORK = ChunkWork(
    fields=chunk_fields(
        pa.field("num_frames", pa.int32(), nullable=False),  # these three fields are copied from the chunk: its length
        pa.field("fps_num", pa.int32(), nullable=False),
        pa.field("fps_den", pa.int32(), nullable=False),
        pa.field(MEASURED, pa.int32(), nullable=False),
        pa.field(MEAN, pa.float64(), nullable=False),
    ),
    extension=EXTENSION,
    make=make,
    name=lambda recipe: f"mean-every{recipe.settings.every}",
)

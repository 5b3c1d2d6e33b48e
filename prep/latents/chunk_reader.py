"""Reading the chunks of a shard: which of their frames are wanted, and the frame at their end in the next chunk."""

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path

import pyarrow as pa

from clipmill.prep.core.chunk_input import chunk_fingerprints, frame_rate, read_chunk
from clipmill.prep.latents.frames import SegmentFrames, Square, frames_on_screen, segment_squares, video_segments
from clipmill.prep.latents.pieces import ChunkVideo, WantedFrames
from clipmill.prep.latents.recipe import LatentsRecipe
from clipmill.shards.commits import Commit
from clipmill.shards.reader import CommittedShard, open_shard

Following = Mapping[int, tuple[int, int]]  # row of a chunk -> shard and row of the chunk that follows it


class ChunkReader:
    """The chunks of a shard of `video` as a recipe wants them.

    Args:
        shard_id: the shard.
        commits: commits of `video`, that of the shard and those of the shards in `following`.
        following: the next chunks (clipmill.prep.latents.borders); empty for a VAE of images.

    Attributes:
        video: the shard.
        contents: Hash (hex) of each chunk.
        fingerprints: Hash (hex) of each chunk, and of the next chunk if its latents are made of both.

    Raises:
        Damaged, FileNotFoundError: an index cannot be read.
    """

    def __init__(
        self,
        video_dir: Path,
        shard_id: int,
        *,
        commits: Mapping[int, Commit],
        following: Following,
        recipe: LatentsRecipe,
    ) -> None:
        self._recipe, self._following = recipe, following
        wanted = {shard_id, *(shard for shard, _ in following.values())}
        self._shards = {one: open_shard(video_dir, commits[one]) for one in wanted}
        self.video: CommittedShard = self._shards[shard_id]
        fingerprints = {one: chunk_fingerprints(shard.index) for one, shard in self._shards.items()}
        self.contents = fingerprints[shard_id]
        self.fingerprints = self.contents.copy()
        for row, (shard, its_row) in following.items():
            both = f"{self.fingerprints[row]} {fingerprints[shard][its_row]}"
            self.fingerprints[row] = hashlib.blake2b(both.encode(), digest_size=16).hexdigest()
        self.segments = cache(self._segments)

    def read(self, row: int) -> ChunkVideo:
        """Read a chunk, and determine which frames and crops of it are wanted.

        Raises:
            SourceFailure: chunk_damaged, if its bytes or those of the next chunk differ from those committed.
        """
        segments, settings = self.segments(row), self._recipe.settings
        sources = [_source(self.video, row, segments.frames)]
        if segments.has_border:
            shard, its_row = self._following[row]
            following, index = self._shards[shard], self.video.index
            # The moment after the last one that this chunk shows, in the time of the next.
            shown = len(self._shown(row)) / settings.fps_exact
            later_s = shown - Fraction(
                following.index["start_ms"][its_row].as_py() - index["start_ms"][row].as_py(), 1000
            )
            frame = int(max(Fraction(0), later_s) * frame_rate(following.index, its_row))
            sources.append(_source(following, its_row, [frame]))
        return ChunkVideo(
            sources=sources,
            num_repeated=segments.num_repeated,
            segment_frames=self._recipe.segment_frames,
            squares=self.squares(row),
            is_video=self._recipe.latent_frames is not None,
        )

    def _segments(self, row: int) -> SegmentFrames:
        """Which frames the segments of a chunk show."""
        if self._recipe.latent_frames is None:
            return SegmentFrames(self._shown(row))
        return video_segments(
            self._shown(row),
            segment_frames=self._recipe.segment_frames,
            has_next=row in self._following,
            tail=self._recipe.settings.tail,
        )

    def squares(self, row: int) -> list[Square]:
        """Return the crops of the segments of a chunk."""
        index, segments = self.video.index, self.segments(row)
        num_segments = len(segments.lengths) or -(-len(segments.frames) // self._recipe.segment_frames)
        return segment_squares(
            num_segments,
            content=self.contents[row],
            width=index["width"][row].as_py(),
            height=index["height"][row].as_py(),
            settings=self._recipe.settings,
        )

    def _shown(self, row: int) -> list[int]:
        index = self.video.index
        return frames_on_screen(
            index["num_frames"][row].as_py(),
            chunk_fps=frame_rate(index, row),
            fps=self._recipe.settings.fps_exact,
        )


def _source(video: CommittedShard, row: int, wanted: list[int]) -> WantedFrames:
    index: pa.Table = video.index
    return WantedFrames(
        content=read_chunk(video, row),
        fps=frame_rate(index, row),
        packet_frame=index["packet_frame"][row].as_py(),
        packet_flags=index["packet_flags"][row].as_py(),
        wanted=wanted,
    )

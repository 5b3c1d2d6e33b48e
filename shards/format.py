"""Specification of the shard format, which the other modules of this package implement.

    <data>/dataset.json                                    the current variant of each column, and unfinished variants
    <data>/<column>/<variant>/recipe.json                  the settings that produced the variant
    <data>/<column>/<variant>/000003-1f2e3d4c.tar          a shard: USTAR, uncompressed, mtime 0, never empty
    <data>/<column>/<variant>/000003-1f2e3d4c.tar.idx      Megatron-Energon's index: u64 offsets of samples, N + 1
    <data>/<column>/<variant>/000003-1f2e3d4c.index.arrow  the index: Arrow IPC file, one row per sample, mmap-able
    <data>/<column>/<variant>/commits/000003.json          the commit record, without which the shard does not exist
    <data>/<column>/<variant>/012/012345-1f2e3d4c.tar ...  files of shard 12345, whose commit is commits/012/012345.json
    <data>/<column>/<variant>/commits.arrow        table of all commits, derived from their records
    <data>/<column>/<variant>/chunks.arrow         table of the samples of shards 0 to 999, derived from their indexes
    <data>/<column>/<variant>/012/chunks.arrow     the same table for shards 12000 to 12999
    <data>/<column>/<variant>/shards.txt, shards-<split>.txt   committed tars, one name per line, for other tools
    <data>/<column>/<variant>/contents.json        IDs of the committed shards, and checksums of the variant's files

Columns are `video`, `latents`, `text`, `scores`, `captions`, and the columns of plug-ins. A variant's name is
`<slug>-<first 8 hex digits of the recipe's fingerprint>`.
A shard's name contains the first 8 hex digits of the fingerprint of its content, so a changed shard never overwrites
the old shard. A commit identifies exactly one tar and one index, with the size and SHA-256 of each.

A folder contains at most 1,000 shards: shards 0 to 999 are in the variant's folder, shards 1000 to 1999 in its folder
`001`, and so on; their commits are in `commits/` and `commits/001/`. Commits and shard lists contain paths relative to
the variant's folder (`001/001234-1f2e3d4c.tar`).

In a tar, all samples have the same members, `<key>.<extension>`, in the same order, and the members of a sample are
adjacent. A key does not contain a dot. A member name has at most 100 bytes. The array of a `.npy` member begins on a
512-byte boundary of the tar (its npy header is padded), so that fixed-size records can be gathered from one mmap.

The caller verifies each sample before adding it to a shard. The tar is written under a temporary name in its folder,
read back, and compared with the checksums of its payloads. Once the tar and both indexes are synced, they are renamed.
The commit record is written last, and readers rely only on commits. A commit without files records that all samples of
the shard failed. The bytes of tars, indexes and commits do not depend on the time or the machine. Each commit,
contents.json and dataset.json contain the SHA-256 of their own canonical JSON.

A run writes contents.json when it finishes, so the file is missing only until the first run has finished. If a listed
shard has no commit, the commit was lost. If a commit is not listed, its run is in progress or was killed. Before a run
removes a commit, it removes the shard from contents.json.

When a run finishes, it also writes commits.arrow, so that readers open one file instead of one file per shard. The
commit records stay in place. clipmill.shards.commit_table defines the file's layout, and when the file is valid.

Finally, a run updates the merged table of its column. The table has one part for each folder of shards: chunks.arrow,
an uncompressed Arrow IPC file with one batch. It has one row per sample, ordered by shard and row. To open a training
set, readers need only these parts, commits.arrow, contents.json, recipe.json and the manifest. They need the indexes
only to decode clips of `video`, because the indexes contain the packet tables. The column `scores` has a single
chunks.arrow, ordered by video (as in the manifest) and start. The columns of a merged table are:
- in all tables: `video_id` (dictionary-encoded);
- all except `scores`: `shard` (i32, the shard ID), `row` (i32, the row in the shard's index), and `offset`, `size`
  (u64) and `crc32` (u32) of one member's payload in its tar. The entry `member` of the schema's metadata is the
  extension of that member (`mp4`, `latents.npy` or `latents.npy.zst`, `text.npy`, `caption.json`);
- `video`, `latents`: `start_ms`, `num_frames`, `fps_num`, `fps_den`, `width`, `height`;
- `latents`: `channels`, `dtype` (dictionary-encoded). `size` minus the size of the array is the size of the npy header;
- `text`: `num_rows`, `width`, and the lists `row_tokens`, `caption_id` and `caption_row`;
- `captions`: `start_ms`, `num_frames`, `fps_num`, `fps_den`, `caption_text`, `caption_words`;
- `scores`: the values of its index rows instead of shard, row and member (clipmill.shards.scores).
The schema's metadata contains `commits_sha256`, a digest of the commits that the file was built from. If the commits
have changed since then, the file is stale: readers use the indexes instead, or report an error for `scores`.
`shard_ids` and `index_sha256` (the first 16 hex digits of each index, concatenated) identify the indexes that the rows
of a part come from, so that the next run reads only new indexes. `open_gops` lists the shards of `video` whose first
chunk has open GOPs. Each column's metadata contains the CRC-32 of its values, and `schema_crc32` is the checksum of the
schema (clipmill.shards.merged_table). The bytes of a part depend only on the commits of its shards. The next run of the
column rewrites only the parts that are missing, stale or damaged. If parts are missing, the last run was killed.

Every index has the columns `key` and, for each extension, `<ext>_offset` (u64, offset of the payload in the tar),
`<ext>_size` (u64) and `<ext>_crc32` (u32), followed by the fields of the column, such as VIDEO_FIELDS. The metadata of
the Arrow schema contains `clipmill_format` and `extensions` (comma-separated, in member order).

Column `video`: the key is `<video_id>_<start_ms:09d>`; the members are mp4, json and, if the dataset has captions, txt.
A variant made by `prep index` has the member source.json instead of mp4. This member contains the fingerprint and size
of the source file, and a checksum of the packets. The packets stay in the source file, whose path is in the manifest.
The index of such a variant also has the fields SOURCE_FIELDS. Packet offsets are relative to `source_offset`, and
`packet_frame` numbers the packets of a row in presentation order. Frame n of the chunk, at its nominal rate, is the
source frame displayed at (n + 1/2) / fps seconds.

Column `latents`: keys, order, shard IDs and splits are the same as in `video`. A chunk that could not be encoded has no
sample, and is listed as a failure in the commit. The only member is `latents.npy`, [F, C, h, w], float16 or the bits of
bfloat16 as uint16; or `latents.npy.zst`, the same file as one Zstandard frame. Frame i of the latents is the chunk's
frame at i / fps seconds. recipe.json contains the scaling factor.

Column `text`: one sample per video; the key is the video_id. The members are `text.npy`, float16, and `json`, with the
text of each row and the row of each caption. The array is [R, D], one row of unit norm per distinct caption text of the
video; for token sequences, it is [sum of tokens, D], and the vectors of a text are consecutive.

Column `scores`: keys, order, shard IDs, splits and failures are as in `latents`. The only member is `scores.json`, with
the values of the index row (clipmill.shards.score_fields). Unknown values are null, never NaN. In the JSON, the hash is
written as 16 hexadecimal digits, because many JSON readers round integers above 2^53.

Column `captions`: keys, order, shard IDs, splits and failures are as in `latents`. The only member is `caption.json`,
with the values of the index row: the caption from a language model, and its cost in tokens.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from clipmill.shards.columns import CAPTIONS, LATENTS, TEXT, VIDEO

FORMAT_VERSION = 2
BLOCK_BYTES = 512  # block size of tars, and alignment of the arrays in .npy members
MAX_MEMBER_NAME_BYTES = 100
COMMITS_FOLDER = "commits"
COMMIT_TABLE_FILE = "commits.arrow"
RECIPE_FILE = "recipe.json"
DATASET_FILE = "dataset.json"
CONTENTS_FILE = "contents.json"
SHARDS_PER_FOLDER = 1000
FOLDER = re.compile(r"\d{3,}")  # name of a folder of shards or of commits
_STEM = re.compile(r"(?P<shard_id>\d{6,})-(?P<fingerprint>[0-9a-f]{8})")

# Flags in the packet table.
PACKET_KEY = 1  # decoding can start at this packet
PACKET_REFERENCE = 2  # other frames may reference this frame; without the flag, the packet is needed only for its frame
PACKET_RECOVERY = 4  # keyframe that is not an IDR picture, so later packets may reference frames before it


def chunk_fields(*fields: pa.Field) -> list[pa.Field]:
    """Return the index fields of a column with one sample per chunk, except the key and the columns of its members.

    Args:
        fields: Fields that are specific to this column.
    """
    return [
        pa.field("video_id", pa.string(), nullable=False),
        pa.field("start_ms", pa.int64(), nullable=False),  # start of the chunk in its video
        *fields,
        pa.field("chunk_fingerprint", pa.string(), nullable=False),  # fingerprint of the sample's chunk
    ]


# Fields of a `video` index row, in addition to the key and the columns of the members.
VIDEO_FIELDS = [
    pa.field("video_id", pa.string(), nullable=False),
    pa.field("start_ms", pa.int64(), nullable=False),  # start of the chunk in its video
    pa.field("num_frames", pa.int32(), nullable=False),
    pa.field("fps_num", pa.int32(), nullable=False),
    pa.field("fps_den", pa.int32(), nullable=False),
    pa.field("width", pa.int32(), nullable=False),
    pa.field("height", pa.int32(), nullable=False),
    pa.field("codec", pa.string(), nullable=False),  # libav's name for the codec: h264, hevc, av1, vp9, mjpeg
    pa.field("extradata", pa.binary(), nullable=False),
    pa.field("span_fingerprint", pa.string(), nullable=False),  # identifies the encoder pass that produced the chunk
    # The packet table in decode order: byte range in the mp4 payload, presentation index, flags, checksum.
    pa.field("packet_offset", pa.list_(pa.uint32()), nullable=False),
    pa.field("packet_size", pa.list_(pa.uint32()), nullable=False),
    pa.field("packet_frame", pa.list_(pa.int32()), nullable=False),
    pa.field("packet_flags", pa.list_(pa.uint8()), nullable=False),
    pa.field("packet_crc32", pa.list_(pa.uint32()), nullable=False),  # to verify partial reads of a chunk
]

# Fields of a `video` index row made by `prep index`, in addition to VIDEO_FIELDS.
SOURCE_FIELDS = [
    # Offset in the source file, in bytes, to which packet offsets are relative.
    pa.field("source_offset", pa.uint64(), nullable=False),
    pa.field("source_bytes", pa.uint64(), nullable=False),  # size of the source file
    pa.field("time_rate", pa.int64(), nullable=False),  # number of units of frame_time per second
    # Start of each frame, by presentation index, from time 0 of the video. A hidden frame has the time of the next
    # displayed frame, so the frame displayed at time t is the last frame with a time up to t.
    pa.field("frame_time", pa.list_(pa.int64()), nullable=False),
    pa.field("timeline", pa.string(), nullable=False),  # crop and orientation (clipmill.shards.timeline.model)
]

# Fields of a `latents` index row.
LATENTS_FIELDS = chunk_fields(
    pa.field("num_frames", pa.int32(), nullable=False),  # F; for a video VAE, S segments x T' frames
    pa.field("fps_num", pa.int32(), nullable=False),  # frame rate of the latents
    pa.field("fps_den", pa.int32(), nullable=False),
    pa.field("channels", pa.int32(), nullable=False),
    pa.field("height", pa.int32(), nullable=False),
    pa.field("width", pa.int32(), nullable=False),
    # float16, or bfloat16, which is stored as uint16 because npy does not support it.
    pa.field("dtype", pa.string(), nullable=False),
    # Crop of each segment: left, top, width and height in pixels of the chunk, concatenated.
    pa.field("crops", pa.list_(pa.int32()), nullable=False),
    # For a video VAE: number of chunk frames in each of the S segments; the last frame is repeated to fill a segment.
    pa.field("source_frames", pa.list_(pa.int32()), nullable=False),
)

# Fields of a `text` index row.
TEXT_FIELDS = [
    pa.field("video_id", pa.string(), nullable=False),
    pa.field("num_rows", pa.int32(), nullable=False),  # R, the number of distinct texts
    pa.field("width", pa.int32(), nullable=False),  # D, the length of a vector
    # For token sequences: number of tokens in each of the R texts. Their vectors are concatenated: [sum of tokens, D].
    pa.field("row_tokens", pa.list_(pa.int32()), nullable=False),
    pa.field("text_digest", pa.list_(pa.binary(16)), nullable=False),  # BLAKE2b-128 of the UTF-8 text, one per row
    # The captions of the video by ascending ID, and the row of each caption's text.
    pa.field("caption_id", pa.list_(pa.int64()), nullable=False),
    pa.field("caption_row", pa.list_(pa.int32()), nullable=False),
]

# Fields of a `captions` index row.
CAPTIONS_FIELDS = chunk_fields(
    pa.field("num_frames", pa.int32(), nullable=False),  # number of frames in the chunk
    pa.field("fps_num", pa.int32(), nullable=False),
    pa.field("fps_den", pa.int32(), nullable=False),
    pa.field("caption_text", pa.string(), nullable=False),  # one line
    pa.field("caption_words", pa.int32(), nullable=False),
    # Null if the server did not report the value:
    pa.field("finish_reason", pa.string()),  # reason why the generation ended, such as "stop"
    pa.field("tokens_in", pa.int32()),  # number of tokens in the images and the prompt
    pa.field("tokens_out", pa.int32()),  # number of generated tokens
)

INDEX_FIELDS = {VIDEO: VIDEO_FIELDS, LATENTS: LATENTS_FIELDS, TEXT: TEXT_FIELDS, CAPTIONS: CAPTIONS_FIELDS}


@dataclass(frozen=True)
class ShardName:
    """Names of the files of a shard, relative to the variant's folder."""

    shard_id: int
    fingerprint: str  # hex, at least 8 digits; the first 8 are part of the names

    @property
    def stem(self) -> str:
        """Common path of the files, without extension: `000003-1f2e3d4c` or `012/012345-1f2e3d4c`."""
        return shard_path(self.shard_id, f"{self.shard_id:06d}-{self.fingerprint[:8]}")

    @property
    def tar(self) -> str:
        return f"{self.stem}.tar"

    @property
    def energon_index(self) -> str:
        return f"{self.stem}.tar.idx"

    @property
    def index(self) -> str:
        return f"{self.stem}.index.arrow"


def folder_of(shard_id: int) -> str:
    """Return the name of the folder that contains a shard's files or its commit; empty for shards 0 to 999."""
    return f"{shard_id // SHARDS_PER_FOLDER:03d}" if shard_id >= SHARDS_PER_FOLDER else ""


def shard_path(shard_id: int, name: str) -> str:
    """Return the path of a shard's file, relative to the variant's folder or to `commits/`."""
    folder = folder_of(shard_id)
    return f"{folder}/{name}" if folder else name


def folders_in(folder: Path) -> list[Path]:
    """Return the sorted folders of shards in a variant's folder, or the sorted folders of commits in `commits/`."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if FOLDER.fullmatch(entry.name) and entry.is_dir())
    except FileNotFoundError:
        return []


def commit_name(shard_id: int) -> str:
    """Return the file name of a shard's commit record."""
    return f"{shard_id:06d}.json"


def shard_id_of(file_name: str) -> int | None:
    """Return the shard ID in the file name of a tar or an index; None for other files."""
    match = _STEM.match(file_name)
    return int(match["shard_id"]) if match else None

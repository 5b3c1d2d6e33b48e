"""Definition of the tables in `<data>/manifest/`, which list the videos and captions to process.

    videos.parquet     one row per video; the order of rows never changes, and new videos are appended
    captions.parquet   one row per caption, ordered by caption_id; IDs are never reassigned
    rejected.parquet   one row per unusable input row, with the reason; rejected.csv has the same rows for humans, with
                       a column `entry` that counts from 1
    caption_*.arrow    files derived from these tables for training (clipmill.manifests.caption_spans)
    manifest.json      format version, size and SHA-256 of each table, and its own SHA-256; for each dataset, counts and
                       rejected rows by reason; further sources of captions

A further source provides captions that `prep manifest captions` adds to videos of any dataset. They are kept when a
dataset is read again. manifest.json records the model that wrote them.

Times are in seconds from the start of the video, as shown by a player. An end_s of +inf means the end of the video,
whose duration is not in the manifest. If a dataset has labels, the captions table has additional columns whose names
begin with `label_`.
"""

import pyarrow as pa

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1

VIDEOS = pa.schema(
    [
        pa.field("video_id", pa.string(), nullable=False),  # safe in keys, unique (clipmill.manifests.keys)
        pa.field("source_id", pa.string(), nullable=False),  # ID in the dataset
        pa.field("path", pa.string(), nullable=False),  # absolute path or URL of the source file
        pa.field("split", pa.string(), nullable=False),  # train, val or test
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("num_captions", pa.int32(), nullable=False),
        # SHA-256 of this video's captions, with which a plan detects changed captions without reading them.
        pa.field("captions_sha256", pa.string(), nullable=False),
    ]
)

CAPTIONS = pa.schema(
    [
        pa.field("caption_id", pa.int64(), nullable=False),
        pa.field("video_id", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("begin_s", pa.float64(), nullable=False),
        pa.field("end_s", pa.float64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        # Source of the caption, such as narrator or human.
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    ]
)

# Optional columns. A column that would contain only nulls is omitted.
OPTIONAL_CAPTIONS = pa.schema(
    [
        pa.field("likelihood", pa.float32()),  # mean log-probability per token (natural logarithm), if a model wrote it
        pa.field("split", pa.string()),  # split of this span, if it differs from the split of the video
        pa.field("group", pa.string()),  # name of the moment, which other videos also show
        pa.field("view", pa.string()),  # name of the camera that recorded this span
    ]
)
# Digest of the captions from the dataset, for videos that also have captions from further sources.
OWN_DIGEST = pa.field("own_captions_sha256", pa.string())

REJECTED = pa.schema(
    [
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),  # the annotation file, or the video
        pa.field("row", pa.int64()),  # 0-based row or entry in the file, if the file has rows
        pa.field("source_id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),  # a code of clipmill.manifests.adapters.annotations
        pa.field("detail", pa.string(), nullable=False),
    ]
)

"""Definition of the tables in `<data>/manifest/`, which list the videos and captions to process.

    videos.parquet     one row per video; the order of rows never changes, and new videos are appended
    captions.parquet   one row per caption, ordered by caption_id; IDs are never reassigned
    rejected.parquet   one row per unusable input row, with the reason; rejected.csv is a human-readable copy, with a
                       1-based column `entry` in place of `row`
    caption_*.arrow    files for training that are derived from these tables (clipmill.manifests.caption_spans)
    manifest.json      format version; size and checksum of each file; counts for each dataset, including the number of
                       rejected rows for each reason; further sources of captions; SHA-256 of all other keys

A further source is a source of captions that `prep manifest captions` adds to the videos of any dataset. These captions
are kept when a dataset is read again. manifest.json records the model that wrote them.

Times are in seconds from the start of the video, as a media player shows them. An end_s of +inf means the end of the
video, whose duration is not in the manifest. If a dataset has labels, the captions table has additional columns with
names that begin with `label_`.
"""

import pyarrow as pa

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1

VIDEOS = pa.schema(
    [
        pa.field("video_id", pa.string(), nullable=False),  # unique, safe in keys (clipmill.manifests.keys)
        pa.field("source_id", pa.string(), nullable=False),  # ID in the dataset
        pa.field("path", pa.string(), nullable=False),  # absolute path or URL of the source file
        pa.field("split", pa.string(), nullable=False),  # train, val or test
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("num_captions", pa.int32(), nullable=False),
        # SHA-256 of the video's captions; plans compare this digest to detect changed captions without reading them.
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
        # origin of the caption, such as narrator or human
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
    ]
)

# Optional columns. A column is omitted if it would contain only nulls.
OPTIONAL_CAPTIONS = pa.schema(
    [
        # Mean natural log-probability per token, if a model wrote the caption.
        pa.field("likelihood", pa.float32()),
        pa.field("split", pa.string()),  # split of this span, if it differs from the split of the video
        pa.field("group", pa.string()),  # moment that the span shows, by name; spans of other videos may show it, too
        pa.field("view", pa.string()),  # name of the camera that recorded this span
    ]
)
# SHA-256 of the captions from the dataset, for videos that also have captions from further sources.
DATASET_DIGEST = pa.field("own_captions_sha256", pa.string())

REJECTED = pa.schema(
    [
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),  # annotation file or video file
        pa.field("row", pa.int64()),  # 0-based index of the row or entry in the file, if the file has rows
        pa.field("source_id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),  # value of clipmill.manifests.adapters.annotations.Reason
        pa.field("detail", pa.string(), nullable=False),
    ]
)

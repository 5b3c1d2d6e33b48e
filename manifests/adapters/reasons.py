"""Reasons for rejecting a row of a dataset: the codes in rejected.parquet and manifest.json."""

from enum import StrEnum


class Reason(StrEnum):
    """One code per reason; the comments are the descriptions in the README."""

    MISSING_FILE = "missing_file"  # annotated, but there is no such video; one row per video, with the lost captions
    MISSING_CHUNK = "missing_chunk"  # a model's caption of a chunk that no longer exists
    AMBIGUOUS_VIDEO = "ambiguous_video"  # the name matches several files
    DUPLICATE_ID = "duplicate_id"  # another video or narration already has this ID
    BAD_NAME = "bad_name"  # the file name is not valid Unicode, or an object with such a name cannot be read
    EMPTY_FILE = "empty_file"  # a video of zero bytes
    NOT_A_FILE = "not_a_file"  # has the name of a video, but is a folder, a pipe, a socket or a device
    UNREADABLE = "unreadable"  # the file or folder is inaccessible: a broken or circular link, or no permission
    EMPTY_ID = "empty_id"  # the row names no video
    EMPTY_CAPTION = "empty_caption"
    BAD_TIME = "bad_time"  # not a finite number, negative, later than any video, or an end not after the start
    BAD_FPS = "bad_fps"  # times are in frames, and fps is not the frame rate of the video
    BAD_LIKELIHOOD = "bad_likelihood"  # not a number, or more than 0: it is the logarithm of a probability
    BAD_SOURCE = "bad_source"  # a source with other characters than letters, digits, ".", "-" and "_"
    BAD_SPLIT = "bad_split"  # not train, val or test, or different from the split the video already has
    BAD_LABEL = "bad_label"
    NO_INTERVAL = "no_interval"  # a timestamp that the interval rule cannot expand
    UNSURE = "unsure"  # the annotator marked it as unsure
    LEFT_OUT = "left_out"  # of a video that a list leaves out; one row per video, with the captions
    REDACTED = "redacted"  # withheld by the dataset
    MALFORMED_ROW = "malformed_row"  # not in the format documented by the dataset


class Unusable(Exception):
    """Why a row cannot be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

"""Why a row of a data set cannot be used: the codes that stand in rejected.parquet and manifest.json."""

from enum import StrEnum


class Reason(StrEnum):
    """One code a reason; the comment is what a user reads about it in the README."""

    MISSING_FILE = "missing_file"  # annotated, but there is no such video; one row a video, with the captions lost
    AMBIGUOUS_VIDEO = "ambiguous_video"  # the name fits several files
    DUPLICATE_ID = "duplicate_id"  # another video has this id already
    BAD_NAME = "bad_name"  # the file's name is not Unicode
    EMPTY_FILE = "empty_file"  # a video of zero bytes
    NOT_A_FILE = "not_a_file"  # it is named like a video, and is a folder, a pipe, a socket or a device
    UNREADABLE = "unreadable"  # looking at the file or folder failed: a broken link, a loop of links, no permission
    EMPTY_ID = "empty_id"  # the row names no video
    EMPTY_CAPTION = "empty_caption"
    BAD_TIME = "bad_time"  # not a number, negative, or an end that is not after the begin
    BAD_SPLIT = "bad_split"  # not train, val or test, or not the one that the video has already
    BAD_LABEL = "bad_label"
    NO_INTERVAL = "no_interval"  # a point in time that the interval rule cannot widen
    UNSURE = "unsure"  # the annotator wrote that they are not sure
    REDACTED = "redacted"  # the data set withholds it
    MALFORMED_ROW = "malformed_row"  # not of the form that the data set documents

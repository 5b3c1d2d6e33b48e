"""Why captions cannot be shown, and how many, in words."""

from collections.abc import Mapping
from typing import Literal

Unusable = Literal["empty_span", "video_without_chunks", "begins_after_the_last_chunk", "chunk_missing", "not_selected"]
_WORDS: dict[Unusable, tuple[str, str]] = {  # of one caption, and of several
    "empty_span": ("with an empty span", "with an empty span"),
    "video_without_chunks": ("in a video without chunks", "in videos without chunks"),
    "begins_after_the_last_chunk": ("begins after the last chunk", "begin after the last chunk"),
    "chunk_missing": ("in a missing chunk", "in missing chunks"),
    "not_selected": ("not selected", "not selected"),
}


def remarks_of(num_unusable: Mapping[Unusable, int], num_shortened: int) -> list[str]:
    """Excluded and shortened captions, by reason."""
    parts = [f"{count:,} {_WORDS[reason][count != 1]}" for reason, count in num_unusable.items()]
    return [*parts, f"{num_shortened:,} shortened to the end of the video"] if num_shortened else parts

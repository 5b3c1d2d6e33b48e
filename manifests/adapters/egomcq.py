"""Read questions from EgoMCQ (Lin et al. 2022, section 4.1): which of five clips does a narration describe?

`egomcq.json` has one entry per question: a text (`query`), five clips (`choices`), and the key of the clip that the
text describes (`answer`):

    {"0": {"query": {"clip_text": ...}, "answer": 3, "types": 1,
           "choices": {"0": {"video_uid": ..., "clip_start": ..., "clip_end": ..., "clip_text": ...}, ...}}, ...}

A question is called `intra` if all of its clips belong to one video, and `inter` otherwise. `types` is not read,
because the comment about it in the public code contradicts the metric.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotations import interval_fault, parse_seconds
from clipmill.manifests.adapters.json_stream import object_items
from clipmill.manifests.formatting import quote_value

EGOMCQ = "egomcq"  # source of captions from EgoMCQ in a manifest


@dataclass(frozen=True)
class Clip:
    """A span of a video, in seconds."""

    source_id: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Question:
    """A question of EgoMCQ: which of the clips does the text describe?

    Attributes:
        number: 0-based index of the question in the file.
        text: Text that describes one of the clips.
        choices: The clips.
        texts: Text of each clip in `choices`.
        answer: Index of the clip that the text describes.
    """

    number: int
    text: str
    choices: tuple[Clip, ...]
    texts: tuple[str, ...]
    answer: int

    @property
    def is_intra(self) -> bool:
        """True if all choices belong to one video."""
        return len({clip.source_id for clip in self.choices}) == 1


def has_questions(path: Path) -> bool:
    """Return True if the first entry of a JSON file is a question of EgoMCQ."""
    entry = next(object_items(path), ("", None))[1]
    return isinstance(entry, dict) and "choices" in entry and "query" in entry


def read_questions(path: Path) -> Iterator[Question | str]:
    """Yield the questions in the order of the file. For a malformed question, yield a description of the fault.

    Raises:
        UserError: The file cannot be read, or is not a JSON object.
    """
    for number, (key, entry) in enumerate(object_items(path)):
        try:
            keys = list(entry["choices"])
            clips = [clip_of(choice) for choice in entry["choices"].values()]
            texts = tuple(str(choice["clip_text"]) for choice in entry["choices"].values())
            text, answer = entry["query"]["clip_text"], keys.index(str(entry["answer"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield f"question {quote_value(key)}: {error!r}"
            continue
        yield Question(number, str(text), tuple(clips), texts, answer)


def clip_of(values: dict[str, Any]) -> Clip:
    """Return the clip of a choice or of a row in EgoClip. A negative start becomes 0.

    Raises:
        ValueError: The times are invalid.
    """
    begin_s, end_s = (parse_seconds(values[name], default=nan) for name in ("clip_start", "clip_end"))
    begin_s = max(begin_s, 0.0)
    if fault := interval_fault(begin_s, end_s):
        raise ValueError(fault)
    return Clip(str(values["video_uid"]), begin_s, end_s)

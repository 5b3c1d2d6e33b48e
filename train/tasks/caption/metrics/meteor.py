"""METEOR 1.5 (Denkowski and Lavie 2014), the Java program that pycocoevalcap brings, with its options."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from train.tasks.caption.metrics.java import Dialogue, jar_of_pycocoevalcap, java

_METEOR_JAR = "meteor/meteor-1.5.jar"
_METEOR_TIMEOUT_S = 2 * 3600.0
_BETWEEN = " ||| "


class Meteor:
    """METEOR as often as it is asked for within a `with` block, by one program: it takes seconds to start."""

    def __init__(self) -> None:
        self._dialogue: Dialogue | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._dialogue is not None:
            self._dialogue.__exit__(kind, error, trace)
            self._dialogue = None

    def __call__(
        self, candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
    ) -> tuple[float, dict[str, float]]:
        """METEOR of the corpus and of each video, of tokenized captions.

        Raises:
            Absent: Java or the package is missing, or the program failed.
        """
        if self._dialogue is None:
            self._dialogue = _program()
        dialogue, statistics = self._dialogue, []
        for video_id, candidate in candidates.items():
            # It would take this for the border between two captions.
            ours = candidate.replace("|||", "").replace("  ", " ")
            dialogue.say(_BETWEEN.join(("SCORE", *references[video_id], ours)))
            statistics.append(dialogue.hear())
        dialogue.say(_BETWEEN.join(("EVAL", *statistics)))
        per_video = {video_id: float(dialogue.hear()) for video_id in candidates}
        return float(dialogue.hear()), per_video


def _program() -> Dialogue:
    program, jar = java(), jar_of_pycocoevalcap(_METEOR_JAR)
    command = [program, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    return Dialogue(command, folder=jar.parent, timeout_s=_METEOR_TIMEOUT_S)

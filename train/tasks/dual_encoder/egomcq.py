"""EgoMCQ (Lin et al. 2022, section 4.1): which of five clips does a narration describe?

Questions are those of `egomcq.json`; their clips are captions of the manifest (`prep manifest ego4d`), found by video,
begin and end. A question is of the kind inter if its clips are of different videos, intra if they are of one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.adapters.egomcq import Question, read_questions
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.store import read_videos
from clipmill.train.tasks.dual_encoder.embeddings import Embeddings, EmbedTexts

KINDS = ("inter", "intra")
EGOMCQ_PROTOCOL = (
    "EgoMCQ (Lin et al. 2022): the text of a question against its five clips; accuracy of the nearest clip by cosine, "
    "where they are of different videos (inter) and of one (intra); ties count against the model"
)


@dataclass(frozen=True)
class EgoMcqScorer:
    """EgoMCQ.

    Attributes:
        questions: whose clips are all in the data.
        ids: caption ids of the clips of each question.
        source: name of the file of questions.
        num_all: number of its questions.
    """

    questions: tuple[Question, ...]
    ids: tuple[tuple[int, ...], ...]
    source: str
    num_all: int
    definition: str = EGOMCQ_PROTOCOL

    @property
    def means_of(self) -> tuple[int, str]:
        """Number and noun of what its metrics are means of."""
        return len(self.questions), "question"

    def score(self, embeddings: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        row_of = {caption_id: row for row, caption_id in enumerate(embeddings.caption_id.tolist())}
        scored = [number for number, ids in enumerate(self.ids) if all(one in row_of for one in ids)]
        if not scored:
            raise FailedWork("of no question all clips could be decoded")
        text_QE = embed_texts([self.questions[number].text for number in scored])
        is_right, chance, is_intra = [], [], []
        for text_E, number in zip(text_QE, scored, strict=True):
            similarity = embeddings.video[[row_of[one] for one in self.ids[number]]] @ text_E
            is_right.append(is_nearest(similarity, self.questions[number].answer))
            chance.append(1 / len(similarity))
            is_intra.append(self.questions[number].is_intra)
        result: dict[str, Any] = {
            "protocol": self.definition,
            "questions": self.source,
            "incomplete": self._missing(len(scored)),
        }
        for kind, of_kind in zip(KINDS, (~np.array(is_intra), np.array(is_intra)), strict=True):
            num = int(of_kind.sum())
            result[kind] = {
                "num_questions": num,
                "accuracy": float(np.array(is_right)[of_kind].mean()) if num else None,
                "chance": float(np.array(chance)[of_kind].mean()) if num else None,
            }
        return result

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        found = {f"{kind}_accuracy": result[kind]["accuracy"] for kind in KINDS}
        return {name: value for name, value in found.items() if value is not None}

    def _missing(self, num_scored: int) -> str:
        if num_scored == self.num_all:
            return ""
        return f"{num_scored:,} of {self.num_all:,} questions scored: not comparable with published numbers"


def is_nearest(similarity: NDArray[np.float32], answer: int) -> bool:
    """Whether the answer is nearer than all other clips; NaN is not."""
    others = np.delete(similarity, answer)
    return bool((others < similarity[answer]).all())


def open_questions(path: Path | None, captions: pa.Table, *, data_dir: Path) -> EgoMcqScorer:
    """The questions of a file whose clips are among `captions`, those of EgoMCQ in the manifest.

    Raises:
        UserError: there is no file, or none of its questions is of these captions.
    """
    if path is None:
        raise UserError(
            "EgoMCQ needs its questions",
            hint="give --questions egomcq.json (in training --evaluate.questions)",
        )
    videos = read_videos(data_dir, columns=["video_id", "source_id"]).to_pydict()
    source_of = dict(zip(videos["video_id"], videos["source_id"], strict=True))
    rows = captions.select(["video_id", "begin_s", "end_s", "caption_id"]).to_pylist()
    id_of = {(source_of[row["video_id"]], row["begin_s"], row["end_s"]): row["caption_id"] for row in rows}
    questions, ids, num_all = [], [], 0
    for question in read_questions(path):
        num_all += 1
        if isinstance(question, str):
            continue
        its = tuple(id_of.get((one.source_id, one.begin_s, one.end_s), -1) for one in question.choices)
        if min(its) >= 0:
            questions.append(question)
            ids.append(its)
    if not questions:
        raise UserError(
            f"no question of {path} has all of its clips in {data_dir}",
            hint="give the same file to prep manifest ego4d --annotations",
        )
    return EgoMcqScorer(tuple(questions), tuple(ids), path.name, num_all)

"""Zero-shot classification (CLIP, section 3.1.4): the class of a clip is the one whose prompts are nearest.

A class has one embedding: the mean of the unit-length embeddings of its prompts (each of its names in each template),
of unit length again. The rank of a clip's class is 1 + the number of other classes that score at least as high, so
that a model that scores everything alike is wrong everywhere.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTOCOL = (
    "a class is the mean of the unit-length embeddings of its prompts; the nearest class by cosine; "
    "ties count against the model; mean class accuracy: top-1 within each class that has clips, then their mean"
)


@dataclass(frozen=True)
class ZeroShot:
    """Shares in [0, 1].

    Attributes:
        num_classes: to choose from.
        num_classes_seen: those that have clips.
        top: share of clips whose class is among the first k, by k.
    """

    num_clips: int
    num_classes: int
    num_classes_seen: int
    top: dict[int, float]
    chance: dict[int, float]
    mean_class_accuracy: float

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {"protocol": PROTOCOL, **asdict(self)}


def class_embeddings(prompt_PE: NDArray[np.float32], class_of_prompt_P: NDArray[np.int64]) -> NDArray[np.float32]:
    """Embeddings of the classes 0 ... C - 1, each of which has prompts; unit length, float32 [C, E].

    Args:
        prompt_PE: unit length.
    """
    num_classes = int(class_of_prompt_P.max()) + 1
    sums = np.zeros((num_classes, prompt_PE.shape[1]))
    np.add.at(sums, class_of_prompt_P, prompt_PE)
    norm = np.linalg.norm(sums, axis=1, keepdims=True)
    return (sums / np.maximum(norm, 1e-12)).astype(np.float32)


def score_classes(similarity_NC: NDArray[np.floating], class_of_clip_N: NDArray[np.int64]) -> ZeroShot:
    """Scores similarities of N >= 1 clips with C classes."""
    num_clips, num_classes = similarity_NC.shape
    right_N = similarity_NC[np.arange(num_clips), class_of_clip_N]
    # The right class itself is not below itself: it counts as the 1.
    rank_N = (similarity_NC >= right_N[:, None]).sum(axis=1)
    is_first = (rank_N == 1).astype(np.float64)
    num_of_class = np.bincount(class_of_clip_N, minlength=num_classes)
    seen = num_of_class > 0
    by_class = np.bincount(class_of_clip_N, weights=is_first, minlength=num_classes)[seen] / num_of_class[seen]
    return ZeroShot(
        num_clips=num_clips,
        num_classes=num_classes,
        num_classes_seen=int(seen.sum()),
        top={k: float((rank_N <= k).mean()) for k in (1, 5)},
        chance={k: min(1.0, k / num_classes) for k in (1, 5)},
        mean_class_accuracy=float(by_class.mean()),
    )

"""Datasets of CLIP_benchmark (LAION) in image tars, for zero-shot classification and retrieval with several captions.

    DIR/classnames.txt                           one class per line; the first line is class 0
    DIR/zeroshot_classification_templates.txt    one prompt per line, with {c} for the name
    DIR/test/0.tar, 1.tar, ...                   images with `cls`, the number of the class, or `txt`, with one caption
                                                 per line

Two classes may have the same name (ImageNet has two "sunglasses"), so classes are distinguished by number.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.adapters.annotations import text_lines
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.data.classes import ClassList
from clipmill.train.data.image_tars import LABEL
from clipmill.train.data.samples import Samples
from clipmill.train.data.tar_samples import expand
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation
from clipmill.train.tasks.dual_encoder.zero_shot import PLAIN_TEMPLATE, ClassPrompts, read_templates

_CLASSES, _TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


def class_numbers(pattern: str, classes: Path | None) -> ClassList:
    """Return the class numbers that occur in `cls` in image tars.

    Args:
        classes: File with the class names; None for classnames.txt beside the tars.

    Raises:
        UserError: The file is missing, cannot be read, or is empty.
    """
    return ClassList(LABEL, tuple(map(str, range(len(_class_names(pattern, classes))))))


def class_prompts(samples: Samples[Any], pattern: str, evaluation: DualEncoderEvaluation) -> ClassPrompts:
    """Return the classes and prompts for images that were opened with `class_numbers`.

    Raises:
        UserError: See `class_numbers`; or a label other than `class` was requested.
    """
    if evaluation.label not in (None, LABEL):
        raise UserError(
            f"images in tars have no label {evaluation.label!r}",
            hint=f"omit it, or use {LABEL}, the number in their cls",
        )
    classes, templates = evaluation.classes, evaluation.templates
    names = _class_names(pattern, classes)
    templates = templates or _file_beside(pattern, _TEMPLATES)
    wordings = (PLAIN_TEMPLATE,) if templates is None else read_templates(templates)
    ids = np.arange(samples.num_clips)
    source = f"{count_noun(len(names), 'class', 'classes')} of {(classes or Path(_CLASSES)).name}, by the images' cls"
    return ClassPrompts(tuple((name,) for name in names), wordings, ids, samples.labels, source, 0)


def image_captions(samples: Samples[Any]) -> pa.Table:
    """Return every line of each image's text as a caption for a protocol. A caption's ID is the index of its image."""
    texts = [[line for line in samples.text(image).splitlines() if line.strip()] for image in range(len(samples))]
    image_M = np.repeat(np.arange(len(texts)), list(map(len, texts)))
    return pa.table(
        {
            "caption_id": image_M,
            "video_id": pa.array(map(str, image_M.tolist()), pa.string()),
            "text": pa.array([line for lines in texts for line in lines], pa.string()),
            "source": pa.array(["txt"] * len(image_M), pa.string()),
        }
    )


def _class_names(pattern: str, classes: Path | None) -> list[str]:
    path = classes or _file_beside(pattern, _CLASSES)
    if path is None:
        missing = f"there is no {_CLASSES} next to the tars {pattern}, nor in the folder above"
        if is_remote(pattern):
            missing = f"{_CLASSES} is not looked for next to the remote tars {pattern}"
        raise UserError(
            missing,
            hint="use --classes FILE (in training --evaluate.classes), with one class per line",
        )
    names = [line.strip() for line in text_lines(path)]
    if not any(names):
        raise UserError(f"{path} contains no class names", hint="write one class per line")
    return names


def _file_beside(pattern: str, name: str) -> Path | None:
    """Find a file in the folder of the tars or its parent; None if it is missing, or if the tars are remote."""
    if is_remote(pattern):
        return None
    folder = Path(expand(pattern)[0]).absolute().parent
    return next((path / name for path in (folder, folder.parent) if (path / name).is_file()), None)

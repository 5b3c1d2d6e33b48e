"""Zero-shot classification (CLIP, section 3.1.4): read classes and prompts, and compute accuracies.

A clip's predicted class is the class with the nearest embedding. The embedding of a class is the normalised mean of the
unit-length embeddings of its prompts (each of its names in each template). The rank of the correct class is 1 + the
number of other classes that score at least as high. Ties count against the model, so constant scores are always wrong.

A class file is a list or a table (clipmill.train.data.classes). A template file has one template per line, with {} or
{c} for the name. Without a class file, classes and names come from a label of the captions:

    text (Kinetics' `class`)                the label is the name
    number (EK-100's `verb`), or `action`   the names are the distinct texts of all captions with this label

With a class file, a numeric label is the number of a class in the file, and a text label must be a name in the file.
Without a label, the text of a caption must be a name in the file.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from clipmill.manifests.adapters.annotations import text_lines
from clipmill.manifests.divided_videos import select_split
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.data.classes import ACTION, Names, class_labels, class_names_of, read_class_file, require_names
from clipmill.train.evaluation.tables import Predictions, majority_baseline
from clipmill.train.tasks.dual_encoder.protocols import Embeddings, EmbedTexts

PLAIN_TEMPLATE = "{}"
PROTOCOL = (
    "a class is the mean of the unit-length embeddings of its prompts; the nearest class by cosine; "
    "ties count against the model; mean class accuracy: top-1 within each class that has clips, then their mean; "
    "majority baseline: always the most frequent classes of these clips; chance: one of all classes at random"
)


@dataclass(frozen=True)
class ClassPrompts:
    """Classes of the clips in a split, with prompts.

    Attributes:
        names: Names of each class, at least one.
        templates: Prompts with {} for a name.
        caption_ids: IDs of the captions that have a class, int64 [N], ascending.
        class_of_N: Class of each caption, int64.
        source: Description of the source of the classes.
        num_without: Number of captions in the split without a class.
    """

    names: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]
    caption_ids: NDArray[np.int64]
    class_of_N: NDArray[np.int64]
    source: str
    num_without: int

    def prompts(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return every name of every class in every template, and each prompt's class."""
        texts, classes = [], []
        for number, names in enumerate(self.names):
            for name in names:
                texts += [template.replace("{}", name) for template in self.templates]
                classes += [number] * len(self.templates)
        return texts, np.array(classes, np.int64)


def open_class_prompts(
    data_dir: Path, *, split: str, classes: Path | None, templates: Path | None, label: str | None
) -> ClassPrompts:
    """Read class names, templates and the classes of a split's captions.

    Raises:
        UserError: A file cannot be read, or no caption has a class.
    """
    captions = select_split(read_captions(data_dir), data_dir, split)
    prompt_templates = (PLAIN_TEMPLATE,) if templates is None else read_templates(templates)
    label = _label_of(captions, label, is_required=classes is None)
    field_name = "text" if label is None else f"label_{label}"
    is_action = label == ACTION
    labels = class_names_of(captions, label=ACTION) if is_action else captions[field_name]
    num_all = captions.num_rows
    is_labelled = pc.is_valid(labels)
    captions, labels = captions.filter(is_labelled), labels.filter(is_labelled).combine_chunks()
    if classes is None:
        are_names = not (is_action or pa.types.is_integer(labels.type))
        names, class_of_N = _classes_from_labels(labels, captions["text"].combine_chunks(), are_names=are_names)
        source = f"{count_noun(len(names), 'class', 'classes')} of the captions' {field_name}"
    else:
        names = read_class_file(classes)
        class_of_N = _classes_from_file(labels, names, path=classes, field_name=field_name)
        source = f"{count_noun(len(names), 'class', 'classes')} of {classes.name}, by the captions' {field_name}"
    has_class = class_of_N >= 0
    if not has_class.any():
        example = f", such as {labels[0].as_py()!r}" if len(labels) else ""
        raise UserError(
            f"no caption of split {split!r} has a class: none of their {field_name}{example} is among "
            + count_noun(len(names), "class", "classes"),
            hint="use --classes FILE with the names that the captions contain, or --label",
        )
    caption_ids = captions["caption_id"].to_numpy()[has_class]
    return ClassPrompts(names, prompt_templates, caption_ids, class_of_N[has_class], source, num_all - len(caption_ids))


def read_templates(path: Path) -> tuple[str, ...]:
    """Read the templates of a file.

    Raises:
        UserError: The file cannot be read, is empty, or a line has no {}.
    """
    # CLIP_benchmark uses {c} as the placeholder.
    lines = [line.strip().replace("{c}", "{}") for line in text_lines(path) if line.strip()]
    for line in lines:
        if "{}" not in line:
            raise UserError(f"{path}: the template {line!r} has no {{}}", hint="write {} for the name of the class")
    if not lines:
        raise UserError(f"{path} has no template", hint="write one template per line, such as: a video of {}")
    return tuple(lines)


def _label_of(captions: pa.Table, label: str | None, *, is_required: bool) -> str | None:
    """Return the requested label, or the only label if none is requested; None if there are no labels."""
    names = class_labels(captions.schema)
    known = ", ".join(names) or "none"
    if label is not None:
        if label not in names:
            raise UserError(f"captions have no label {label!r}", hint=f"labels: {known}")
        return label
    if len(names) > 1:
        raise UserError(
            "captions have several labels, but zero-shot classification needs one",
            hint=f"use --label (in training --evaluate.label) with one of: {known}",
        )
    if not names and is_required:
        raise UserError(
            "captions have no labels",
            hint="use --classes FILE (in training --evaluate.classes), with the captions' texts as names",
        )
    return names[0] if names else None


def _classes_from_labels(
    labels: pa.Array, texts: pa.Array, *, are_names: bool
) -> tuple[tuple[tuple[str, ...], ...], NDArray[np.int64]]:
    values = sorted(pc.unique(labels).to_pylist())
    class_of_N = pc.index_in(labels, value_set=pa.array(values, labels.type)).to_numpy().astype(np.int64)
    if are_names:
        return tuple((str(value),) for value in values), class_of_N
    names: list[dict[str, None]] = [{} for _ in values]
    for number, text in zip(class_of_N.tolist(), texts.to_pylist(), strict=True):
        names[number][text] = None
    return tuple(tuple(texts_of_class) for texts_of_class in names), class_of_N


def _classes_from_file(labels: pa.Array, names: Names, *, path: Path, field_name: str) -> NDArray[np.int64]:
    """Return the class of each label, int64 [N]; -1 for labels without a class."""
    if pa.types.is_integer(labels.type):
        numbers = labels.to_numpy().astype(np.int64)
        require_names(numbers, names, path=path, label=field_name)
        return np.maximum(numbers, -1)
    number_by_name = {name: number for number, line in enumerate(names) for name in line}
    return np.array([number_by_name.get(value, -1) for value in labels.to_pylist()], np.int64)


@dataclass(frozen=True)
class ZeroShot:
    """Accuracies of zero-shot classification, fractions in [0, 1].

    Attributes:
        num_classes: Number of classes to choose from.
        num_classes_seen: Number of classes that have clips.
        top: Fraction of clips whose class is among the first k, by k.
        chance: Expected fraction for random guesses among all classes, by k.
    """

    num_clips: int
    num_classes: int
    num_classes_seen: int
    top: dict[int, float]
    chance: dict[int, float]
    mean_class_accuracy: float

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {"protocol": PROTOCOL, **asdict(self)}


def class_embeddings(prompt_PE: NDArray[np.float32], class_of_prompt_P: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return unit-length embeddings of the classes 0 to C - 1, float32 [C, E]. Each class must have a prompt.

    Args:
        prompt_PE: Embeddings of prompts, unit length.
    """
    num_classes = int(class_of_prompt_P.max()) + 1
    sums = np.zeros((num_classes, prompt_PE.shape[1]))
    np.add.at(sums, class_of_prompt_P, prompt_PE)
    norm = np.linalg.norm(sums, axis=1, keepdims=True)
    return (sums / np.maximum(norm, 1e-12)).astype(np.float32)


def class_ranks(similarity_NC: NDArray[np.floating], class_of_clip_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each clip's class, int64 [N]; 1 is best."""
    right_N = similarity_NC[np.arange(len(similarity_NC)), class_of_clip_N]
    # The correct class scores at least as high as itself, which makes the best rank 1.
    rank_N: NDArray[np.int64] = (similarity_NC >= right_N[:, None]).sum(axis=1)
    return rank_N


def score_classes(similarity_NC: NDArray[np.floating], class_of_clip_N: NDArray[np.int64]) -> ZeroShot:
    """Compute accuracies from similarities of N >= 1 clips and C classes."""
    num_clips, num_classes = similarity_NC.shape
    rank_N = class_ranks(similarity_NC, class_of_clip_N)
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


@dataclass(frozen=True)
class ZeroShotScorer:
    """Scorer for zero-shot classification."""

    classes: ClassPrompts
    definition: str = PROTOCOL

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        classes = self.classes
        has_class = np.isin(embeddings.caption_id, classes.caption_ids)
        if not has_class.any():
            raise FailedWork("none of the decoded clips has a class")
        class_of_clip = classes.class_of_N[np.searchsorted(classes.caption_ids, embeddings.caption_id[has_class])]
        texts, class_of_prompt = classes.prompts()
        embedded = class_embeddings(embed(texts), class_of_prompt)
        similarity = embeddings.video[has_class] @ embedded.T
        scores = score_classes(similarity, class_of_clip).as_json()
        by_class = Predictions.of(
            *map(torch.from_numpy, (similarity, class_of_clip)),
            rank_N=torch.from_numpy(class_ranks(similarity, class_of_clip)),
        ).by_class([names[0] for names in classes.names], title=classes.source)
        templates = list(classes.templates)
        prompts = "the bare name" if templates == [PLAIN_TEMPLATE] else count_noun(len(templates), "template")
        return {
            **scores,
            "classes": classes.source,
            "prompts": (
                f"{count_noun(len(texts), 'prompt')}: {prompts}, {count_noun(sum(map(len, classes.names)), 'name')}"
            ),
            "templates": templates,
            "num_without_class": int((~has_class).sum()),
            "majority_baseline": majority_baseline(by_class),
            "by_class": [by_class],
        }

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        top = {f"top{k}": share for k, share in result["top"].items()}
        return {**top, "mean_class_accuracy": result["mean_class_accuracy"]}

"""Zero-shot classification (CLIP, section 3.1.4): read classes and prompts, and compute accuracies.

The predicted class of a clip is the class with the nearest embedding. The embedding of a class is the normalised mean
of the unit-length embeddings of its prompts (each name of the class in each template). The rank of the correct class is
1 + the number of other classes that score at least as high. Ties count against the model, so constant scores get the
worst ranks.

A class file is a list or a table (clipmill.train.data.classes). A template file has one template per line, with {} or
{c} for the name. Without a class file, classes and names come from a label of the captions:

    text (Kinetics' `class`)                the label is the name
    number (EK-100's `verb`), or `action`   the names are the distinct texts of the split's captions with this label

With a class file, a numeric label is a class number in the file, and a text label is looked up among the names in the
file. Without a label, the text of the caption is looked up. A caption whose label or text is not among the names has no
class, and is omitted.

Datasets of CLIP_benchmark (LAION) are image tars, with the class and template files in the parent folder:

    DIR/classnames.txt                           one class per line; the first line is class 0
    DIR/zeroshot_classification_templates.txt    one template per line, with {c} for the name
    DIR/test/0.tar, 1.tar, ...                   images with `cls` (class number) or `txt` (one caption per line)
                                                 (clipmill.train.tasks.dual_encoder.protocols)

Two classes of a dataset may have the same name (ImageNet has two "sunglasses"), so classes are identified by number.

Shape suffixes: N clips, C classes, P prompts, E embedding width.
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
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.store import read_captions
from clipmill.train.data.classes import (
    ACTION,
    ClassList,
    Names,
    class_labels,
    class_names_of,
    read_class_file,
    require_names,
)
from clipmill.train.data.samples import Samples
from clipmill.train.evaluation.tables import Predictions, majority_baseline
from clipmill.train.tasks.dual_encoder.protocols import Embeddings, EmbedTexts
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation

PLAIN_TEMPLATE = "{}"
# Names of the files that CLIP_benchmark stores next to its tars.
_CLASSES_FILE, _TEMPLATES_FILE = "classnames.txt", "zeroshot_classification_templates.txt"
PROTOCOL = (
    "class embedding: normalised mean of the unit-length embeddings of the prompts; prediction: nearest class by "
    "cosine; ties count against the model; mean class accuracy: mean top-1 accuracy of all classes that have clips; "
    "majority baseline: always the most frequent classes of these clips; chance: a random class"
)


@dataclass(frozen=True)
class ClassPrompts:
    """Classes of the clips in a split, with their prompts.

    Attributes:
        names: Names of each class, at least one per class.
        templates: Prompt templates; {} stands for a name.
        caption_ids: IDs of the captions that have a class, int64 [N], ascending.
        class_of_N: Class of each caption in `caption_ids`, as an index into `names`, int64.
        source: Description of the source of the classes.
        num_without_class: Number of captions in the split that have no class.
    """

    names: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...]
    caption_ids: NDArray[np.int64]
    class_of_N: NDArray[np.int64]
    source: str
    num_without_class: int

    def prompts(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return all prompts (every name of every class in every template), and the class of each prompt, int64."""
        texts, classes = [], []
        for class_number, names in enumerate(self.names):
            for name in names:
                texts += [template.replace("{}", name) for template in self.templates]
                classes += [class_number] * len(self.templates)
        return texts, np.array(classes, np.int64)


def open_class_prompts(
    data_dir: Path, *, split: str, classes: Path | None, templates: Path | None, label: str | None
) -> ClassPrompts:
    """Read class names and templates, and find the class of each caption in a split.

    Args:
        classes: Class file; None for the labels of the captions.
        templates: Template file; None for the bare names.
        label: Name of the label; None to use the only label, if there is one.

    Raises:
        UserError: A file cannot be read, the label does not exist or is ambiguous, or no caption has a class.
    """
    captions = select_split(read_captions(data_dir), data_dir, split)
    prompt_templates = (PLAIN_TEMPLATE,) if templates is None else read_templates(templates)
    label = _choose_label(captions, label, is_required=classes is None)
    field_name = "text" if label is None else f"label_{label}"
    is_action = label == ACTION
    labels = class_names_of(captions, label=ACTION) if is_action else captions[field_name]
    num_captions = captions.num_rows
    has_label = pc.is_valid(labels)
    captions, labels = captions.filter(has_label), labels.filter(has_label).combine_chunks()
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
        example = f" (such as {labels[0].as_py()!r})" if len(labels) else ""
        raise UserError(
            f"no caption of split {split!r} has a class: no {field_name}{example} is among the "
            + count_noun(len(names), "class", "classes"),
            hint="use --classes FILE with the names that the captions contain, or --label",
        )
    caption_ids = captions["caption_id"].to_numpy()[has_class]
    num_without_class = num_captions - len(caption_ids)
    return ClassPrompts(names, prompt_templates, caption_ids, class_of_N[has_class], source, num_without_class)


def image_classes(pattern: str, classes: Path | None) -> ClassList:
    """Return the classes of image tars. The `cls` members of the tars contain class numbers.

    Args:
        pattern: Paths of the tars, as in `--shards`.
        classes: File with the class names; None for classnames.txt next to the tars.

    Raises:
        UserError: The file is missing, cannot be read, or is empty.
    """
    from clipmill.train.data.image_tars import LABEL  # loaded only for image tars

    return ClassList(LABEL, tuple(map(str, range(len(_read_class_names(pattern, classes))))))


def image_class_prompts(samples: Samples[Any], pattern: str, evaluation: DualEncoderEvaluation) -> ClassPrompts:
    """Return the classes and prompts for images labelled with `image_classes`.

    Raises:
        UserError: See `image_classes`; or the template file is invalid, or a label other than `class` was requested.
    """
    from clipmill.train.data.image_tars import LABEL

    if evaluation.label not in (None, LABEL):
        raise UserError(
            f"images in tars have no label {evaluation.label!r}",
            hint=f"omit it, or use {LABEL} (the class number in cls)",
        )
    classes, templates = evaluation.classes, evaluation.templates
    names = _read_class_names(pattern, classes)
    templates = templates or _find_file_near_tars(pattern, _TEMPLATES_FILE)
    prompt_templates = (PLAIN_TEMPLATE,) if templates is None else read_templates(templates)
    ids = np.arange(samples.num_clips)
    source = (
        f"{count_noun(len(names), 'class', 'classes')} of {(classes or Path(_CLASSES_FILE)).name}, by the images' cls"
    )
    return ClassPrompts(tuple((name,) for name in names), prompt_templates, ids, samples.labels, source, 0)


def _read_class_names(pattern: str, classes: Path | None) -> list[str]:
    path = classes or _find_file_near_tars(pattern, _CLASSES_FILE)
    if path is None:
        problem = f"{_CLASSES_FILE} is neither in the folder of the tars {pattern} nor in the parent folder"
        if is_remote(pattern):
            problem = f"{_CLASSES_FILE} cannot be read from the folder of the remote tars {pattern}"
        raise UserError(
            problem,
            hint="use --classes FILE (during training: --evaluate.classes), with one class per line",
        )
    names = [line.strip() for line in text_lines(path)]
    if not any(names):
        raise UserError(f"{path} contains no class names", hint="write one class per line")
    return names


def _find_file_near_tars(pattern: str, name: str) -> Path | None:
    """Return the path of a file in the tars' folder or its parent; None if it is missing or the tars are remote."""
    from clipmill.train.data.tar_samples import expand

    if is_remote(pattern):
        return None
    folder = Path(expand(pattern)[0]).absolute().parent
    return next((path / name for path in (folder, folder.parent) if (path / name).is_file()), None)


def read_templates(path: Path) -> tuple[str, ...]:
    """Read prompt templates from a file.

    Raises:
        UserError: The file cannot be read or contains no templates, or a template lacks {}.
    """
    # CLIP_benchmark uses {c} as the placeholder.
    lines = [line.strip().replace("{c}", "{}") for line in text_lines(path) if line.strip()]
    for line in lines:
        if "{}" not in line:
            raise UserError(f"{path}: template {line!r} does not contain {{}}", hint="write {} for the class name")
    if not lines:
        raise UserError(f"{path} contains no templates", hint="write one template per line, such as: a video of {}")
    return tuple(lines)


def _choose_label(captions: pa.Table, label: str | None, *, is_required: bool) -> str | None:
    """Return the requested label, or the only label if none is requested; None if there are no labels."""
    names = class_labels(captions.schema)
    if label is not None:
        if label not in names:
            hint = f"use one of: {', '.join(names)}" if names else "omit it, and use --classes FILE"
            raise UserError(f"the captions have no label {label!r}", hint=hint)
        return label
    if len(names) > 1:
        raise UserError(
            "the captions have several labels, but zero-shot classification needs one",
            hint=f"use --label (during training: --evaluate.label) with one of: {', '.join(names)}",
        )
    if not names and is_required:
        raise UserError(
            "the captions have no labels",
            hint="use --classes FILE (during training: --evaluate.classes), with the captions' texts as class names",
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
    for class_number, text in zip(class_of_N.tolist(), texts.to_pylist(), strict=True):
        names[class_number][text] = None
    return tuple(tuple(texts_of_class) for texts_of_class in names), class_of_N


def _classes_from_file(labels: pa.Array, names: Names, *, path: Path, field_name: str) -> NDArray[np.int64]:
    """Return the class of each label, int64 [N]; -1 for labels without a class."""
    if pa.types.is_integer(labels.type):
        class_numbers = labels.to_numpy().astype(np.int64)
        require_names(class_numbers, names, path=path, label=field_name)
        return np.maximum(class_numbers, -1)
    number_by_name = {name: class_number for class_number, line in enumerate(names) for name in line}
    return np.array([number_by_name.get(value, -1) for value in labels.to_pylist()], np.int64)


@dataclass(frozen=True)
class ZeroShot:
    """Accuracies of zero-shot classification, as fractions in [0, 1].

    Attributes:
        num_clips: Number of clips with a class.
        num_classes: Number of classes to choose from.
        num_classes_seen: Number of classes that have clips.
        top: Fraction of clips whose class is among the first k, for each k.
        chance: Expected fraction for random guesses among all classes, for each k.
        mean_class_accuracy: Mean of the top-1 accuracies of all classes that have clips.
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
    """Return unit-length embeddings of the classes 0 to C - 1, float32 [C, E].

    Args:
        prompt_PE: Unit-length embeddings of the prompts.
        class_of_prompt_P: Class of each prompt. Each class must have a prompt.
    """
    num_classes = int(class_of_prompt_P.max()) + 1
    sums = np.zeros((num_classes, prompt_PE.shape[1]))
    np.add.at(sums, class_of_prompt_P, prompt_PE)
    norm = np.linalg.norm(sums, axis=1, keepdims=True)
    return (sums / np.maximum(norm, 1e-12)).astype(np.float32)


def class_ranks(similarity_NC: NDArray[np.floating], class_of_clip_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each clip's correct class, int64 [N]; 1 is best."""
    correct_N = similarity_NC[np.arange(len(similarity_NC)), class_of_clip_N]
    # The count includes the correct class itself, so the best rank is 1.
    rank_N: NDArray[np.int64] = (similarity_NC >= correct_N[:, None]).sum(axis=1)
    return rank_N


def score_classes(similarity_NC: NDArray[np.floating], class_of_clip_N: NDArray[np.int64]) -> ZeroShot:
    """Compute accuracies from the similarities of N >= 1 clips and C classes."""
    num_clips, num_classes = similarity_NC.shape
    rank_N = class_ranks(similarity_NC, class_of_clip_N)
    is_first = (rank_N == 1).astype(np.float64)
    num_of_class = np.bincount(class_of_clip_N, minlength=num_classes)
    has_clips = num_of_class > 0
    num_correct = np.bincount(class_of_clip_N, weights=is_first, minlength=num_classes)
    accuracies = num_correct[has_clips] / num_of_class[has_clips]
    return ZeroShot(
        num_clips=num_clips,
        num_classes=num_classes,
        num_classes_seen=int(has_clips.sum()),
        top={k: float((rank_N <= k).mean()) for k in (1, 5)},
        chance={k: min(1.0, k / num_classes) for k in (1, 5)},
        mean_class_accuracy=float(accuracies.mean()),
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
            raise FailedWork("no decoded clip has a class")
        class_of_clip = classes.class_of_N[np.searchsorted(classes.caption_ids, embeddings.caption_id[has_class])]
        texts, class_of_prompt = classes.prompts()
        similarity = embeddings.video[has_class] @ class_embeddings(embed(texts), class_of_prompt).T
        scores = score_classes(similarity, class_of_clip).as_json()
        class_table = Predictions.of(
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
            "majority_baseline": majority_baseline(class_table),
            "by_class": [class_table],
        }

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        top = {f"top{k}": share for k, share in result["top"].items()}
        return {**top, "mean_class_accuracy": result["mean_class_accuracy"]}

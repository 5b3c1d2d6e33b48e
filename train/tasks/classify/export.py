"""Export classifiers (VideoMAE, transformers, torch.export, ONNX), and convert classifiers trained with VideoMAE."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import deferred_checks
from clipmill.train.data.classes import ClassList
from clipmill.train.evaluation.served import PROGRAM_FORMATS, exported_program
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.spec import AdoptedModel, ExportRequest
from clipmill.train.tasks.classify.spec import ClassifySettings
from clipmill.train.tasks.classify.task import VideoClassifier
from clipmill.train.weights.architecture import frame_px_of, match_size, model_name_of, num_frames_of
from clipmill.train.weights.conversion import kind_of_tensors
from clipmill.train.weights.exported import Export, require_format
from clipmill.train.weights.files import read_config
from clipmill.train.weights.source import Say, Source, effective_clip_settings
from clipmill.train.weights.videomae import exported_videomae

# VideoMAE's classifiers were trained on 16 frames per clip, every fourth frame of a video. No file records this choice.
_NUM_FRAMES, _STRIDE = 16, 4


def adopted_classifier(source: Source, path: Path, *, say: Say) -> AdoptedModel | None:
    """Convert a fine-tuned VideoMAE to a classifier; return None if the weights have no classification layer.

    The names of the classes come from `id2label` in config.json. Without this file, the classes are numbered.

    Raises:
        UserError: `id2label` is malformed, or does not fit the number of classes.
    """
    head = source.converted.tensors.get("head.weight")
    if head is None or source.kind is None:
        return None
    config = read_config(path / "config.json") or {}
    with deferred_checks():  # the checks of --model do not apply to these weights
        settings = ClassifySettings(
            model=model_name_of(source),
            num_frames=num_frames_of(source, default=config.get("num_frames", _NUM_FRAMES)),
            sampling="stride",
            stride=_STRIDE,
            size_px=frame_px_of(source, default=ClassifySettings.size_px),
        )
        settings = effective_clip_settings(settings, source, say=say)
    say(f"weights: clips of {settings.num_frames} frames, every {_STRIDE}th frame, as in VideoMAE's fine-tuning")
    names = _class_names(config.get("id2label"), num_classes=len(head), path=path)
    if all(name == f"LABEL_{number}" for number, name in enumerate(names)) and names:
        say(f"weights: id2label in {path / 'config.json'} lists only placeholders; replace them with class names")
    size = match_size(size_of(settings.model, settings.towers), source)
    return AdoptedModel(
        settings=settings,
        shape=ModelShape(size=size, image_px=settings.size_px),
        open_arguments={"classes": ClassList(settings.label, names or tuple(map(str, range(len(head)))))},
        missing_part="" if names else "names of its classes",
    )


def _class_names(labels: object, *, num_classes: int, path: Path) -> tuple[str, ...]:
    if labels is None:
        return ()
    try:
        assert isinstance(labels, Mapping)
        names = tuple(str(labels[str(number)]) for number in range(len(labels)))
    except (AssertionError, KeyError) as error:
        raise UserError(
            f"{path / 'config.json'}: id2label does not map the numbers 0, 1, ... to class names",
            hint="download the folder again",
        ) from error
    if len(names) != num_classes or len(set(names)) < num_classes:
        raise UserError(
            f"{path / 'config.json'}: id2label lists {len(set(names))} classes, but the last layer has {num_classes}",
            hint="download the folder again",
        )
    return names


def exported_classifier(request: ExportRequest) -> Export:
    """Export a classifier to the requested format. All formats except torch and onnx need a videomae tower.

    Raises:
        UserError: The format cannot represent the classifier or its tower.
    """
    if request.format_name in PROGRAM_FORMATS:
        model = VideoClassifier(
            request.shape.size.video,
            towers=replace(request.settings.towers, activation_checkpointing=False),
            image_px=request.shape.image_px,
            num_frames=request.settings.num_frames,
            num_classes=len(request.task.classes),
            dropout=0.0,
            attend=attend_with_sdpa,
        )
        model.load_state_dict(request.weights)
        output = {"kind": "logits of the classes", "classes": list(request.task.classes.names)}
        return exported_program(request, model, output)
    if kind_of_tensors(request.weights) != "videomae":
        raise UserError(
            f"{request.title} is a classifier with CLIP's tower, which --format {request.format_name} does not support",
            hint="use --format torch or onnx, or export a classifier with --towers.kind videomae",
            flags=("--format",),
        )
    require_format(request.format_name, ("hf", "videomae", *PROGRAM_FORMATS), what="a video classifier")
    # VideoMAE's checkpoints do not contain the names of the classes.
    classes = request.task.classes.names if request.format_name == "hf" else ()
    return exported_videomae(
        request.settings,
        request.weights,
        shape=request.shape,
        format_name=request.format_name,
        model={
            "architectures": ["VideoMAEForVideoClassification"],
            "use_mean_pooling": True,
            "id2label": dict(enumerate(classes)),
            "label2id": {name: index for index, name in enumerate(classes)},
            "problem_type": "single_label_classification",
        },
    )

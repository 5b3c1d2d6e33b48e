"""Image normalisation, read from every file that transformers 4 and 5 write, or from a default that the log reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Init, Towers
from clipmill.train.models.hugging_face import PROCESSOR_FILES, read_processor
from clipmill.train.models.library_towers import preprocessing_of
from clipmill.train.tasks.classify.spec import ClassifySettings
from clipmill.train.weights.conversion import IMAGENET_MEAN, ConvertedStateDict
from clipmill.train.weights.files import MODEL_FILES
from clipmill.train.weights.library import library_facts
from clipmill.train.weights.source import Source, effective_clip_settings
from clipmill.train.weights.sources import facts_in

MEAN, STD = [0.11, 0.12, 0.13], [0.21, 0.22, 0.23]
OTHER = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PLAIN: dict[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": MEAN,
    "image_std": STD,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 32},
}
IMAGE = {**PLAIN, "image_processor_type": "CLIPImageProcessor"}
VIDEO = {**PLAIN, "video_processor_type": "VideoMAEVideoProcessor", "do_sample_frames": False}
PROCESSOR, PREPROCESSOR, VIDEO_PREPROCESSOR = PROCESSOR_FILES
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "version 4": {PREPROCESSOR: IMAGE},
    "version 4, old": {PREPROCESSOR: {**PLAIN, "feature_extractor_type": "CLIPFeatureExtractor"}},
    "version 4, with a processor": {PREPROCESSOR: IMAGE, PROCESSOR: {"processor_class": "CLIPProcessor"}},
    "version 5": {PROCESSOR: {"image_processor": IMAGE, "processor_class": "CLIPProcessor"}},
    "version 5, beside an older file": {PROCESSOR: {"image_processor": IMAGE}, PREPROCESSOR: OTHER},
    "version 5, of videos": {PROCESSOR: {"video_processor": VIDEO, "processor_class": "SomeProcessor"}},
    "version 5, of both": {PROCESSOR: {"image_processor": IMAGE, "video_processor": {**VIDEO, **OTHER}}},
    "a processor of videos alone": {VIDEO_PREPROCESSOR: VIDEO},
    "one of each": {PREPROCESSOR: IMAGE, VIDEO_PREPROCESSOR: {**VIDEO, **OTHER}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"vision_config": {}, "text_config": {}},
    "videomae": {},
    "timesformer": {"architectures": ["TimesformerModel"]},
}


def save(folder: Path, files: dict[str, dict[str, Any]], *, kind: str = "clip") -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def effective_settings(folder: Path, **init: Any) -> tuple[Any, list[str]]:
    """Return the settings of a run that starts from the facts in a folder, and the printed messages."""
    facts, messages = facts_in(folder), list[str]()
    assert facts is not None
    source = Source(title=str(folder), converted=ConvertedStateDict(tensors={}, origins={}), facts=facts)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    settings = ClassifySettings(
        label="verb", shards="data", init=Init(weights=str(folder), **init), towers=Towers(kind=kind)
    )
    return effective_clip_settings(settings, source, say=messages.append).init, messages


@pytest.mark.parametrize("kind", ["clip", "videomae"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_its_mean_and_deviation(tmp_path: Path, layout: str, kind: str) -> None:
    save(tmp_path, LAYOUTS[layout], kind=kind)
    init, messages = effective_settings(tmp_path)
    assert (list(init.pixel_mean), list(init.pixel_std)) == (MEAN, STD)
    assert not [line for line in messages if "normalised" in line]
    assert list(library_facts(tmp_path).mean or ()) == MEAN
    tower = preprocessing_of(f"hf:{tmp_path}")
    assert (list(tower.mean or ()), list(tower.std or ()), tower.interpolation) == (MEAN, STD, "bicubic")


def test_all_of_these_files_are_fetched() -> None:
    assert set(PROCESSOR_FILES) <= set(MODEL_FILES)


@pytest.mark.parametrize(
    ("values", "mean", "std"),
    [
        ({"do_normalize": False}, [0, 0, 0], [1, 1, 1]),
        ({"rescale_factor": 1 / 127.5, "offset": True}, [0.555, 0.56, 0.565], [0.105, 0.11, 0.115]),
        ({"do_rescale": False}, MEAN, STD),
    ],
)
def test_what_else_a_processor_does_to_values_is_part_of_it(
    tmp_path: Path, values: dict[str, Any], mean: list[float], std: list[float]
) -> None:
    processor = read_processor(str(save(tmp_path, {PREPROCESSOR: {**IMAGE, **values}})))
    assert processor["image_mean"] == pytest.approx(mean) and processor["image_std"] == pytest.approx(std)
    assert processor["do_normalize"] and not processor.get("offset")


@pytest.mark.parametrize("files", [{}, {PROCESSOR: {"processor_class": "CLIPProcessor"}}, {PREPROCESSOR: {"size": 32}}])
def test_a_default_is_named_with_its_reason(tmp_path: Path, files: dict[str, dict[str, Any]]) -> None:
    save(tmp_path, files, kind="videomae")
    init, messages = effective_settings(tmp_path)
    assert init.pixel_mean == IMAGENET_MEAN
    assert [
        line
        for line in messages
        if "does not record" in line and "videomae towers are used: mean 0.485 0.456 0.406" in line
    ]
    init, messages = effective_settings(tmp_path, pixel_mean=(0.1, 0.2, 0.3), pixel_std=(0.1, 0.2, 0.3))
    assert init.pixel_mean == (0.1, 0.2, 0.3) and not [line for line in messages if "no file" in line]


@pytest.mark.parametrize("value", ["0.5", [0.5, 0.5], [0.5, 0.5, 300]])
def test_a_mean_that_is_none_is_refused_with_its_file(tmp_path: Path, value: Any) -> None:
    save(tmp_path, {PROCESSOR: {"image_processor": {**IMAGE, "image_mean": value}}})
    with pytest.raises(UserError, match=r"processor_config\.json: image_mean is .*, but must be three numbers"):
        facts_in(tmp_path)

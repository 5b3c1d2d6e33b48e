"""Runs of each task on moving squares with labelled captions; every weight tensor has changed."""

from pathlib import Path

import pytest

from tests.train.running import train

SMALL = "--model tiny --size-px 32 --num-frames 4 --workers 1 --batch 6 --steps 3 --warmup-steps 1 --lr 1e-3"
TEMPORAL = "--towers.temporal random"
# Values that cannot be read from the tensors differ from the defaults of every format.
UNUSUAL = "--towers.video-norm-eps 1e-4 --init.pixel-mean 0.42 0.46 0.41 --device cpu"
FLAGS = {
    "dual-encoder": f"{TEMPORAL} --towers.activation quick_gelu --sampling stride --stride 2 --optimizer.ema 0.5",
    "classify": "--towers.kind videomae --label verb --sampling uniform",
    "mae": "--mask-ratio 0.5 --stride 2",
    "caption": f"{TEMPORAL} --decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280",
}

EVALUATIONS: dict[str, list[tuple[str, ...]]] = {
    "dual-encoder": [
        ("retrieval",),
        ("retrieval", "--clips", "2"),
        ("zero-shot", "--label", "verb"),
        ("probe", "--label", "verb", "--neighbours", "5"),
    ],
    "classify": [("classification", "--clips", "2"), ("probe", "--label", "noun", "--neighbours", "5")],
    "mae": [("reconstruction",), ("probe", "--label", "verb", "--neighbours", "5")],
    "caption": [("caption", "--decoding.method", "beam", "--decoding.max-tokens", "6")],
}
FORMATS = [
    ("dual-encoder", "open_clip"),
    ("dual-encoder", "hf"),
    ("classify", "hf"),
    ("classify", "videomae"),
    ("mae", "hf"),
    ("mae", "videomae"),
    ("caption", "hf"),
]


@pytest.fixture(scope="package")
def runs(moving: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task."""
    folder = tmp_path_factory.mktemp("runs")
    for task, flags in FLAGS.items():
        words = (*SMALL.split(), *UNUSUAL.split(), *flags.split())
        assert train(task, "--shards", moving, "--out", folder / task, *words) == 0
    return {task: folder / task for task in FLAGS}


@pytest.fixture(scope="module")
def exports(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Exports of every run in every format."""
    folder = tmp_path_factory.mktemp("exports")
    for task, form in FORMATS:
        assert train("export", runs[task], "--format", form, "--out", folder / task / form) == 0
    return {(task, form): folder / task / form for task, form in FORMATS}

"""Flags without an effect: explicit flags are rejected, and values from presets and files are accepted."""

from pathlib import Path
from typing import Any

import pytest

from clipmill.train.config.files import save_settings
from clipmill.train.tasks.mae.spec import MaeSettings
from tests.train.running import train, two_lines


@pytest.mark.parametrize(
    ("words", "flag", "beside", "hint"),
    [
        ("mae --sampling uniform --stride 2", "--stride is 2", "--sampling is uniform", "--sampling stride"),
        ("mae --preset tiny --sampling lavila --stride 2", "--stride is 2", "--sampling is lavila", "--sampling"),
        ("dual-encoder --stride 8", "--stride is 8", "--sampling is uniform", "--sampling stride"),
        ("caption --crop centre --min-crop-area .3", "--min-crop-area is .3", "--crop is centre", "--crop random"),
        ("classify --short-side-px 256", "--short-side-px is 256", "--crop is random", "--crop simple"),
        (
            "mae --optimizer.start-lr 1e-6 --warmup-steps 0",
            "--optimizer.start-lr is 1e-6",
            "--warmup-steps is 0",
            "omit",
        ),
        ("mae --min-crop-area 0.3", "--min-crop-area is 0.3", "--crop is multi-scale", "--crop random"),
        ("mae --decoder-mask-ratio 0.75", "--decoder-mask-ratio is 0.75", "--decoder-mask is none", "running-cell"),
        ("classify --augment.rand-std 1", "--augment.rand-std is 1", "--augment.rand-ops is 0", "1 or more"),
        ("mae --evaluate.labels shape motion", "labels is shape motion", "--evaluate.every is 0", "every STEPS"),
        ("mae --evaluate.methods linear", "methods is linear", "--evaluate.every is 0", "every STEPS"),
        ("classify --evaluate.crops 3", "--evaluate.crops is 3", "--evaluate.every is 0", "every STEPS"),
        (
            "caption --decoder.weights gpt2 --decoder.name tiny",
            "--decoder.name is tiny",
            "--decoder.weights is gpt2",
            "",
        ),
        (
            "caption --decoder.tokenizer . --decoder.vocabulary 8192",
            "vocabulary is 8192",
            "--decoder.tokenizer is .",
            "",
        ),
        (
            "caption --towers.kind videomae --towers.temporal random",
            "temporal is random",
            "--towers.kind is videomae",
            "clip",
        ),
        ("dual-encoder --evaluate.split test", "--evaluate.split is test", "--evaluate.every is 0", "every STEPS"),
        ("mae --parallel.schedule gpipe", "schedule is gpipe", "--parallel.stages is 1", "stages 2 or more"),
        ("mae --parallel.partition uniform", "partition is uniform", "--parallel.stages is 1", "stages 2 or more"),
        ("caption --cache there", "--cache is there", "--shards data is on this machine", "a remote address"),
        ("classify --label a --input latents --decode plain", "--decode is plain", "--input is latents", "pixels"),
        ("mae --evaluate.shards a=b", "--evaluate.shards is a=b", "--evaluate.every is 0", "every STEPS"),
        (
            "dual-encoder --evaluate.every 2 --evaluate.classes a.txt --evaluate.shards a=b@test:mir",
            "--evaluate.classes is a.txt",
            "--evaluate.protocol is mir",
            "zero-shot",
        ),
        (
            "dual-encoder --evaluate.every 2 --evaluate.protocol vatex --evaluate.relevancy a.pkl",
            "--evaluate.relevancy is a.pkl",
            "--evaluate.protocol is vatex",
            "mir",
        ),
        (
            "dual-encoder --evaluate.every 2 --evaluate.protocol zero-shot --evaluate.dual-softmax 0.01",
            "--evaluate.dual-softmax is 0.01",
            "--evaluate.protocol is zero-shot",
            "retrieval or msrvtt-1ka",
        ),
    ],
)
def test_a_flag_that_has_no_effect_is_refused_with_the_one_that_it_goes_with(
    capsys: pytest.CaptureFixture[str], words: str, flag: str, beside: str, hint: str
) -> None:
    assert train(*words.split()) == 2
    first, second = two_lines(capsys)
    assert f"{flag}, which has no effect: {beside}" in first and "omit it" in second and hint in second


def test_what_has_an_effect_or_nobody_gave_is_let_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        "clipmill.train.commands.launch.launch", lambda spec, settings, resume, provenance: chosen.append(settings)
    )
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    save_settings(MaeSettings(stride=8, sampling="uniform", decoder_mask_ratio=0.75), tmp_path / "mae.yaml")
    for words in (
        # Values from presets and files.
        "mae --preset tiny --sampling uniform --crop centre --decoder-mask none",
        f"mae --config {tmp_path / 'mae.yaml'}",
        # Values that are equal to the defaults.
        "mae --sampling uniform --stride 4 --evaluate.methods knn --evaluate.max-samples 5000",
        # Flags that take effect through another flag, a preset or a default.
        "mae --stride 8 --evaluate.labels shape --evaluate.every 5",
        "mae --preset tiny --min-crop-area 0.3 --decoder-mask random --decoder-mask-ratio 0.75",
        "caption --preset tiny --towers.kind videomae",
        "classify --preset tiny --towers.kind videomae --label shape",
        "caption --preset tiny --decoder.weights gpt2 --decoder.max-tokens 20",
        "dual-encoder --min-crop-area 0.3 --sampling stride --stride 8",
        "dual-encoder --evaluate.every 2 --evaluate.shards a=b@test:mir c=d --evaluate.relevancy a.pkl",
        "dual-encoder --evaluate.every 2 --evaluate.protocol vatex --evaluate.dual-softmax 0.01",
        # These commands use the split in any case.
        "mae --evaluate.split test",
        "mae --shards s3://bucket/data --cache there",
        "caption --parallel.stages 2 --parallel.partition uniform",
        "classify --evaluate.split test",
    ):
        assert train(*words.split()) == 0, words
    assert [(setting.stride, setting.sampling) for setting in chosen[:2]] == [(16, "uniform"), (8, "uniform")]


def test_flags_without_effect_are_named_together_with_all_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "mae --preset tiny --sampling uniform --stride 2 --steps 0 --evaluate.neighbours 0 --optimizer.ema 1"
    assert train(*words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("error: ") for line in lines[::2]] == [
        "--evaluate.neighbours is 0, which has no effect: --evaluate.every is 0",
        "--stride is 2, which has no effect: --sampling is uniform",
        "--steps is 0, which is out of range",
        "--optimizer.ema is 1.0, which is out of range",
    ]
    assert all(line.startswith("hint: ") for line in lines[1::2]) and len(lines) == 8
    assert lines[3].endswith("--sampling stride") and lines[5].endswith("to 10,000,000,000")


def test_a_decoder_of_the_weights_to_start_from_is_not_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vision-encoder-decoder"}')
    assert train("caption", "--init.weights", tmp_path, "--decoder.name", "tiny") == 2
    assert f"which has no effect: --init.weights is {tmp_path}" in two_lines(capsys)[0]

"""Settings that cannot be trained are rejected before a run exists."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.running import train
from tests.train.tuning.runs import LORA, TINY


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("dual-encoder", ("--freeze", "video", "text"), "--freeze video text leaves nothing to train"),
        ("mae", ("--freeze", "video", "decoder"), "--freeze video decoder leaves nothing to train"),
        ("caption", ("--freeze", "encoder", "decoder"), "--freeze encoder decoder leaves nothing to train"),
        ("dual-encoder", ("--freeze", "vision"), "--freeze vision does not name a part"),
        ("dual-encoder", ("--freeze", "blocks:all"), "--freeze blocks:all does not name a part"),
        ("dual-encoder", ("--freeze", "blocks:3"), "--freeze blocks:3 is too large: the video tower has only 2 blocks"),
        (
            "dual-encoder",
            ("--freeze", "text.blocks:3"),
            "is too large: the text tower has only 2 blocks",
        ),
        ("classify", ("--freeze", "text"), "--freeze text: the model has no text tower"),
        ("dual-encoder", ("--freeze", "text", "--text-tower", "frozen"), "the model has no text tower"),
        ("dual-encoder", ("--freeze", "video", "--text-tower", "frozen"), "--freeze video leaves nothing to train"),
        ("dual-encoder", LORA, "--lora.rank is 2, but there are no pretrained weights to adapt"),
        ("dual-encoder", (*LORA, "--lora.towers", "decoder"), "--lora.towers decoder: the model has no decoder"),
        ("classify", (*LORA, "--lora.towers", "text"), "--lora.towers text: the model has no text tower"),
        (
            "dual-encoder",
            (*LORA, "--freeze", "text", "--lora.towers", "text"),
            "--lora.towers text adapts a tower that",
        ),
        ("classify", (*LORA, "--freeze", "video"), "--lora.rank is 2, but --freeze video leaves no tower to adapt"),
        ("dual-encoder", ("--lora.alpha", 4), "--lora.alpha is 4, which has no effect: --lora.rank is 0"),
        ("dual-encoder", ("--lora.rank", -1), "--lora.rank is -1"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    data_dir: Path,
    source: Path,
    tmp_path: Path,
    command: str,
    flags: tuple[Any, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = () if flags == LORA or command == "caption" else ("--init.weights", source)
    words = [*TINY, "--steps", 1, "--shards", data_dir, *start, *flags]
    if command == "mae":
        words = ["--model", "tiny", "--steps", 1, *flags]
    assert train(command, *words, "--out", tmp_path / "run") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_decoder_without_pretrained_weights_gets_no_adapters(
    data_dir: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--decoder.name", "tiny", "--decoder.max-tokens", 8, *LORA, "--lora.towers", "decoder")
    words = [*TINY, "--steps", 1, "--shards", data_dir, "--init.weights", source, *flags]
    assert train("caption", *words, "--out", tmp_path / "run") == 2
    assert "--lora.towers decoder adapts pretrained weights, but" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

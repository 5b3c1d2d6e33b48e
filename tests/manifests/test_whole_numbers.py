"""A fraction is never rounded to a whole number, neither from a flag nor from a file."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("command", "words", "named", "origin"),
    [
        ("prep", ["chunk", "--crf", "20.7"], "--crf is 20.7", ""),
        ("prep", ["chunk", "--workers", "1.5"], "--workers is 1.5", ""),
        ("train", ["dual-encoder", "--steps", "1.5"], "--steps is 1.5", ""),
        ("train", ["dual-encoder", "--config", "settings.yaml"], "--batch is 7.5", "; --batch is from settings.yaml"),
    ],
)
def test_a_fraction_is_refused_by_its_flag(
    tmp_path: Path, command: str, words: list[str], named: str, origin: str
) -> None:
    (tmp_path / "settings.yaml").write_text("batch: 7.5\n")
    ran = subprocess.run(
        [sys.executable, "-m", f"{command}.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [f"error: {named}", f"hint: give a whole number, without a decimal point{origin}"]

"""The page of a GPU: made of whatever was measured, with what failed and what is missing said."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import page_of
from benchmarks.report import table


def page(folder: Path, measurements: list[dict[str, Any]], *, is_dry_run: bool = False) -> str:
    environment = {"gpu": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-22", "torch": "2.11.0", "ffmpeg": "none"}
    plain = {"seconds": 1.0, "rows": [], "notes": [], "targets": [], "error": None, "skipped": None}
    filled = [{**plain, **changes} for changes in measurements]
    content = {"environment": environment, "is_dry_run": is_dry_run, "measurements": filled, "running": "the last"}
    (folder / "gpu.json").write_text(json.dumps(content))
    return page_of(folder / "gpu.json")


def test_a_page_has_every_table_and_says_what_was_not_measured(tmp_path: Path) -> None:
    rows = [
        {"way": "sdpa", "clips/s": 1234.5, "MFU": "41.0%", "/ naive": None},
        {"way": "xformers", "clips/s": None, "MFU": None, "/ naive": None, "error": "ImportError: no xformers"},
    ]
    measurements: list[dict[str, Any]] = [
        {"name": "ViT-B/16", "rows": rows, "notes": ["batch 32"]},
        {"name": "losses", "error": "Traceback ...\nRuntimeError: out of luck"},
        {"name": "decoding", "skipped": "takes about 40 s, and 12 s were left"},
    ]
    text = page(tmp_path, measurements)
    assert text.startswith("# NVIDIA H200\n") and text.endswith("The run ended during the measurement: the last.")
    assert "| torch | 2.11.0 |" in text and "ffmpeg" not in text
    assert "| variant | clips/s | MFU |\n|---|---|---|\n| sdpa | 1,234 | 41.0% |\n| xformers |  |  |" in text
    assert "- xformers failed: `ImportError: no xformers`" in text and "- batch 32" in text
    assert "Not measured: `RuntimeError: out of luck`" in text
    assert "Not measured: takes about 40 s, and 12 s were left." in text


def test_a_target_stands_beside_its_figure_with_what_is_missing_to_it(tmp_path: Path) -> None:
    targets = [
        {"what": "over naive", "figure": 1.8, "goal": 1.7, "is_at_most": False},
        {"what": "over open_clip", "figure": 0.9, "goal": 1.0, "is_at_most": False},
        {"what": "waits", "figure": 3, "goal": 1, "is_at_most": True},
        {"what": "batch", "figure": None, "goal": 13.8, "is_at_most": False},
    ]
    text = page(tmp_path, [{"name": "ViT", "targets": targets}])
    assert "| ViT | over naive | 1.80 | at least 1.70 | met |" in text
    assert "| ViT | over open_clip | 0.9 | at least 1.00 | missed by 10% |" in text
    assert "| ViT | waits | 3 | at most 1 | missed by 200% |" in text
    assert "| ViT | batch |  | at least 13.80 | not measured |" in text


def test_a_dry_run_is_no_chip(tmp_path: Path) -> None:
    text = page(tmp_path, [], is_dry_run=True)
    assert text.startswith("# Dry run\n") and "the figures are meaningless" in text


def test_a_table_has_the_columns_of_all_its_rows() -> None:
    lines = table([{"way": "a", "ms": 0.01234}, {"way": "b|c", "peak GB": 3.0, "empty": None}])
    assert lines == ["| variant | ms | peak GB |", "|---|---|---|", "| a | 0.0123 |  |", "| b\\|c |  | 3.00 |"]

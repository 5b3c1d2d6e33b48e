"""The page of a GPU: made of whatever results there are, with what failed and what is missing said."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.tables import table, write_page
from manifests.errors import UserError

XML = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="1" tests="4" time="12.5">
<testcase classname="tests.gpu.test_attention" name="test_bf16[causal]" time="1">
<properties><property name="kernel" value="fa3F"/></properties></testcase>
<testcase classname="tests.gpu.test_attention" name="test_fp16" time="1"/>
<testcase classname="tests.gpu.test_ranks" name="test_nccl" time="1">
<skipped type="pytest.skip" message="one GPU only"/></testcase>
<testcase classname="tests.gpu.test_ranks" name="test_gloo" time="1">
<failure message="AssertionError: 1 != 2">a long traceback</failure></testcase>
</testsuite></testsuites>
"""


def part(name: str, measurements: list[dict[str, Any]], *, is_dry_run: bool = False) -> str:
    environment = {"gpu": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-22", "torch": "2.11.0", "ffmpeg": "none"}
    plain = {"seconds": 1.0, "rows": [], "notes": [], "targets": [], "error": None, "skipped": None}
    filled = [{**plain, **one} for one in measurements]
    return json.dumps({"part": name, "environment": environment, "is_dry_run": is_dry_run, "measurements": filled})


def test_a_page_has_every_part_and_says_what_was_not_measured(tmp_path: Path) -> None:
    rows = [
        {"way": "sdpa", "clips/s": 1234.5, "MFU": "41.0%", "/ naive": None},
        {"way": "xformers", "clips/s": None, "MFU": None, "/ naive": None, "error": "ImportError: no xformers"},
    ]
    measurements: list[dict[str, Any]] = [
        {"name": "ViT-B/16", "rows": rows, "notes": ["batch 32"]},
        {"name": "losses", "error": "Traceback ...\nRuntimeError: out of luck"},
        {"name": "decoding", "skipped": "takes about 40 s, and 12 s were left"},
    ]
    (tmp_path / "speed.json").write_text(part("speed", measurements))
    (tmp_path / "correctness.xml").write_text(XML)
    path = write_page(tmp_path)
    page = path.read_text()
    assert path.name == "nvidia-h200.md"
    assert "| torch | 2.11.0 |" in page and "ffmpeg" not in page
    assert "| variant | clips/s | MFU |\n|---|---|---|\n| sdpa | 1,234 | 41.0% |\n| xformers |  |  |" in page
    assert "- xformers failed: `ImportError: no xformers`" in page and "- batch 32" in page
    assert "Not measured: `RuntimeError: out of luck`" in page
    assert "Not measured: takes about 40 s, and 12 s were left." in page
    assert "2 passed, 1 failed, 1 skipped, in 12 s." in page
    assert "- test_ranks: test_gloo: `AssertionError: 1 != 2`" in page
    assert "- test_ranks: test_nccl: `one GPU only`" in page
    assert "| test_attention: test_bf16[causal] | kernel | fa3F |" in page
    assert page.endswith("## Feeding it\n\nNot measured.\n")


def test_a_target_stands_beside_its_figure_with_what_is_missing_to_it(tmp_path: Path) -> None:
    targets = [
        {"what": "over naive", "figure": 1.8, "goal": 1.7, "is_at_most": False},
        {"what": "over open_clip", "figure": 0.9, "goal": 1.0, "is_at_most": False},
        {"what": "waits", "figure": 3, "goal": 1, "is_at_most": True},
        {"what": "batch", "figure": None, "goal": 13.8, "is_at_most": False},
    ]
    (tmp_path / "feeding.json").write_text(part("feeding", [{"name": "ViT", "targets": targets}]))
    page = write_page(tmp_path).read_text()
    assert "| ViT | over naive | 1.80 | at least 1.70 | met |" in page
    assert "| ViT | over open_clip | 0.9 | at least 1.00 | missed by 10% |" in page
    assert "| ViT | waits | 3 | at most 1 | missed by 200% |" in page
    assert "| ViT | batch |  | at least 13.80 | not measured |" in page
    assert "## Correctness\n\nNot measured." in page


def test_a_dry_run_is_no_chip_and_an_empty_folder_no_result(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no results"):
        write_page(tmp_path)
    (tmp_path / "speed.json").write_text(part("speed", [], is_dry_run=True))
    page = write_page(tmp_path)
    assert page.name == "dry-run.md" and "the figures are meaningless" in page.read_text()


def test_a_table_has_the_columns_of_all_its_rows() -> None:
    lines = table([{"way": "a", "ms": 0.01234}, {"way": "b|c", "peak GB": 3.0, "empty": None}])
    assert lines == ["| variant | ms | peak GB |", "|---|---|---|", "| a | 0.0123 |  |", "| b\\|c |  | 3.00 |"]


@pytest.mark.parametrize("name", ["speed.json", "correctness.xml"])
def test_a_damaged_result_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"measure')
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        write_page(tmp_path)

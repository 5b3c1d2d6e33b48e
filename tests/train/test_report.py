import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from clipmill.manifests.publish import publish_json
from clipmill.train.config.files import save_settings
from clipmill.train.evaluation.tables import Predictions, majority_baseline
from clipmill.train.registry import evaluations
from clipmill.train.report.results import Curve, Line, chart_values, evaluation_curves, write_page
from clipmill.train.run.folder import RunFolder, append_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from scripts.pages.problems import problems
from tests.browser import needs_chromium, open_page, show_page

HIDDEN = "\x1b[31m\u202e\u2066"
HOSTILE = f"<script>alert('x')</script>{HIDDEN}"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="


class Tags(HTMLParser):
    """Parser that collects tags and the URLs that they load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]


GROUPS = [group for evaluation in evaluations().values() for group in evaluation.curves]


def hostile_run(path: Path) -> RunFolder:
    """Run in which every text from outside contains markup."""
    run = RunFolder(path / "run & <b>")
    run.path.mkdir(parents=True)
    save_settings(DualEncoderSettings(split=HOSTILE), run.settings)
    publish_json(run.facts, {"task": HOSTILE, "data": HOSTILE, "versions": {"torch": HOSTILE}, "machine": HOSTILE})
    line = {"lr": 1e-3, "samples_per_s": 9.0, "step_s": 2.0, "data_wait_s": 0.5, "epoch": 1.0, "num_failed": 0}
    append_lines(run.metrics, [{"step": step, "loss": 4 / step, **line} for step in range(1, 31)])
    append_lines(run.failures, [{"position": 1, "key": HOSTILE, "reason": "undecodable", "detail": HOSTILE}])
    direction = {
        "num_queries": 3,
        "gallery_size": 3,
        "recall": {"1": 0.5, "5": 1.0, "10": 1.0},
        "chance": {"1": 0.25, "5": 1.0, "10": 1.0},
        "median_rank": 1.5,
        "chance_median_rank": 2.0,
    }
    clip = {"key": HOSTILE, "begin_s": 0.0, "end_s": 1.0, "text": HOSTILE, "score": 0.5, "is_right": True}
    result = {
        **dict.fromkeys(("split", "data", "variant", "clip", "protocol", "weights", "command"), HOSTILE),
        "evaluation": "retrieval",
        "step": 30,
        "text_to_video": direction,
        "video_to_text": direction,
        "failed": [],
        "examples": [{"text": HOSTILE, "rank": 1, "found": [{**clip, "frames": [PIXEL]}]}],
    }
    run.write_evaluation("retrieval-val", result)
    return run


def assert_own_scripts_only(page: str) -> None:
    """Assert that a page has only the scripts that its policy lists, and data that cannot end their element."""
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and len(digests) == 2
    assert html.unescape(policy[1]).endswith("script-src " + " ".join(f"'sha256-{digest}'" for digest in digests))
    [data] = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page, flags=re.DOTALL)
    assert isinstance(json.loads(data), list)
    assert page.count("<script") == 3


def test_nothing_from_outside_becomes_markup_and_nothing_is_loaded(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    write_page(run)
    page = run.page.read_text()
    tags = Tags()
    tags.feed(page)
    assert "b>" not in page.split("<h1>")[1].split("</h1>")[0].replace("&lt;b&gt;", "")
    assert_own_scripts_only(page)
    assert page.count("&lt;script&gt;") >= 10
    assert set(tags.loaded) == {PIXEL}
    assert not set(HIDDEN) & set(page) - set("[31m") and page.count(r"\x1b[31m\u202e\u2066") >= 10


def test_the_page_shows_what_the_run_reached(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    write_page(run)
    page = run.page.read_text()
    for words in ("50.0 %", "chance 25.0 %", "waiting for data", "25.0 %", "4 at step 1, 0.1333 at step 30", "R@10"):
        assert words in page


def test_gpu_hours_and_energy_are_shown_where_they_are_known(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    write_page(run)
    assert "GPU hours" not in run.page.read_text()
    for known, words in (({}, "energy unknown"), ({"gpu_kwh": 0.125}, "0.125 kWh used by the GPUs")):
        publish_json(run.facts, {"task": "dual-encoder", "consumption": {"gpu_hours": 1.5, **known}})
        write_page(run)
        assert "<b>1.5</b>" in run.page.read_text() and words in run.page.read_text()


def test_evaluations_in_the_loop_stand_together_by_kind(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    numbers = {f"val/{way}_r{k}": 0.5 for way in ("video_to_text", "text_to_video") for k in (1, 5)}
    extra = {"val/average_mean_ap": 0.25, "val/top1": 0.125, f"{HOSTILE}/other_{HOSTILE}": 3.0}
    lines = [{"step": step, "loss": 1.0, **numbers, **extra} for step in (10, 20)]
    curves = evaluation_curves(lines, GROUPS)
    assert [curve.title for curve in curves[:4]] == [
        "Recall, text → video, % (val)",
        "Recall, video → text, % (val)",
        "mAP, % (val)",
        "Zero-shot accuracy, % (val)",
    ]
    texts = [f"{label}: 50 at step 10, 50 at step 20, from 50 to 50" for label in ("R@1", "R@5")]
    assert [line.text for line in curves[0].lines] == texts
    steady = {"lr": 1e-3, "samples_per_s": 9.0, "step_s": 2.0, "data_wait_s": 0.5, "epoch": 1.0}
    append_lines(run.metrics, [{**line, **steady} for line in lines])
    write_page(run)
    page = run.page.read_text()
    assert "Evaluation during training" in page
    assert_own_scripts_only(page)


def test_probes_of_several_labels_stand_in_one_chart_by_method() -> None:
    numbers = {f"val/{label}_{method}_top1": 0.5 for label in ("motion", "main_shape") for method in ("knn", "linear")}
    curves = evaluation_curves([{"step": step, "loss": 1.0, **numbers} for step in (10, 20)], GROUPS)
    assert [curve.title for curve in curves] == ["k-NN, top-1, % (val)", "Linear probe, top-1, % (val)"]
    assert [line.label for line in curves[0].lines] == ["motion", "main shape"]


def test_numbers_of_captions_have_the_names_of_the_table() -> None:
    numbers = {"val/cider_d": 0.5, "val/rouge_l": 0.25, "val/bleu1": 3e-17, "val/exact_match": 0.125, "val/loss": 2.0}
    curves = evaluation_curves([{"step": step, "loss": 1.0, **numbers} for step in (10, 20)], GROUPS)
    shown = {curve.title: (curve.lines[0].label, f"{curve.lines[0].points[-1][1]:g}") for curve in curves}
    assert shown == {
        "CIDEr-D, times 100 (val)": ("CIDEr-D", "50"),
        "ROUGE-L, times 100 (val)": ("ROUGE-L", "25"),
        # A product of small numbers that should be 0.
        "BLEU-1, times 100 (val)": ("BLEU-1", "0"),
        "Exact match, times 100 (val)": ("exact match", "12.5"),
        "Loss (val)": ("loss", "2"),
    }


def test_tiles_of_two_splits_are_told_apart_and_the_one_trained_on_comes_last(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    result = {**json.loads(run.evaluation("retrieval-val").read_bytes()), "examples": []}
    for split in (HOSTILE, "val"):
        publish_json(run.evaluation(f"retrieval-{'val' if split == 'val' else 'train'}"), {**result, "split": split})
    write_page(run)
    tiles = run.page.read_text().split('class="tile"')[1:3]
    assert [("(val)" in tile, "(&lt;script&gt;" in tile) for tile in tiles] == [(True, False), (False, True)]


def test_what_became_of_the_weights_is_told_by_kind(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    change = {"kind": "resized", "name": "video.positions", "origin": HOSTILE, "old": [197, 64], "new": [50, 64]}
    dropped = [
        {"kind": "dropped", "name": "", "origin": f"blocks.{number}.scale", "old": [64], "new": None, "why": ""}
        for number in range(12)
    ]
    report = {"source": HOSTILE, "num_copied": 150, "changes": [{**change, "why": "other size"}, *dropped]}
    publish_json(run.facts, {"weights": {**report, "logit_scale": None}})
    write_page(run)
    page = run.page.read_text()
    for words in ("150 tensors copied", "197 x 64 → 50 x 64", "blocks.*.scale", "(12 tensors)", "unexplained"):
        assert words in page
    assert_own_scripts_only(page)


def test_the_page_says_how_to_get_it_again(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    write_page(run)
    page = run.page.read_text()
    assert "run &amp; &lt;b&gt;/settings.yaml" in page and "-again" in page


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    save_settings(DualEncoderSettings(), run.settings)
    write_page(run)
    assert "Settings" in run.page.read_text()


def long_run(folder: Path) -> RunFolder:
    """Run of many steps, with an evaluation and hostile names."""
    run = hostile_run(folder)
    steady = {"lr": 1e-3, "samples_per_s": 9.0, "step_s": 2.0, "data_wait_s": 0.5, "epoch": 1.0}
    append_lines(
        run.metrics,
        [
            {"step": step, "loss": 1.0 + 1 / step, "grad_norm": step % 7, "val/text_to_video_r1": 0.5, **steady}
            for step in range(10, 5000)
        ],
    )
    return run


@needs_chromium
def test_a_browser_draws_the_charts_without_a_complaint_and_cuts_nothing(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    write_page(run)
    page = open_page(run.page, width_px=420)
    assert page.messages == [] and page.overflow_px == 0 and page.problems == []
    assert page.num_canvases == run.page.read_text().count("data-chart=") >= 6


def classified_run(path: Path) -> RunFolder:
    """Run with a chart and a classification of 14 classes. The name of one class contains markup."""
    run = long_run(path)
    names = [HOSTILE, *(f"class {number}" for number in range(1, 14))]
    label = torch.arange(14).repeat_interleave(20)
    predicted = torch.where(torch.arange(280) % 3 == 0, (label + 5) % 14, label)
    by_class = Predictions(label, predicted, torch.ones_like(label, dtype=torch.bool)).by_class(names, title="classes")
    result = json.loads(run.evaluation("retrieval-val").read_bytes())
    scores = {"num_clips": 280, "num_classes": 14, "num_classes_seen": 14, "num_without_class": 0}
    rest = {"top": {"1": 2 / 3, "5": 1.0}, "chance": {"1": 1 / 14, "5": 5 / 14}, "mean_class_accuracy": 0.6}
    words = {
        "classes": HOSTILE,
        "prompts": HOSTILE,
        "majority_baseline": majority_baseline(by_class),
        "by_class": [by_class],
    }
    run.write_evaluation("zero-shot-val", {**result, "evaluation": "zero-shot", **scores, **rest, **words})
    return run


@needs_chromium
def test_charts_and_tables_obey_a_keyboard(tmp_path: Path) -> None:
    run = classified_run(tmp_path)
    write_page(run)
    text = run.page.read_text()
    assert HOSTILE not in text and "majority baseline 7.1 %" in text.split('class="tiles"')[1].split("<section>")[0]
    assert "of the 12 most frequent classes" in text and "Most confused classes" in text
    with show_page(run.page, width_px=1400, is_dark=True) as tab:
        assert problems(tab) == []

        def press(element: str, *keys: str) -> None:
            tab.value(f"document.querySelector('{element}').focus()")
            for key in keys:
                tab.press(key)

        legend = "[data-chart] .u-series:nth-child(2) th"
        assert tab.value(f"document.querySelector('{legend}').getAttribute('aria-pressed')") == "true"
        press(legend, "Enter")
        tab.value("new Promise((done) => setTimeout(done, 50))")
        assert tab.value(f"document.querySelector('{legend}').getAttribute('aria-pressed')") == "false"
        step = "document.querySelector('[data-chart] .u-series .u-value').textContent"
        press("[data-chart] .u-wrap", "Home")
        tab.value("new Promise((done) => setTimeout(done, 50))")
        assert tab.value(step) == "10"
        press("table[data-sort] th:nth-child(3) button", "Enter", "Enter")
        rows = "[...document.querySelectorAll('table[data-sort] tr td:nth-child(3)')].map((one) => one.textContent)"
        shares = [float(share.split()[0]) for share in tab.value(rows)]
        assert shares == sorted(shares) and len(set(shares)) > 1, "the second press sorts the lowest first"
        assert tab.value("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"


def test_many_points_become_the_extremes_and_means_of_equal_parts() -> None:
    points = [(float(step), 5.0 if step == 777 else float(step % 2)) for step in range(50_000)]
    [chart] = json.loads(chart_values([Curve("Loss", (Line(points, "a\u202e"),))])["json"])
    [line] = chart["lines"]
    assert line["label"] == r"a\u202e"
    assert len(line["x"]) <= 2000 and 5.0 in line["y"] and {0.0, 1.0} <= set(line["y"])
    assert sum(line["count"]) == len(points)
    total = sum(mean * count for mean, count in zip(line["mean"], line["count"], strict=True))
    assert total == pytest.approx(sum(y for _, y in points), rel=1e-4)
    assert line["x"] == sorted(line["x"])

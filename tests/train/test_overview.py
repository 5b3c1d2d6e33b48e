"""Several runs on one page: external markup is escaped, and links lead to the runs."""

import json
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_json
from clipmill.train.config.files import save_settings
from clipmill.train.config.training import TrackSettings
from clipmill.train.report.overview import write_overview
from clipmill.train.report.results import write_page
from clipmill.train.run.folder import RunFolder, append_lines, read_lines, read_object
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.browser import needs_chromium, open_page
from tests.train.test_report import HOSTILE, PIXEL, Tags, assert_own_scripts_only, hostile_run, long_run


def test_runs_are_linked_and_nothing_from_outside_becomes_markup(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    write_page(run)
    out = tmp_path / "pages" / "index.html"
    out.parent.mkdir()
    write_overview([run.path, run.path], out)
    tags = Tags()
    tags.feed(out.read_text())
    assert HOSTILE not in out.read_text()
    assert_own_scripts_only(out.read_text())
    links = [link for link in tags.loaded if not link.startswith("data:")]
    assert len(links) == 6  # including links in both tables of the comparison
    assert all((out.parent / unquote(link)).resolve() == run.page.resolve() for link in links)
    assert out.read_text().count(PIXEL) == 2  # each card shows the first text query of its run


def test_further_pages_are_linked_by_their_titles(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    page, out = tmp_path / "a search.html", tmp_path / "index.html"
    page.write_text("<title>Search: red &amp; &lt;b&gt; · clipmill</title>")
    write_overview([run.path], out, links=[page])
    assert '<a href="a%20search.html">Search: red &amp; &lt;b&gt;</a>' in out.read_text()
    page.write_text("<title>mine</title>")
    for path in (page, tmp_path / "nowhere.html", tmp_path):
        with pytest.raises(UserError, match="is not a page written by clipmill"):
            write_overview([run.path], out, links=[path])


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere") as caught:
        write_overview([tmp_path / "nowhere"], tmp_path / "index.html")
    assert caught.value.hint == "use the --out folder of a training command"  # of any of them
    with pytest.raises(UserError, match="there is no run in"):
        write_overview([tmp_path], tmp_path / "index.html")


def test_embeddings_and_pages_beside_runs_are_left_out(tmp_path: Path) -> None:
    run, out = hostile_run(tmp_path), tmp_path / "index.html"
    embedded, page = tmp_path / "first-embedded", tmp_path / "search.html"
    embedded.mkdir()
    page.touch()
    assert write_overview([run.path, embedded, page], out) == [embedded, page]
    assert out.read_text().count(PIXEL) == 1
    with pytest.raises(UserError, match="nowhere"):
        write_overview([run.path, tmp_path / "nowhere"], out)


def test_only_a_page_is_replaced(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    out = tmp_path / "all.html"
    write_overview([run.path], out)
    write_overview([run.path], out)  # the run's own page is replaced
    notes = tmp_path / "README.md"
    notes.write_text("precious")
    for path, message in ((notes, "is not a page"), (tmp_path, "is not a page"), (tmp_path / "no" / "a", "no folder")):
        with pytest.raises(UserError, match=message):
            write_overview([run.path], path)
    assert notes.read_text() == "precious"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"evaluation": "juggling"}, "unknown evaluation: juggling"),
        ({}, "unknown evaluation: None"),
        ({"evaluation": "retrieval", "split": "val"}, "is damaged"),
        ({"evaluation": "retrieval", "split": "val", "text_to_video": 3, "video_to_text": []}, "is damaged"),
    ],
)
def test_a_result_that_no_page_can_show_is_named(tmp_path: Path, result: dict[str, object], message: str) -> None:
    run = hostile_run(tmp_path)
    publish_json(run.evaluation("odd"), result)
    with pytest.raises(UserError, match=message) as caught:
        write_page(run)
    assert "odd.json" in str(caught.value) and "remove" in (caught.value.hint or "")


def test_runs_are_compared_by_metrics_settings_and_curves(tmp_path: Path) -> None:
    runs = [long_run(tmp_path / name) for name in ("one", "two")]
    save_settings(DualEncoderSettings(lr=0.5), runs[1].settings)
    save_settings(DualEncoderSettings(), runs[0].settings)
    out = tmp_path / "index.html"
    write_overview([run.path for run in runs], out)
    page = out.read_text()
    comparison = page.split("<h2>Comparison</h2>")[1].split("</section>")[0]
    assert "Text-video retrieval: R@1, text → video" in comparison and "chance 25.0\N{NO-BREAK SPACE}%" in comparison
    assert "1 different setting" in comparison and "<td>lr</td>" in comparison and "0.5</td>" in comparison
    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    loss = next(chart for chart in charts if chart["title"] == "Loss")
    assert [line["label"] for line in loss["lines"]] == ["run & <b> (1)", "run & <b> (2)"]
    assert "run &amp; &lt;b&gt; (2)</a>" in comparison, "runs with the same name need different labels"


def repeat_run(
    folder: Path, *, seed: int, recall: float, processes: str = "1", speed: float = 9.0, lr: float = 0.1
) -> Path:
    """Make a run with a result whose text-to-video R@1 is `recall`."""
    run = hostile_run(folder)
    tracked = TrackSettings(wandb="offline" if seed == 0 else "off")
    save_settings(DualEncoderSettings(seed=seed, lr=lr, track=tracked, checkpoint_every=1 + seed), run.settings)
    publish_json(run.facts, {"task": "dual-encoder", "processes": processes})
    lines = read_lines(run.metrics)
    run.metrics.unlink()
    append_lines(run.metrics, [{**line, "samples_per_s": speed} for line in lines])
    result = read_object(run.evaluation("retrieval-val"))
    result["text_to_video"]["recall"]["1"] = recall
    run.write_evaluation("retrieval-val", result)
    return run.path


def test_runs_that_differ_in_the_seed_alone_have_a_mean_and_a_standard_deviation(tmp_path: Path) -> None:
    recalls = [0.36, 0.37, 0.41]
    runs = [repeat_run(tmp_path / str(seed), seed=seed, recall=recall) for seed, recall in enumerate(recalls)]
    runs.append(repeat_run(tmp_path / "other", seed=0, recall=0.9, lr=0.2))
    runs.append(runs[0])  # a repeated run is not a new seed
    write_overview(runs, tmp_path / "index.html")
    comparison = (tmp_path / "index.html").read_text().split("<h2>Comparison</h2>")[1].split("</section>")[0]
    assert comparison.count("mean (standard deviation) of 3 seeds: ") == 2  # one each for training and retrieval
    mean, deviation = 100 * np.mean(recalls), 100 * np.std(recalls, ddof=1)
    assert f">{mean:.1f} % ({deviation:.2f})</td>" in comparison
    assert ">1.5 (0)</td>" in comparison, "a metric that is not a fraction"
    write_overview(runs[2:], tmp_path / "index.html")
    assert "mean (standard deviation) of 2 seeds" in (tmp_path / "index.html").read_text()
    write_overview(runs[3:], tmp_path / "index.html")
    assert "mean (standard deviation)" not in (tmp_path / "index.html").read_text()


def test_metrics_on_other_data_have_a_mean_over_seeds_too(tmp_path: Path) -> None:
    recalls, runs = [0.2, 0.3, 0.7], []
    for seed, recall in enumerate(recalls):
        path = repeat_run(tmp_path / str(seed), seed=seed, recall=0.5)
        run = RunFolder(path)
        for name, change in (("imagenet", 0.0), ("flickr", 0.1)):
            result = read_object(run.evaluation("retrieval-val")) | {"shards": f"data/{name}", "is_own_data": False}
            result["text_to_video"]["recall"]["1"] = recall + change
            run.write_evaluation("retrieval-val", result)
        runs.append(path)
    write_overview(runs, tmp_path / "index.html")
    comparison = (tmp_path / "index.html").read_text().split("<h2>Comparison</h2>")[1].split("</section>")[0]
    # There is one for training, and one for each data folder.
    assert comparison.count("mean (standard deviation) of 3 seeds: ") == 1 + 3
    for name, change in (("imagenet", 0.0), ("flickr", 0.1)):
        table = comparison.split(f"data: data/{name}</caption>")[1].split("</table>")[0]
        mean, deviation = 100 * (np.mean(recalls) + change), 100 * np.std(recalls, ddof=1)
        assert f">{mean:.1f} % ({deviation:.2f})</td>" in table


def test_more_processes_have_a_speed_up(tmp_path: Path) -> None:
    speeds = {"1": 100.0, "8, ddp": 700.0, "4, fsdp": 390.0}
    runs = [
        repeat_run(tmp_path / str(number), seed=0, recall=0.5, processes=text, speed=speed, lr=0.1 * (number + 1))
        for number, (text, speed) in enumerate(speeds.items())
    ]
    write_overview(runs, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    for words in ("1.00 x (1 process against 1)", "7.00 x (8 processes against 1)", "3.90 x (4 processes against 1)"):
        assert f"<td>{words}</td>" in page
    write_overview(runs[:1] * 2, tmp_path / "index.html")
    assert "speed-up" not in (tmp_path / "index.html").read_text()


@needs_chromium
def test_a_browser_shows_the_comparison_without_a_complaint(tmp_path: Path) -> None:
    runs = [long_run(tmp_path / name) for name in ("one", "two")]
    write_overview([run.path for run in runs], tmp_path / "index.html")
    page = open_page(tmp_path / "index.html", width_px=1400)
    assert page.problems == [] and page.num_canvases >= 5

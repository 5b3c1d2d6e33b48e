"""`train eval probe` from the command line, on runs of every task with a video tower, and the probe in the loop."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.publish import publish_json
from clipmill.train.cli import app
from clipmill.train.evaluation import probe_classifiers
from clipmill.train.evaluation.probe_classifiers import GRID, choose_l2
from clipmill.train.run.checkpoint import latest_checkpoint, read_metadata
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.classify.moving import write_moving
from tests.train.latents.written import Chunk, Written, write_latents
from tests.train.running import train
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

TINY = ("--model", "tiny", "--num-frames", 2, "--workers", 1, "--steps", 2, "--batch", 6, "--warmup-steps", 1)
PIXELS = (*TINY, "--size-px", 32)
MASKED = ("--mask-ratio", 0.5)


@pytest.fixture(scope="module", autouse=True)
def _few_regularisations() -> Iterator[None]:
    """Limit probes to two regularizations that converge in a few steps; weaker ones take hundreds of steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_classifiers, "choose_l2", partial(choose_l2, grid=GRID[-2:]))
        yield


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of pixels, and latents of the same videos, with labelled segments of one second."""
    data_dir = tmp_path_factory.mktemp("moving")
    write_moving(data_dir)
    chunks = [Chunk(f"v{number:02d}", 2000 * half, 8) for number in range(12) for half in range(2)]
    write_latents(Written(data_dir), [chunks])
    return data_dir


def train_run(out: Path, task: str, moving: Path, *flags: Any) -> Path:
    assert train(task, "--shards", moving, "--out", out, *flags) == 0
    return out


def probe_run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert train("eval", "probe", *arguments, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_masked_autoencoder_is_probed_in_the_loop_and_afterwards_alike(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ("--evaluate.labels", "verb", "--evaluate.labels", "noun", "--evaluate.neighbours", 5)
    methods = ("--evaluate.methods", "knn", "--evaluate.methods", "linear", "--evaluate.every", 1)
    best = ("--best", "val/noun_knn_top1", "--keep-checkpoints", 1, "--checkpoint-every", 1)
    flags = (*PIXELS, *MASKED, *labels, *methods, *best, "--lr", "1e-2")
    out = train_run(tmp_path / "run", "mae", moving, *flags)
    lines = read_lines(RunFolder(out).metrics)
    names = {f"val/{label}_{method}_{name}" for label in ("verb", "noun") for method in ("knn", "linear")
             for name in ("top1", "top5", "mean_class")}  # fmt: skip
    assert names <= set(lines[0]) and names <= set(lines[1])
    best_step = max(lines, key=lambda line: line["val/noun_knn_top1"])["step"]
    kept = {read_metadata(path).step for path in RunFolder(out).checkpoints.glob("step_*")}
    assert kept == {2, best_step}

    result = probe_run(capsys, out, "--label", "verb", "--label", "noun", "--neighbours", 5)
    findings = {(entry["label"], entry["method"], entry["encoder"]): entry for entry in result["findings"]}
    assert len(findings) == 8 and [entry["label"] for entry in result["findings"]] == ["verb"] * 4 + ["noun"] * 4
    for label in ("verb", "noun"):
        for method in ("knn", "linear"):
            finding = findings[label, method, "trained"]
            assert finding["found"]["top1"] == pytest.approx(lines[1][f"val/{label}_{method}_top1"])
            assert finding["majority_baseline"]["top1"] == 0.5 and (finding["num_samples"], finding["num_bank"]) == (
                12,
                36,
            )
    # Any features reveal the brightness.
    assert findings["noun", "linear", "random"]["found"]["top1"] == 1.0
    assert findings["noun", "linear", "trained"]["gradient"] < 1e-5
    assert "the 5 nearest clips of split 'train'" in result["protocol"] and "T = 2 frames" in result["clip"]
    page = RunFolder(out).page.read_text()
    assert "Probes of frozen features" in page and "verb, k-NN, random" in page


@pytest.mark.nightly
def test_towers_of_every_task_are_probed(moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latents = ("--input", "latents", "--segment", "1s")
    runs: dict[str, tuple[Any, ...]] = {
        "mae": ("mae", *TINY, *latents, *MASKED),
        "towers": ("dual-encoder", *PIXELS),
        "classes": ("classify", *PIXELS, "--label", "class"),
    }
    words = {
        "mae": "mean of the encoder's tokens",
        "towers": "before the projection",
        "classes": "input of the last layer",
    }
    for name, flags in runs.items():
        out = train_run(tmp_path / name, flags[0], moving, *flags[1:])
        expected = ("--label", "noun", "--neighbours", 3, "--method", "knn")
        result = probe_run(capsys, out, *expected)
        assert words[name] in result["features"], name
        trained_one, random_one = result["findings"]
        assert trained_one["encoder"] == "trained" and random_one["encoder"] == "random"
        if name != "mae":  # the latents of mae are noise here
            assert random_one["found"]["top1"] > 0.8
        if name == "mae":
            assert "segments of 4 frames" in result["data"]
    # Two steps change little, and the seed reproduces the initial weights.
    assert probe_run(capsys, out, *expected)["findings"] == result["findings"]


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (("--label", "mood"), "the captions have no column label_mood", "use an available label: class, noun, verb"),
        (("--label", "verb", "--split", "train"), "every clip would be its own neighbour", "two different splits"),
        (("--label", "verb", "--neighbours", 37), "37 neighbours are requested, but the bank", "36 or fewer"),
        (("--label", "verb", "--split", "test"), "no videos of split 'test'", ""),
        (("--label", "verb", "--label", "verb"), "--label has a repeated value: verb, verb", "use each value once"),
        ((), "--label is missing", "use an available label: class, noun, verb"),
        (("--label", "verb", "--neighbours", 0), "error: --neighbours is 0", "from 1 to 10,000"),
    ],
)
def test_mistakes_are_named(
    moving: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[Any, ...],
    message: str,
    hint: str,
) -> None:
    assert train("eval", "probe", run, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and hint in error
    assert not RunFolder(run).evaluation("probe-val").exists()


@pytest.fixture(scope="module")
def run(moving: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of two steps."""
    out = tmp_path_factory.mktemp("runs") / "mae"
    words = [str(word) for word in ("mae", "--shards", moving, "--out", out, *PIXELS, *MASKED)]
    app(words)
    return out


def test_a_mistake_in_the_loops_probe_leaves_no_run_behind(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = ("--evaluate.every", 1)
    for flags, message in (
        ((), "needs --evaluate.labels, the labels to predict from frozen features"),
        (("--evaluate.labels", "mood"), "no column label_mood"),
        (("--evaluate.labels", "verb", "--evaluate.max-bank", 10), "20 neighbours are requested"),
        (("--evaluate.labels", "verb", "--best", "val/noun_knn_top1"), "--best val/noun_knn_top1 is not a metric"),
    ):
        assert train("mae", "--shards", moving, "--out", tmp_path / "run", *PIXELS, *MASKED, *every, *flags) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_run_without_a_video_tower_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in run.iterdir():
        (other / path.name).symlink_to(path)
    (other / "run.json").unlink()
    publish_json(other / "run.json", {"task": "caption"})
    assert train("eval", "probe", other, "--label", "verb") == 2
    assert "is a run of train caption, not of train dual-encoder, classify, mae" in capsys.readouterr().err
    assert latest_checkpoint(RunFolder(other).checkpoints) is not None


def test_classes_that_the_bank_lacks_are_counted_and_one_class_is_nothing_to_learn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def captions(video_id: str, *names: str) -> list[Caption]:
        return [
            Caption(video_id, place, place + 1, "x", labels={"label_class": name}) for place, name in enumerate(names)
        ]

    write_shard(tmp_path, 0, chunks_of("a", 40), split="train")
    write_shard(tmp_path, 1, chunks_of("b", 40), split="val")
    videos = {"a": "train", "b": "val"}
    write_captions(tmp_path, videos, [*captions("a", "p", "q", "p", "q"), *captions("b", "p", "r", "s", "r")])
    few = ("--label", "class", "--neighbours", 2, "--shards", tmp_path)
    for entry in probe_run(capsys, run, *few)["findings"]:
        assert (entry["num_classes"], entry["num_unseen"], entry["num_unseen_classes"]) == (4, 3, 2)
        assert entry["found"]["top1"] <= 0.25
    assert train("eval", "probe", run, *few) == 0
    out = capsys.readouterr().out
    assert "3 clips whose class is missing from the bank (2 classes of label class): always wrong" in out

    write_captions(tmp_path, videos, [*captions("a", "p", "p"), *captions("b", "p", "q")])
    assert train("eval", "probe", run, *few) == 2
    assert "all clips of the bank (split 'train') have the class 'p'" in capsys.readouterr().err
    write_captions(tmp_path, videos, [*captions("a", "p", "q"), Caption("b", 0, 1, "x")])
    assert train("eval", "probe", run, *few) == 2
    assert "no clip of split 'val' is usable" in capsys.readouterr().err

"""Results of one run: each evaluation that differs from the run as trained has its own result, and none is replaced."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from clipmill.train.report.overview import write_overview
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.tiers import nightly_beyond
from tests.train.caption.conftest import DECODER, SMALL
from tests.train.running import train

OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("--decoding.method sample --decoding.seed 1", {"decoding.method": "sample", "decoding.seed": 1}),
    ("--decoding.method sample --decoding.seed 2", {"decoding.method": "sample", "decoding.seed": 2}),
    ("--where words>0", {"where": "words>0"}),
    ("--num-frames 1 --decoding.max-tokens 5", {"num_frames": 1, "decoding.max_tokens": 5}),
]
CONTEXT = 12  # context length of the decoder, which limits captions if no flag does
# Each pair of flags generates the same captions, because the second spells out defaults.
ALIKE = [
    ("--decoding.max-tokens 6", "--decoding.method greedy --decoding.max-tokens 6 --decoding.seed 3"),
    ("--decoding.method greedy", f"--decoding.max-tokens {CONTEXT}"),
    ("--decoding.method sample", "--decoding.method sample --decoding.temperature 1 --decoding.top-p 1"),
    (
        "--decoding.method beam",
        "--decoding.method beam --decoding.num-beams 4 --decoding.length-penalty 1 --decoding.no-early-stopping",
    ),
]


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Captioner with two checkpoints and greedy decoding as its default."""
    out = tmp_path_factory.mktemp("kept") / "run"
    flags = [*SMALL.split(), *DECODER.split(), "--steps", 14, "--checkpoint-every", 12, "--decoding.max-tokens", 6]
    assert train("caption", "--shards", data_dir, "--out", out, *flags) == 0
    return RunFolder(out)


def evaluate(run: RunFolder, *flags: object) -> None:
    assert train("eval", "caption", run.path, "--split", "train", *flags) in (0, 1)


def contents(run: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.path / "evaluations").iterdir() if path.is_file()}


def test_every_use_unlike_the_training_has_a_result_of_its_own(run: RunFolder, tmp_path: Path) -> None:
    evaluate(run)
    kept = contents(run)
    assert set(kept) == {f"captions-train{ending}" for ending in (".json", ".html", ".coco.json")}
    assert json.loads(kept["captions-train.json"])["overrides"] == {}
    for flags, overrides in OTHERS:
        more = {} if "max-tokens" in flags or "decoding" not in flags else {"decoding.max_tokens": CONTEXT}
        evaluate(run, *flags.split())
        now = contents(run)
        assert {name: now[name] for name in kept} == kept, flags
        (added,) = (name for name in now.keys() - kept.keys() if name.endswith(".json") and ".coco" not in name)
        assert json.loads(now[added])["overrides"] == {**overrides, **more}
        assert f"{Path(added).stem}.html" in now and json.loads(now[added])["all_said"].endswith(
            f"{Path(added).stem}.html"
        )
        kept = now
    # A flag that repeats the run's own decoding gives the evaluation as trained. The page of several runs shows only
    # that evaluation.
    evaluate(run, "--decoding.max-tokens", 6)
    assert contents(run).keys() == kept.keys()
    write_overview([run.path, run.path], tmp_path / "index.html")
    comparison = (tmp_path / "index.html").read_text().split("<h2>Comparison</h2>")[1].split("</section>")[0]
    assert comparison.count("<caption>Captions") == 1
    assert "decoding.method sample" in run.page.read_text()


@pytest.mark.parametrize(("flags", "spelled_out"), nightly_beyond(ALIKE[-1:], ALIKE), ids=[flags for flags, _ in ALIKE])
def test_what_takes_effect_names_a_result_and_its_command(
    run: RunFolder, flags: str, spelled_out: str, tmp_path: Path
) -> None:
    again = RunFolder(tmp_path / "again")
    shutil.copytree(run.path, again.path, ignore=shutil.ignore_patterns("evaluations"))
    evaluate(again, *flags.split())
    (path,) = again.results()
    first = json.loads(path.read_bytes())
    assert None not in first["overrides"].values()
    # The recorded command reproduces its result, and so do flags that spell out the defaults.
    words = ["eval", "caption", again.path, "--split", "train", *spelled_out.split()]
    for command in (shlex.split(first["command"])[1:], words):
        assert train(*command) == 0
        result = json.loads(path.read_bytes())
        assert again.results() == [path] and not (path.parent / "former").exists(), command
        for name in ("command", "overrides", "decoding", "means"):
            assert result[name] == first[name], command


def test_results_of_another_checkpoint_or_number_of_clips_are_kept(run: RunFolder, tmp_path: Path) -> None:
    again = RunFolder(tmp_path / "again")
    shutil.copytree(run.path, again.path)
    shutil.rmtree(again.path / "evaluations", ignore_errors=True)
    evaluate(again)
    first = contents(again)
    evaluate(again)  # the same evaluation replaces its own result
    assert not (again.path / "evaluations" / "former").exists()
    evaluate(again, "--max-samples", 2)
    shutil.rmtree(all_checkpoints(again.checkpoints)[14])
    evaluate(again)
    steps = [json.loads(path.read_bytes())["step"] for path in again.results()]
    former = sorted((again.path / "evaluations" / "former").iterdir())
    assert steps == [12] and len(former) == 2 * 3
    assert {name.removeprefix("captions-train") for name in first} == {
        path.name.partition("-step-14-")[2][8:] for path in former
    }
    results = [json.loads(path.read_bytes()) for path in former if path.suffix == ".json" and ".coco" not in path.name]
    assert [result["step"] for result in results] == [14, 14]
    assert len({result["num_samples"] for result in results}) == 2

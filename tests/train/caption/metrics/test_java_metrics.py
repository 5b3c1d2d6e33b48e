import os
import shutil
import sys
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.commands.evaluation import score_run
from clipmill.train.tasks.caption.java import Dialogue, Meteor, MetricUnavailable, java
from clipmill.train.tasks.caption.metrics import score_captions
from clipmill.train.tasks.caption.spec import CAPTIONS, CaptionFlags
from clipmill.train.tasks.caption.task import GeneratedCaptions, metrics_of

CANDIDATES = {"a": "a man is playing the guitar", "b": "", "c": "cooking a woman ||| x", "d": "日本"}
REFERENCES = {
    "a": ["a man plays a guitar.", "someone is playing guitar"],
    "b": ["two dogs run on grass", "dogs are running"],
    "c": ["a woman cooks"],
    "d": ["日本 word", "x ||| y"],
}
# Expected scores, computed with pycocoevalcap's Meteor.
METEOR = {"a": 0.3906175081779026, "b": 0.0, "c": 0.29443914409586225, "d": 0.33520678036654417}


def program(folder: Path, text: str) -> Path:
    """Make a folder for PATH in which `java` is a Python program."""
    folder.mkdir(exist_ok=True)
    java = folder / "java"
    java.write_text(f"#!{sys.executable}\nimport json, sys, time\n{text}\n")
    java.chmod(0o755)
    return folder


def jars(folder: Path) -> Path:
    folder.mkdir()
    for name in ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"):
        (folder / name).touch()
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("java") is None, reason="METEOR needs Java")
def test_meteor_is_that_of_pycocoevalcap_and_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def count_start() -> str:
        started.append(1)
        return java()

    monkeypatch.setattr("clipmill.train.tasks.caption.java.java", count_start)
    with Meteor() as meteor:
        worse = score_captions(dict.fromkeys(CANDIDATES, "a man"), REFERENCES, meteor=meteor)
        scores = score_captions(CANDIDATES, REFERENCES, meteor=meteor)
    assert started == [1] and 0 < worse.means["meteor"] < scores.means["meteor"]
    assert scores.means["meteor"] == pytest.approx(0.2581132614670123, abs=1e-6)
    ours = {video_id: its_scores["meteor"] for video_id, its_scores in scores.per_video.items()}
    assert ours == pytest.approx(METEOR, abs=1e-6)


# This program replaces METEOR's program, which takes eight seconds to start.
ANSWERS = """
num_videos = 0
for line in sys.stdin:
    num_videos = num_videos + 1 if line.startswith("SCORE") else num_videos
    print("statistics" if line.startswith("SCORE") else "\\n".join(["0.25"] * num_videos + ["0.5"]), flush=True)
    if line.startswith("EVAL"): num_videos = 0
"""


def test_meteor_is_asked_as_by_pycocoevalcap_and_starts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = tmp_path / "asked.txt"
    record = f"file = open({str(asked)!r}, 'a')\nprint(sys.argv[1:], file=file, flush=True)\n"
    answers = ANSWERS.replace("sys.stdin:\n", "sys.stdin:\n    print(line, end='', file=file, flush=True)\n")
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", record + answers)))
    with Meteor() as meteor:
        for _ in range(2):
            score_captions(CANDIDATES, REFERENCES, meteor=meteor)
    arguments, *lines = asked.read_text().splitlines()
    assert arguments.endswith("/meteor-1.5.jar', '-', '-', '-stdio', '-l', 'en', '-norm']")
    assert lines == 2 * [
        "SCORE ||| a man plays a guitar ||| someone is playing guitar ||| a man is playing the guitar",
        "SCORE ||| two dogs run on grass ||| dogs are running ||| ",
        "SCORE ||| a woman cooks ||| cooking a woman | | | x",
        "SCORE ||| 日本 word ||| x | | | y ||| 日本",
        "EVAL ||| statistics ||| statistics ||| statistics ||| statistics",
    ]


def test_the_evaluation_in_the_loop_has_meteor_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", ANSWERS)))
    names = list(CANDIDATES)
    part = GeneratedCaptions(captions=dict(enumerate(CANDIDATES.values())), summed_loss=2.0, num_tokens=4)
    metrics = metrics_of([part], references=lambda index: REFERENCES[names[index]], with_java=True)
    assert metrics["meteor"] == 0.5 and metrics["loss"] == 0.5
    assert "meteor" not in metrics_of([part], references=lambda index: REFERENCES[names[index]])


def test_the_command_computes_meteor_where_there_is_java(
    captioner_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{program(tmp_path / 'bin', ANSWERS)}{os.pathsep}{os.environ['PATH']}")
    result = score_run(CAPTIONS, captioner_run, CaptionFlags(split="train"))
    assert result["means"]["meteor"] == result["constant"]["means"]["meteor"] == 0.5
    assert "meteor" not in result["absent"]


def test_without_java_it_is_said_that_meteor_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    scores = score_captions(CANDIDATES, REFERENCES, spice_jars=jars(tmp_path / "jars"))
    assert scores.missing_reasons == dict.fromkeys(("meteor", "spice"), "no java program on the PATH")
    assert not {"meteor", "spice"} & (scores.means.keys() | scores.per_video["a"].keys())


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", "")))
    monkeypatch.setattr("clipmill.train.tasks.caption.java.find_spec", lambda name: None)
    assert "clipmill[caption-metrics]" in score_captions(CANDIDATES, REFERENCES).missing_reasons["meteor"]


def test_a_program_that_fails_makes_metrics_absent_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complaint = "sys.exit('Exception: no heap\\n\\tat Main.main')"
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", complaint)))
    scores = score_captions(CANDIDATES, REFERENCES, spice_jars=jars(tmp_path / "jars"))
    assert scores.missing_reasons == dict.fromkeys(("meteor", "spice"), "java ended with status 1: Exception: no heap")


def test_a_program_that_hangs_is_killed(tmp_path: Path) -> None:
    java = program(tmp_path / "bin", "time.sleep(600)") / "java"
    with (
        Dialogue([str(java)], folder=tmp_path, timeout_s=0.5) as dialogue,
        pytest.raises(MetricUnavailable, match="status -9"),
    ):
        dialogue.send("SCORE")
        dialogue.receive()


SPICE = """
asked, scored = sys.argv[-5], sys.argv[sys.argv.index("-out") + 1]
rows = json.load(open(asked))
answers = [{"image_id": row["image_id"], "scores": {"All": {"f": len(row["refs"]) / 10}}} for row in rows]
json.dump(answers[::-1], open(scored, "w"))
if any(not row["test"] for row in rows[2:]) or "-silent" not in sys.argv: sys.exit("not so")
"""


def test_spice_is_asked_with_the_jars_that_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", SPICE)))
    scores = score_captions(CANDIDATES, REFERENCES, spice_jars=jars(tmp_path / "with a space & more"))
    assert {video_id: row["spice"] for video_id, row in scores.per_video.items()} == {
        "a": 0.2,
        "b": 0.2,
        "c": 0.1,
        "d": 0.2,
    }
    assert scores.means["spice"] == pytest.approx(0.175)
    assert "spice" not in scores.missing_reasons


def test_a_folder_without_the_jars_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "stanford-corenlp-3.6.0.jar").touch()
    with pytest.raises(UserError, match=r"lacks stanford-corenlp-3\.6\.0-models\.jar"):
        score_captions(CANDIDATES, REFERENCES, spice_jars=tmp_path)


def test_no_file_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", SPICE)))
    score_captions(CANDIDATES, REFERENCES, spice_jars=jars(tmp_path / "jars"))
    assert list(scratch.iterdir()) == []

"""Tests of EgoVLP's files on Ego4D: pairs for training, clips of questions, and videos to omit."""

import json
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.ego4d import read_ego4d
from clipmill.manifests.adapters.egomcq import Question, read_questions
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker
from tests.manifests.test_ego4d import narrations, reasons, save

_HEADER = "video_uid\tvideo_dur\tnarration_source\tnarration_ind\tnarration_time\tclip_start\tclip_end\tclip_text\t"


def egoclip(path: Path, *rows: tuple[str, object, object, str]) -> Path:
    lines = [f"\t{_HEADER}tag_verb\ttag_noun"]
    for number, (video, begin, end, text) in enumerate(rows):
        cells = (number, video, 128.03, "narration_pass_1", 0, 3.3, begin, end, text, "[93]", "[192, 12]")
        lines.append("\t".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n")
    return path


def question(text: str, answer: int, *choices: tuple[str, float, float]) -> dict[str, Any]:
    def clip(video: str, begin: float, end: float) -> dict[str, Any]:
        words = f"#C C is at {begin:g} of {video}"
        return {"video_uid": video, "clip_start": begin, "clip_end": end, "clip_text": words, "tag_verb": "[1]"}

    return {
        "answer": answer,
        "query": {**clip(*choices[answer]), "clip_text": text},
        "choices": {str(number): clip(*choice) for number, choice in enumerate(choices)},
        "types": 1,
    }


def test_pairs_are_training_captions_with_their_own_intervals(make_videos: VideoMaker, tmp_path: Path) -> None:
    path = egoclip(
        tmp_path / "egoclip.csv",
        ("a", -0.4, 0.8, "#C C picks a bag"),
        ("a", 2.967651, 3.721266, '"#C C says ""yes"""'),
        ("b", 5, 4, "#C C turns back time"),
        ("b", "", 4, "#C C begins at no time"),
        ("gone", 1, 2, "#C C is not there"),
    )
    reading = read_ego4d(make_videos("a.mp4", "b.mp4"), annotations=[path])
    rows = [(row["video_id"], row["begin_s"], row["end_s"], row["text"]) for row in reading.captions.to_pylist()]
    assert rows == [("a", 0.0, 0.8, "#C C picks a bag"), ("a", 2.967651, 3.721266, '#C C says "yes"')]
    assert set(reading.captions["source"].to_pylist()) == {"egoclip"}
    assert set(reading.videos["split"].to_pylist()) == {"train"}
    assert reasons(reading) == {"bad_time": 2, "missing_file": 1}


def test_clips_of_questions_are_captions_of_val_once_for_each_span(make_videos: VideoMaker, tmp_path: Path) -> None:
    path = tmp_path / "egomcq.json"
    questions = {
        "0": question("what?", 1, ("a", 0, 1), ("b", 0, 1)),
        "1": question("which?", 0, ("a", 0, 1), ("a", 2, 3)),
        "2": {"query": {"clip_text": "lost"}, "choices": {"0": {"video_uid": "a"}}, "answer": 0},
        "3": {**question("none", 0, ("a", 0, 1)), "answer": 7},
    }
    path.write_text(json.dumps(questions))
    read = list(read_questions(path))
    good = [entry for entry in read if isinstance(entry, Question)]
    assert [(entry.text, entry.answer, entry.is_intra) for entry in good] == [("what?", 1, False), ("which?", 0, True)]
    reading = read_ego4d(make_videos("a.mp4", "b.mp4"), annotations=[path])
    rows = [(row["video_id"], row["begin_s"], row["end_s"]) for row in reading.captions.to_pylist()]
    assert rows == [("a", 0.0, 1.0), ("b", 0.0, 1.0), ("a", 2.0, 3.0)]
    assert set(reading.captions["source"].to_pylist()) == {"egomcq"}
    assert set(reading.videos["split"].to_pylist()) == {"val"}
    assert reasons(reading) == {"malformed_row": 2}


def test_videos_of_a_list_are_left_out_and_counted(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos = {name: {"narration_pass_1": narrations(1.0, 3.0)} for name in ("a", "b")}
    listed = tmp_path / "held_out.txt"
    listed.write_text("b\n\nother\n")
    annotations = [save(tmp_path / "narration.json", videos), listed]
    reading = read_ego4d(make_videos("a.mp4", "b.mp4"), annotations=annotations)
    assert reading.videos["video_id"].to_pylist() == ["a"]
    assert (reasons(reading), reading.num_captions_lost) == ({"left_out": 1}, 2)
    assert "2 videos to omit, listed in held_out.txt" in reading.notes
    listed.write_text("\n")
    with pytest.raises(UserError, match="does not list any videos to omit"):
        read_ego4d(make_videos("a.mp4", folder="again"), annotations=annotations)

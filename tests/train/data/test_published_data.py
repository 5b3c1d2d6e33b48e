"""Published annotations all the way: `prep manifest` reads them, `prep chunk` cuts real videos, training opens them."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.synthetic.frame_numbers import FrameNumberVideo
from tests.prep.running import chunk, prep_here
from tests.train.test_video_captions import numbers, open_set

FPS = 10


def write_video(path: Path, *, seconds: int, first_number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FrameNumberVideo(num_frames=seconds * FPS, fps=Fraction(FPS), width=64, height=64, first_number=first_number).write(
        path
    )


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MSR-VTT's split 1k-A in test and train, DiDeMo in val and ActivityNet Captions in train."""
    folder = tmp_path_factory.mktemp("published")
    data, videos = folder / "data", folder / "videos"
    for number in range(4):
        write_video(videos / "msrvtt" / f"video{number}.mp4", seconds=3, first_number=100 * number)
    write_video(videos / "didemo" / "12@N01_1_a.3gp", seconds=8, first_number=500)
    write_video(videos / "didemo" / "12@N01_1_b.mts.mts", seconds=6, first_number=600)
    write_video(videos / "activitynet" / "v_c.mp4", seconds=5, first_number=700)

    info = {
        "videos": [{"video_id": f"video{n}", "category": n, "split": "test"} for n in range(4)],
        "sentences": [{"video_id": f"video{n}", "caption": f"{n}, {k} of 20"} for n in range(4) for k in range(20)],
    }
    pairs, listed = folder / "MSRVTT_JSFUSION_test.csv", folder / "MSRVTT_train.9k.csv"
    pairs.write_text("key,vid_key,video_id,sentence\nret0,msr3,video3,the third\nret1,msr1,video1,the first\n")
    listed.write_text("video_id\nvideo0\nvideo2\n")
    moments = [
        {"video": "12@N01_1_a.3gp", "description": "the end", "times": [[1, 1], [0, 0], [1, 1]], "num_segments": 6},
        {"video": "12@N01_1_b.mts", "description": "the whole", "times": [[0, 1]], "num_segments": 6},
    ]
    sentences = {"v_c": {"duration": 5.0, "timestamps": [[2, 5.2], [0, 2]], "sentences": ["Then.", "Before."]}}
    for kind, files in {
        "msrvtt": [write_json(folder / "MSRVTT_data.json", info), listed, pairs],
        "didemo": [write_json(folder / "val_data.json", moments)],
        "activitynet": [write_json(folder / "train.json", sentences)],
    }.items():
        ran = prep_here(
            "manifest", kind, videos / kind, "--annotations", *files, "--data", data, "--dataset", kind, "--json"
        )
        assert json.loads(ran.stdout)["num_rejected"] == {}
    chunk(data, "--len", "2s", "--fps", FPS, "--short-side", 64)
    return data


def test_the_test_split_of_1ka_has_a_clip_and_a_text_for_each_pair(data_dir: Path) -> None:
    samples = open_set(data_dir, "test")
    assert len(samples) == samples.num_captions == 2
    assert {samples.text(row): numbers(samples, row)[0] // 100 for row in range(2)} == {"the first": 1, "the third": 3}


def test_training_videos_of_1ka_have_all_their_captions(data_dir: Path) -> None:
    samples = open_set(data_dir)
    # 2 of MSR-VTT and 2 sentences of ActivityNet Captions.
    assert (len(samples), samples.num_captions) == (4, 42)


def test_moments_show_their_own_frames(data_dir: Path) -> None:
    samples = open_set(data_dir, "val")
    shown = {samples.text(row): numbers(samples, row) for row in range(len(samples))}
    assert shown.keys() == {"the end", "the whole"}
    assert min(shown["the end"]) >= 550 and max(shown["the end"]) < 580
    assert 600 <= min(shown["the whole"]) < 620 and 640 <= max(shown["the whole"]) < 660


def test_sentences_show_their_own_frames(data_dir: Path) -> None:
    samples = open_set(data_dir)
    shown = {samples.text(row): numbers(samples, row) for row in range(len(samples))}
    assert max(shown["Before."]) < 720 <= min(shown["Then."]) and max(shown["Then."]) < 750

"""Tests of EPIC-KITCHENS-100 on rows in their published form: times, classes, splits, and repeated lists."""

from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.manifests.adapters.timed_captions import read_epic_kitchens, seconds_of_timestamp
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker
from tests.manifests.test_labelled_adapters import reasons, rows

EPIC_HEADER = (
    "narration_id,participant_id,video_id,narration_timestamp,start_timestamp,stop_timestamp,start_frame,stop_frame,"
    "narration,verb,verb_class,noun,noun_class,all_nouns,all_noun_classes"
)
EPIC_ROW = "P01_01_{number},P01,P01_01,0,00:00:01,00:00:03,1,2,{text},put,{verb},cup,13,['cup'],[13]\n"


def test_epic_kitchens_takes_times_and_classes(make_videos: VideoMaker, tmp_path: Path) -> None:
    train, validation = tmp_path / "EPIC_100_train.csv", tmp_path / "EPIC_100_validation.csv"
    train.write_text(
        f"{EPIC_HEADER}\n"
        "P01_01_0,P01,P01_01,00:00:01.089,00:00:00.14,00:00:03.37,8,202,open door,open,3,door,3,['door'],[3]\n"
        "P01_01_1,P01,P01_01,00:00:02,01:02:03.50,01:02:04,1,2,put cups,put,1,cup,13,\"['cup', 'lid']\",\"[13, 25]\"\n"
        "P01_01_2,P01,P01_01,00:00:02,00:00:04,00:00:03,1,2,backwards,put,1,cup,13,['cup'],[13]\n"
        "P01_01_3,P01,P01_01,00:00:02,4.5,00:00:03,1,2,no time,put,1,cup,13,['cup'],[13]\n"
        "P01_01_4,P01,P01_01,00:00:02,00:00:01,00:00:03,1,2,no class,put,?,cup,13,['cup'],[13]\n"
        "P01_01_5,P01,P01_01,00:00:02,00:00:01,00:00:03,1,2,no list,put,1,cup,13,['cup'],13\n"
        "P09_99_0,P09,P09_99,00:00:02,00:00:01,00:00:03,1,2,gone,put,1,cup,13,['cup'],[13]\n"
    )
    validation.write_text(
        f"{EPIC_HEADER}\nP02_12_0,P02,P02_12,0,00:00:01,00:00:03,1,2,wash pan,wash,2,pan,5,['pan'],[5]\n"
    )
    reading = read_epic_kitchens(
        make_videos("P01/videos/P01_01.MP4", "P02/videos/P02_12.MP4"), annotations=[train, validation]
    )
    assert rows(reading) == [
        ("P01_01", 0.14, 3.37, "open door", "narrator", 3, 3, [3]),
        ("P01_01", 3723.5, 3724.0, "put cups", "narrator", 1, 13, [13, 25]),
        ("P02_12", 1.0, 3.0, "wash pan", "narrator", 2, 5, [5]),
    ]
    assert reading.captions.schema.field("label_nouns").type == pa.list_(pa.int32())
    assert reading.videos["split"].to_pylist() == ["train", "val"]
    assert reasons(reading) == {"bad_time": 2, "bad_label": 2, "missing_file": 1}


def test_epic_kitchens_without_a_column_says_which(make_videos: VideoMaker, tmp_path: Path) -> None:
    path = tmp_path / "EPIC_100_test_timestamps.csv"
    path.write_text("narration_id,video_id,start_timestamp,stop_timestamp\n")
    with pytest.raises(UserError, match="no column narration, verb_class, noun_class"):
        read_epic_kitchens(make_videos("P01_01.MP4"), annotations=[path])


def epic_list(path: Path, *rows: tuple[int, str, str]) -> Path:
    """Write a list with (number, narration, verb class) of some narrations of P01_01."""
    lines = (EPIC_ROW.format(number=number, text=text, verb=verb) for number, text, verb in rows)
    path.write_text(f"{EPIC_HEADER}\n{''.join(lines)}")
    return path


def test_a_narration_that_two_lists_of_epic_kitchens_have_is_one_caption(
    make_videos: VideoMaker, tmp_path: Path
) -> None:
    videos = make_videos("P01_01.MP4")
    train = epic_list(tmp_path / "EPIC_100_train.csv", (0, "open", "3"), (1, "close", "4"), (2, "", "5"))
    retrieval = epic_list(tmp_path / "EPIC_100_retrieval_train.csv", (1, "close", "4"), (0, "shut", "3"))
    reading = read_epic_kitchens(videos, annotations=[train, train])
    assert [row[3] for row in rows(reading)] == ["open", "close"]
    assert reading.notes == ("3 repeated narrations were read only once",)
    assert reasons(reading) == {"empty_caption": 1}
    reading = read_epic_kitchens(videos, annotations=[train, retrieval])
    assert [row[3] for row in rows(reading)] == ["open", "close"]
    assert reading.notes == ("1 repeated narration was read only once",)
    assert reasons(reading) == {"empty_caption": 1, "duplicate_id": 1}
    assert reading.rejected["detail"].to_pylist()[-1] == (
        "narration_id 'P01_01_0' has a different narration in an earlier row of EPIC_100_train.csv"
    )
    # The retrieval list repeats rows of a different split. The split of the video takes precedence, and both rows are
    # reported.
    test = epic_list(tmp_path / "EPIC_100_retrieval_test.csv", (0, "open", "3"), (1, "close", "4"))
    assert reasons(read_epic_kitchens(videos, annotations=[train, test])) == {"empty_caption": 1, "bad_split": 2}


def test_class_numbers_of_epic_kitchens_are_whole_numbers_from_0(make_videos: VideoMaker, tmp_path: Path) -> None:
    classes = ("3.0", " 4 ", "-1", "3.5", "")
    path = epic_list(tmp_path / "train.csv", *((number, "put", name) for number, name in enumerate(classes)))
    reading = read_epic_kitchens(make_videos("P01_01.MP4"), annotations=[path])
    assert [row[5] for row in rows(reading)] == [3, 4]
    assert reading.rejected["detail"][0].as_py() == "verb_class is '-1', expected an integer of 0 or more"


@pytest.mark.parametrize(
    ("name", "header", "message", "hint"),
    [
        ("EPIC_100.csv", EPIC_HEADER, "does not contain the split", "as in EPIC_100_train.csv"),
        ("EPIC_train.csv", EPIC_HEADER.replace("narration_id", "uid"), "EPIC-KITCHENS-55", "EPIC_100_train.csv"),
        ("EPIC_100_train.pkl", EPIC_HEADER, "is a pickle", "EPIC_100_train.csv"),
        ("EPIC_100_train.csv", EPIC_HEADER.replace(",", ";"), "no column video_id", "separated by semicolons"),
    ],
)
def test_files_that_are_no_list_of_epic_kitchens_100_are_refused(
    make_videos: VideoMaker, tmp_path: Path, name: str, header: str, message: str, hint: str
) -> None:
    path = tmp_path / name
    path.write_text(f"{header}\n{EPIC_ROW.format(number=0, text='put', verb=1)}")
    with pytest.raises(UserError, match=message) as caught:
        read_epic_kitchens(make_videos("P01_01.MP4"), annotations=[path])
    assert hint in str(caught.value.hint)


def test_a_video_whose_name_differs_in_case_only_is_named(make_videos: VideoMaker, tmp_path: Path) -> None:
    path = epic_list(tmp_path / "train.csv", (0, "put", "1"))
    reading = read_epic_kitchens(make_videos("P01_02.MP4"), annotations=[path])
    assert reading.rejected["detail"][0].as_py() == "no matching video file; captions lost: 1"
    reading = read_epic_kitchens(make_videos("p01_01.mp4"), annotations=[path])
    assert reading.rejected["detail"][0].as_py().startswith("no matching video file (similar name: p01_01.mp4);")


@pytest.mark.parametrize(
    ("text", "expected"), [("00:00:00.00", 0.0), ("01:01:01.25", 3661.25), ("100:00:00", 360_000.0)]
)
def test_timestamps_are_read_to_the_digit(text: str, expected: float) -> None:
    assert seconds_of_timestamp(text) == expected


@pytest.mark.parametrize("text", ["", "1.5", "00:61:00", "00:00:60", "-00:00:01", "00:00:nan"])
def test_other_forms_of_time_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HH:MM:SS"):
        seconds_of_timestamp(text)

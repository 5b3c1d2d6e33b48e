"""Tests of VATEX, Something-Something v2 and Kinetics, on rows in their published forms."""

import json
from math import inf
from pathlib import Path

import pytest

from clipmill.manifests.adapters.annotations import split_in_file_name
from clipmill.manifests.adapters.clips import read_kinetics, read_something_something, read_vatex
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.adapters.timed_captions import read_epic_kitchens
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker


def rows(reading: Reading) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in reading.captions.to_pylist()]


def reasons(reading: Reading) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in reading.rejected["reason"].value_counts().to_pylist()}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("vatex_training_v1.0.json", "train"),
        ("vatex_validation_v1.0.json", "val"),
        ("vatex_public_test_english_v1.1.json", "test"),
        ("EPIC_100_validation.csv", "val"),
        ("ego4d_train.narrator.pkl", "train"),
        ("k400-val.txt", "val"),
        ("contest.json", "train"),
        ("captions.json", "train"),
    ],
)
def test_the_split_is_a_word_in_the_name_of_the_file(name: str, split: str) -> None:
    assert split_in_file_name(name) == split


def test_vatex_captions_hold_for_the_whole_clip(make_videos: VideoMaker, tmp_path: Path) -> None:
    first, second = "-_x8eH0EAvk_000019_000029", "__NrybzYzUg_000415_000425"
    texts = [f"caption {n}" for n in range(10)]
    path = tmp_path / "vatex_validation_v1.0.json"
    path.write_text(
        json.dumps(
            [
                {"videoID": first, "enCap": texts, "chCap": ["一"]},
                {"videoID": second, "enCap": [*texts[:9], ""]},
                {"videoID": "gone_000001_000011", "enCap": texts},
                {"enCap": texts},
                {"videoID": first, "enCap": "no list"},
                "no object",
            ]
        )
    )
    reading = read_vatex(make_videos(f"{first}.mp4", f"sub/{second}.webm"), annotations=[path])
    assert rows(reading)[0] == (first, 0.0, inf, "caption 0", "human-en")
    assert reading.captions.num_rows == 19
    assert reading.videos["split"].to_pylist() == ["val", "val"]
    assert reasons(reading) == {"empty_caption": 1, "missing_file": 1, "empty_id": 1, "malformed_row": 2}
    assert reading.num_captions_lost == 10


def test_kinetics_finds_trimmed_and_untrimmed_videos(make_videos: VideoMaker, tmp_path: Path) -> None:
    path = tmp_path / "kinetics.csv"
    path.write_text(
        "label,youtube_id,time_start,time_end,split\n"
        "riding a bike,---QUuC4vJs,84,94,validate\n"
        '"abseiling, fast",-3B32lodo2M,59,69,train\n'
        "zumba,gone,1,2,train\n"
        "zumba,-3B32lodo2M,59,69,holdout\n"
        "zumba,-3B32lodo2M,x,69,train\n"
        "zumba,,1,2,train\n"
    )
    folder = make_videos("val/---QUuC4vJs_000084_000094.mp4", "-3B32lodo2M.mkv")
    reading = read_kinetics([path], videos=folder)
    assert rows(reading) == [
        ("---QUuC4vJs_000084_000094", 0.0, inf, "riding a bike", "class", "riding a bike"),
        ("-3B32lodo2M", 59.0, 69.0, "abseiling, fast", "class", "abseiling, fast"),
    ]
    assert reading.videos["split"].to_pylist() == ["val", "train"]
    assert reasons(reading) == {"missing_file": 1, "bad_split": 1, "bad_time": 1, "empty_id": 1}


def test_plain_lists_name_paths_beside_the_list(make_videos: VideoMaker) -> None:
    folder = make_videos("a b/x.mp4", "y.mp4", "z.mp4")
    (folder / "train.txt").write_text("a b/x.mp4 12\ny.mp4,surfing water\n\nalone\ngone.mp4 3\n")
    (folder / "val.txt").write_text("z.mp4 12\ny.mp4 12\n")
    reading = read_kinetics([folder / "train.txt", folder / "val.txt"])
    assert [(row[0], row[3], row[5]) for row in rows(reading)] == [
        (reading.videos["video_id"][0].as_py(), "12", "12"),
        (reading.videos["video_id"][1].as_py(), "surfing water", "surfing water"),
        (reading.videos["video_id"][2].as_py(), "12", "12"),
    ]
    assert reading.videos["split"].to_pylist() == ["train", "train", "val"]
    assert reasons(reading) == {"malformed_row": 1, "missing_file": 1, "bad_split": 1}


def test_paths_of_plain_lists_may_have_spaces_and_commas_and_be_absolute(make_videos: VideoMaker) -> None:
    videos = make_videos("sub dir/a, b c.mp4", "my clip.mp4", "plain.mp4", "tab.mp4", "x.mp4")
    path = videos / "train list.txt"
    path.write_text(
        "sub dir/a, b c.mp4 7\n"
        "my clip.mp4,riding a bike\n"
        '"sub dir/a, b c.mp4",8\n'
        "tab.mp4\t9\n"
        f"{videos / 'plain.mp4'} 10\n"
        "x.mp4,mixing, stirring\n"
        "gone.mp4 11\n"
    )
    reading = read_kinetics([path], videos=videos)
    names = dict(zip(reading.videos["video_id"].to_pylist(), reading.videos["source_id"].to_pylist(), strict=True))
    assert [(names[row[0]], row[3]) for row in rows(reading)] == [
        ("sub dir/a, b c.mp4", "7"),
        ("my clip.mp4", "riding a bike"),
        ("sub dir/a, b c.mp4", "8"),
        ("tab.mp4", "9"),
        (str(videos / "plain.mp4"), "10"),
        ("x.mp4", "mixing, stirring"),
    ]
    assert reasons(reading) == {"missing_file": 1}


def test_lists_of_avion_and_videomae_v2_are_read(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos = make_videos("k/a b.mp4", "k/c.mp4", "k/d.mp4", "e 7.mp4")
    avion, pretrain = tmp_path / "kinetics_train.txt", tmp_path / "pretrain_train.csv"
    avion.write_text('k/a b.mp4 300 5\nk/c.mp4 250 398\n"k/a b.mp4" 300 6\nk/c.mp4,250,7\ne 7.mp4 12\ngone.mp4 300 5\n')
    reading = read_kinetics([avion], videos=videos)
    assert [(row[3], row[5]) for row in rows(reading)] == [(n, n) for n in ("5", "398", "6", "7", "12")]
    assert reading.videos["source_id"].to_pylist() == ["k/a b.mp4", "k/c.mp4", "e 7.mp4"]
    assert reading.rejected["source_id"].to_pylist() == ["gone.mp4"]
    pretrain.write_text("k/a b.mp4 0 -1\nk/c.mp4 0 -1\nk/d.mp4 0 -1\n")
    reading = read_kinetics([pretrain], videos=videos)
    assert (reading.videos.num_rows, reading.captions.num_rows, reading.rejected.num_rows) == (3, 0, 0)
    # Such a list is meant for videos without labels.
    assert reading.num_rows_used == {str(pretrain): 3}


def test_placeholders_of_published_lists_are_not_part_of_a_path(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos, path = make_videos("k400/a.mp4", "b.mp4", "your_path/c.mp4", "74225.webm"), tmp_path / "val.csv"
    path.write_text(
        "your_path/k400/a.mp4 325\nyour_path/k400/b.mp4 233\nyour_path/c.mp4 7\ndataset_root/b.mp4 300 8\n"
        "your_path/SomethingV2/frames/74225 62 140\nyour_path/k400/gone.mp4 9\nold/a.mp4 1\nyour_path/ 5\n"
    )
    reading = read_kinetics([path], videos=videos)
    names = dict(zip(reading.videos["video_id"].to_pylist(), reading.videos["source_id"].to_pylist(), strict=True))
    assert [(names[row[0]], row[3]) for row in rows(reading)] == [
        ("k400/a.mp4", "325"),
        ("b.mp4", "233"),
        ("your_path/c.mp4", "7"),
        ("b.mp4", "8"),
        ("74225", "140"),
    ]
    # Only the placeholder allows folders other than the folders in the list.
    assert reading.rejected["source_id"].to_pylist()[-2:] == ["k400/gone.mp4", "old/a.mp4"]
    assert reasons(reading) == {"missing_file": 2, "empty_id": 1}


def test_folders_of_frames_in_a_pretraining_list_are_no_classes(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos, path = make_videos("k400/a.mp4", "zlVkeKC6Ha8.mp4"), tmp_path / "pretrain_train.csv"
    path.write_text("your_path/AVA/frames/clip/zlVkeKC6Ha8 9601 300\nyour_path/k400/a.mp4 0 -1\n")
    reading = read_kinetics([path], videos=videos)
    assert (reading.videos["source_id"].to_pylist(), reading.captions.num_rows) == (["k400/a.mp4"], 0)
    assert reasons(reading) == {"malformed_row": 1}
    assert "9601 300" in reading.rejected["detail"][0].as_py()


def something_entry(source_id: str, template: str, *placeholders: str) -> dict[str, object]:
    label = template
    for placeholder in placeholders:
        label = f"{label[: label.index('[')]}{placeholder}{label[label.index(']') + 1 :]}"
    return {"id": source_id, "label": label.lower(), "template": template, "placeholders": list(placeholders)}


def test_something_something_has_captions_and_classes(make_videos: VideoMaker, tmp_path: Path) -> None:
    train, validation = tmp_path / "something-something-v2-train.json", tmp_path / "validation.json"
    test, answers, classes = tmp_path / "test.json", tmp_path / "test-answers.csv", tmp_path / "labels.json"
    train.write_text(
        json.dumps(
            [
                something_entry(
                    "1", "Putting [something] onto [something else that cannot support it]", "Box", "paper"
                ),
                something_entry("2", "Poking [something] so that it falls over", "a cup"),
                something_entry("99", "Poking [something] so that it falls over", "a cup"),
            ]
        )
    )
    validation.write_text(json.dumps([something_entry("3", "Turning the camera left while filming [something]", "a")]))
    test.write_text('[{"id": "4"}, {"id": "5"}]')
    answers.write_text("4;Poking something so that it falls over\n\n98;Poking something so that it falls over\n")
    names = [
        "Poking something so that it falls over",
        "Putting something onto something else that cannot support it",
        "Turning the camera left while filming something",
    ]
    classes.write_text(json.dumps({name: str(number) for number, name in enumerate(names)}))
    videos = make_videos(*(f"20bn-something-something-v2/{n}.webm" for n in range(1, 6)))
    for more in ([], [classes]):
        reading = read_something_something(videos, annotations=[train, validation, test, answers, *more])
        assert rows(reading) == [
            ("1", 0.0, inf, "putting box onto paper", "human", names[1]),
            ("2", 0.0, inf, "poking a cup so that it falls over", "human", names[0]),
            ("3", 0.0, inf, "turning the camera left while filming a", "human", names[2]),
            ("4", 0.0, inf, names[0], "class", names[0]),
        ]
        assert reading.videos["split"].to_pylist() == ["train", "train", "val", "test", "test"]
        assert reasons(reading) == {"missing_file": 2}
        assert list(reading.num_rows_used.values()) == [2, 1, 2, 1]


def test_damaged_entries_of_something_something_are_rejected_rows(make_videos: VideoMaker, tmp_path: Path) -> None:
    train, classes = tmp_path / "train.json", tmp_path / "something-something-v2-labels.json"
    good = something_entry("1", "Poking [something]", "a cup")
    entries = [
        *(good, None, "1", {**good, "id": 1}, {key: value for key, value in good.items() if key != "id"}),
        *({**good, "template": None}, {**good, "template": "[]"}, {**good, "template": "\ud800"}),
        *({**good, "label": ""}, {"id": "1", "template": "Poking [something]"}, {"id": "1", "label": "poking"}),
        {**good, "template": "Folding [something]"},
    ]
    train.write_text(json.dumps(entries))
    reading = read_something_something(make_videos("1.webm"), annotations=[train])
    assert [row[5] for row in rows(reading)] == ["Poking something", "Folding something"]
    assert reasons(reading) == {"malformed_row": 3, "empty_id": 2, "bad_label": 4, "empty_caption": 1}
    classes.write_text('{"Poking something": "0"}')
    reading = read_something_something(make_videos("1.webm"), annotations=[classes, train])
    assert [row[5] for row in rows(reading)] == ["Poking something"]
    assert reasons(reading)["bad_label"] == 5
    classes.write_text('["Poking something"]')
    with pytest.raises(UserError, match=r"labels\.json, line 1: expected an object"):
        read_something_something(make_videos("1.webm"), annotations=[classes, train])


def test_a_list_of_folders_of_frames_is_refused_by_name(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos, path = make_videos("a.mp4", "b.mp4"), tmp_path / "train.csv"
    path.write_text("a 1 300\nb 0 250\na.mp4 300 -2\nb.mp4 3\n")
    reading = read_kinetics([path], videos=videos)
    assert [row[3] for row in rows(reading)] == ["3"]
    assert reasons(reading) == {"malformed_row": 3}
    assert "a folder of extracted frames" in reading.rejected["detail"][0].as_py()


def test_times_that_no_float_holds_are_rejected(make_videos: VideoMaker, tmp_path: Path) -> None:
    kinetics, epic = tmp_path / "kinetics.csv", tmp_path / "EPIC_100_train.csv"
    videos = make_videos("a.mp4")
    kinetics.write_text(
        "label,youtube_id,time_start,time_end\n"
        f"zumba,a,inf,5\nzumba,a,nan,5\nzumba,a,1,1e400x\nzumba,a,{'9' * 5000},5\nzumba,a,1,5\n"
    )
    reading = read_kinetics([kinetics], videos=videos)
    assert (reading.captions.num_rows, reasons(reading)) == (1, {"bad_time": 4})
    epic.write_text(
        "video_id,start_timestamp,stop_timestamp,narration,verb_class,noun_class\n"
        f"a,{'9' * 400}:00:00,00:00:01,x,1,1\na,00:00:00,00:00:01,x,1,1\n"
    )
    reading = read_epic_kitchens(videos, annotations=[epic])
    assert (reading.captions.num_rows, reasons(reading)) == (1, {"bad_time": 1})

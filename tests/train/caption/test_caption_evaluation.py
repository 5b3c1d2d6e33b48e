"""`train eval caption` from the command line, with a briefly trained captioner."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.commands.evaluation import score_run
from clipmill.train.config.clips import OpenOptions
from clipmill.train.tasks.caption.metrics import score_captions
from clipmill.train.tasks.caption.spec import CAPTIONS, CaptionFlags
from clipmill.train.tasks.caption.task import GeneratedCaptions, metrics_of
from tests.train.caption.conftest import DECODER, SMALL
from tests.train.conftest import VIDEOS
from tests.train.running import steps, train
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

BAD = ["<script>alert(1)</script> & <b>bold</b>", "two\x1b[31m\nlines\x00", "两只猫在睡觉 🐈", "...", "a cat " * 40]


@pytest.fixture(scope="module")
def result(captioner_run: Path) -> dict[str, Any]:
    return score_run(CAPTIONS, captioner_run, CaptionFlags(split="val"))


@pytest.fixture(scope="module")
def odd_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with a clip whose captions are malformed, a video without captions, and a split without captions."""
    data_dir = tmp_path_factory.mktemp("odd")
    splits = {"e": "val", "f": "val", "g": "test"}
    for shard_id, (video_id, split) in enumerate(splits.items()):
        write_shard(data_dir, shard_id, chunks_of(video_id, 20), split=split)
    write_captions(data_dir, splits, [Caption("e", 0.0, 2.0, text) for text in BAD])
    return data_dir


def page(run: Path) -> str:
    return (run / "index.html").read_text(encoding="utf-8")


def test_scores_are_those_of_the_captions_and_all_references(captioner_run: Path, result: dict[str, Any]) -> None:
    rows = json.loads((captioner_run / "evaluations/captions-val.coco.json").read_bytes())
    captions = {row["image_id"]: row["caption"] for row in rows}
    references = {
        "d 0.00-1.00 s": ["it begins"],
        "d 1.20-2.80 s": ["the middle of d"],
        "d 3.00-5.50 s": ["the end of d"],
    }
    scores = score_captions(captions, references, with_java=False)
    assert {name: result["means"][name] for name in scores.means} == scores.means
    assert (result["num_samples"], result["num_references"]) == (3, 3)
    assert result["ids_hash"] == scores.ids_hash and scores.idf in result["protocol"]
    assert 0 < result["loss"] < 10
    assert result["absent"]["spice"] == "--spice-jars is not set"
    assert result["absent"]["meteor"] == "left out of this test"


def test_a_page_of_its_own_has_every_clip_with_pictures_and_all_references(
    captioner_run: Path, result: dict[str, Any]
) -> None:
    text = (captioner_run / "evaluations/captions-val.html").read_text(encoding="utf-8")
    assert text.count("<article ") == text.count('<img src="data:image/jpeg') == 3
    assert text.count('<video src="data:video/mp4') == 3 and "CIDEr-D can be played" in text
    assert all(f">{words}</li>" in text for words in ("it begins", "the middle of d", "the end of d"))
    assert all(f"<b>{100 * value:.1f}</b>" in text for value in result["means"].values())
    assert '<a href="evaluations/captions-val.html">' in page(captioner_run)


def test_beside_them_stands_one_caption_of_the_training_split_for_all(result: dict[str, Any]) -> None:
    constant = result["constant"]
    assert constant["caption"] in {"it begins", *(f"the {part} of {v}" for part in ("middle", "end") for v in "abc")}
    assert "from the captions of 9 clips, spread evenly over split 'train'" in constant["chosen"]
    assert constant["means"].keys() == result["means"].keys()


def test_the_page_has_the_table_and_what_the_model_says(captioner_run: Path, result: dict[str, Any]) -> None:
    text = page(captioner_run)
    assert "<h2>Generated captions</h2>" in text and "constant caption" in text and "CIDEr-D" in text
    assert text.count("data:image/jpeg") >= 3 and "the middle of d" in text
    assert all(len(clip["frames"]) == 2 for clip in result["said"])
    assert all(clip["video"].startswith("data:video/mp4;base64,") for clip in result["said"])


def test_captions_as_nobody_wants_them_are_escaped_and_counted(
    captioner_run: Path, odd_data: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    own_files = {path: path.read_bytes() for path in (captioner_run / "evaluations").glob("captions-val.*")}
    assert train("eval", "caption", captioner_run, "--shards", odd_data, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["num_samples"], results["num_references"]) == (1, len(BAD))
    assert "; 1 video of the split has no captions" in results["data"]
    assert "cut to 12 tokens" in results["data"]
    assert "because split 'train' cannot be read" in results["constant"]["chosen"]
    assert "said" not in results
    text = page(captioner_run)
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text and "两只猫在睡觉 🐈" in text
    # An evaluation on other data keeps the captions of the run's own data.
    assert len(own_files) == 3 and all(path.read_bytes() == content for path, content in own_files.items())
    assert f'<a href="{result["all_said"]}">' in text and f'<a href="{results["all_said"]}">' in text
    others = sorted((captioner_run / "evaluations").glob("captions-val-odd*"))
    assert [path.name.partition(".")[2] for path in others] == ["coco.json", "html", "json"]
    text += (captioner_run / results["all_said"]).read_text(encoding="utf-8")
    assert f"<dd>{odd_data}</dd>" in text
    assert "<script>alert" not in text and "\x00" not in text and "\x1b" not in text


def test_references_without_words_are_left_out_and_named(
    captioner_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "wordless"
    splits = {"e": "val", "f": "val", "g": "test"}
    for shard_id, (video_id, split) in enumerate(splits.items()):
        write_shard(data_dir, shard_id, chunks_of(video_id, 20), split=split)
    texts = {"e": "it begins", "f": "...", "g": ". . ."}
    write_captions(data_dir, splits, [Caption(video_id, 0.0, 2.0, text) for video_id, text in texts.items()])
    run = tmp_path / "run"
    shutil.copytree(captioner_run, run)
    assert train("eval", "caption", run, "--shards", data_dir, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["num_samples"] == 1 and results["without_words"] == ["f"]
    assert "; omitted because the references have no words: 1 clip (f)" in results["data"]
    # A captioner that writes empty captions scores 0.
    captions = GeneratedCaptions(captions={0: "", 1: ""}, summed_loss=1.0, num_tokens=2)
    numbers = metrics_of([captions], references=lambda number: ["it begins", ""] if number else ["..."])
    counted = ("num_empty", "num_without_words")
    assert [numbers.pop(name) for name in counted] == [1, 1] and numbers.pop("loss") == 0.5
    assert numbers == pytest.approx(dict.fromkeys(numbers, 0.0), abs=1e-6)
    with pytest.raises(UserError, match=r"no reference contains words \(1 clip\)"):
        score_run(CAPTIONS, run, CaptionFlags(split="test"), OpenOptions(shards=str(data_dir)))


def test_a_captioner_that_says_nothing_at_all_ends_its_evaluation(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, out = shutil.copytree(data_dir, tmp_path / "data"), tmp_path / "run"
    captions = [Caption(video_id, 0.0, 1.0, "it begins" if video_id == "d" else "...") for video_id in VIDEOS]
    captions += [Caption(video_id, 1.0, 2.0, "...") for video_id in "abc"]
    write_captions(silent, VIDEOS, captions)
    flags = (*SMALL.split(), *DECODER.split(), "--steps", 12, "--evaluate.every", 12)
    assert train("caption", "--shards", silent, "--out", out, *flags) == 0
    assert steps(out)[-1]["val/num_empty"] == 1
    capsys.readouterr()
    assert train("eval", "caption", out) == 1
    assert "all generated captions are empty (1), so there is nothing to score" in capsys.readouterr().err
    assert not list((out / "evaluations").glob("*"))


def test_a_split_without_captions_is_named(captioner_run: Path, odd_data: Path) -> None:
    with pytest.raises(UserError, match="has no captions of split 'test'"):
        score_run(CAPTIONS, captioner_run, CaptionFlags(split="test"), OpenOptions(shards=str(odd_data)))


def test_decoding_and_the_number_of_clips_are_chosen_and_stated(
    captioner_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--decoding.method", "beam", "--decoding.num-beams", 2, "--decoding.early-stopping", "--max-samples", 2)
    assert train("eval", "caption", captioner_run, "--split", "train", *flags) == 0
    text = capsys.readouterr().out
    assert "2 beams, length penalty 1, early stopping, at most 12 tokens" in text
    (file,) = (captioner_run / "evaluations").glob("captions-train-decoding-????????.json")
    results = json.loads(file.read_bytes())
    assert results["num_samples"] == 2
    assert results["overrides"] == {"decoding.method": "beam", "decoding.num_beams": 2, "decoding.early_stopping": True}
    assert results["data"].endswith("; 1 in 5 clips is captioned (2 clips)")
    shown = " ".join(map(str, flags))
    assert set(results["command"].split()) == {
        "train",
        "eval",
        "caption",
        str(captioner_run),
        "--split",
        *shown.split(),
    }
    for wrong, message in (
        (("--max-samples", 0), "--max-samples is 0"),
        (("--spice-jars", captioner_run), "which SPICE needs"),
        (("--decoding.num-beams", 3), "has no effect with --decoding.method greedy"),
    ):
        assert train("eval", "caption", captioner_run, *wrong) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", None, "run.json is missing"),
        ("run.json", "{", "run.json cannot be read"),
        ("tokenizer.json", None, "there is no tokenizer in "),
        ("tokenizer.json", "{", "cannot read the tokenizer "),
    ],
)
def test_a_run_that_lacks_a_file_is_not_told_to_lose_more(
    captioner_run: Path,
    tmp_path: Path,
    name: str,
    content: str | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(captioner_run, tmp_path / "run")
    (run / name).unlink() if content is None else (run / name).write_text(content)
    assert train("eval", "caption", run) == 2
    err = capsys.readouterr().err
    assert message in err and "hint: restore the run's files" in err and "remove" not in err

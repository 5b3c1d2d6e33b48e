"""`--where` in commands: what a run records, resuming, evaluations and embeddings."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from clipmill.manifests.store import read_captions
from clipmill.shards.reader import Variant
from clipmill.train.run.folder import RunFolder
from tests.shards.made_scores import phash, write_scores
from tests.train.classify.moving import write_moving
from tests.train.evaluation.test_other_data import TASKS
from tests.train.running import SMALL, train, two_lines
from tests.train.tiny_data import Caption, write_captions


@pytest.fixture(scope="module")
def scored_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight videos, two held out; the chunks of odd videos have no motion."""
    data_dir = tmp_path_factory.mktemp("data") / "scored"
    data_dir.mkdir()
    write_moving(data_dir, num_videos=8)
    keys = [key for shard in Variant.open(data_dir).shards() for key in shard.index["key"].to_pylist()]
    videos = sorted({key.rpartition("_")[0] for key in keys})
    write_scores(
        data_dir,
        {
            key: {"motion": float(videos.index(key.rpartition("_")[0]) % 2 == 0), "phash": phash(number)}
            for number, key in enumerate(keys)
        },
    )
    return data_dir


@pytest.fixture(scope="module")
def run(scored_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "selected"
    evaluate = ["--evaluate.every", 2, "--evaluate.where", "begin_s < 1"]
    words = [*TASKS["dual-encoder"].split(), "--where", "motion > 0.5 and words == 2", *evaluate]
    assert train("dual-encoder", "--shards", scored_data, "--out", out, *words) == 0
    return out


def test_captions_and_evaluations_are_selected(run: Path) -> None:
    facts = RunFolder(run).read_facts()
    assert "where: motion > 0.5 and words == 2" in RunFolder(run).settings.read_text()
    # One of 25 captions has more words. Twelve captions belong to videos without motion.
    assert "16 of 25 captions of split 'train'; 9 not selected" in facts["data"]
    assert "8 of 12 chunks and 24 of 25 captions selected" in facts["data"]
    assert "4 of 8 captions of split 'val'" in facts["evaluations"]["val"]["data"]
    assert "where begin_s < 1: 2 of 4 chunks selected" in facts["evaluations"]["val"]["data"]


def test_resuming_with_another_expression_is_refused(
    run: Path, scored_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    assert train("dual-encoder", "--resume", "--out", copy, "--where", "motion > 0.25", "--steps", 3) == 2
    assert "--where is motion > 0.25, but the run in" in capsys.readouterr().err
    # Different scores select different samples.
    other = tmp_path / "data"
    shutil.copytree(scored_data, other)
    keys = [key for shard in Variant.open(other).shards() for key in shard.index["key"].to_pylist()]
    write_scores(other, {key: {"motion": float(key < "v05")} for key in keys})
    assert train("dual-encoder", "--resume", "--out", copy, "--shards", other) == 2
    assert "sample" in capsys.readouterr().err


@pytest.mark.nightly
def test_an_evaluation_has_a_condition_of_its_own(
    run: Path, scored_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*flags: object) -> dict:
        capsys.readouterr()
        assert train("eval", "retrieval", run, *flags, "--json") == 0
        return dict(json.loads(capsys.readouterr().out))

    everything = evaluate("--split", "train")
    assert "where" not in everything["data"]
    assert "25 of 25 captions" in everything["data"]
    some = evaluate("--split", "train", "--where", "motion < 0.5")
    assert "8 of 25 captions of split 'train'; 17 not selected" in some["data"]
    assert "--where 'motion < 0.5'" in some["command"]
    names = [path.stem for path in RunFolder(run).results()]
    assert "retrieval-train" in names
    assert any(name.startswith("retrieval-train-where-") for name in names)
    assert train("eval", "retrieval", run, "--where", "motoin < 0.5") == 2
    assert "there is no name motoin" in capsys.readouterr().err
    assert train("eval", "retrieval", run, "--where", "motion > 0.5") == 2
    assert "selects none of the 4 chunks of split 'val'" in capsys.readouterr().err


@pytest.mark.nightly
def test_embeddings_are_of_the_selected_clips(run: Path, scored_data: Path, tmp_path: Path) -> None:
    words = ["--shards", scored_data, "--split", "train", "--workers", 1, "--device", "cpu", "--clips", "chunks"]
    where = ["--where", "motion > 0.5"]
    assert train("embed", run, *words, "--out", tmp_path / "embedded", *where) == 0
    clips = pq.read_table(tmp_path / "embedded" / "clips.parquet")["key"].to_pylist()
    assert clips == [f"v0{video}_00000{start}000" for video in (0, 2, 4, 6) for start in (0, 2)]
    assert train("embed", run, *words, "--out", tmp_path / "embedded", "--where", "motion > 0.4") == 2


def test_a_mistake_is_named_before_the_run_is_made(
    scored_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shards", scored_data, "--out", tmp_path / "run", *TASKS["mae"].split(), "--evaluate.every", 2]
    for where, message in (
        ("__import__('os').remove('x')", "there is no function remove"),
        ("words > 3", "these samples have no captions"),
    ):
        assert train("mae", *words, "--where", where) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


LABEL = "label_class = 'bright:left'"


@pytest.fixture(scope="module")
def repeated_captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with two captions for each clip; only the first has labels, as `prep manifest folder` stores them."""
    data_dir = tmp_path_factory.mktemp("data") / "repeated"
    data_dir.mkdir()
    write_moving(data_dir, num_videos=4)
    captions = read_captions(data_dir)
    again = [
        Caption(row["video_id"], row["begin_s"], row["end_s"], text, labels=labels)
        for row in captions.to_pylist()
        for text, labels in (
            (row["text"], {} if row["label_class"] is None else {"label_class": row["label_class"]}),
            (f"again {row['text']}", {}),
        )
    ]
    write_captions(data_dir, {f"v{number:02d}": "val" if number == 3 else "train" for number in range(4)}, again)
    return data_dir


def test_labels_select_captions_and_chunks(
    repeated_captions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each of three videos has one such clip of one second with two texts, in a chunk of two seconds.
    out = tmp_path / "dual"
    words = [*TASKS["dual-encoder"].split(), "--batch", 2, "--where", LABEL]
    assert train("dual-encoder", "--shards", repeated_captions, "--out", out, *words) == 0
    assert f"where {LABEL}: 3 of 6 chunks and 6 of 26 captions selected" in RunFolder(out).read_facts()["data"]
    out = tmp_path / "mae"
    words = [*SMALL, "--mask-ratio", 0.5, "--batch", 2, "--steps", 1, "--device", "cpu", "--where", LABEL]
    assert train("mae", "--shards", repeated_captions, "--out", out, *words) == 0
    assert f"where {LABEL}: 3 of 6 chunks selected" in RunFolder(out).read_facts()["data"]
    capsys.readouterr()
    assert (
        train("mae", "--shards", repeated_captions, "--out", tmp_path / "none", "--where", "label_success = 'true'")
        == 2
    )
    error, hint = two_lines(capsys)
    assert "have no column label_success" in error and "label_class" in hint

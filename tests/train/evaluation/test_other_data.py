"""`--evaluate.shards`: evaluations of every task in the loop on named data folders other than the training data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_captions, read_videos
from clipmill.manifests.write import write_manifest
from clipmill.train.config.evaluation import EvaluatedData, EvaluationSettings
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation
from tests.tiers import nightly_beyond
from tests.train.classify.moving import write_moving
from tests.train.data.test_stream_tars import write_tar
from tests.train.evaluation.test_commands import score
from tests.train.running import train
from tests.train.tiny_data import encode_chunk

SMALL = "--model tiny --num-frames 2 --size-px 32 --workers 1 --batch 6 --lr 1e-3 --warmup-steps 1 --steps 2"
CAPTIONER = " --decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
TASKS = {
    "dual-encoder": SMALL,
    "classify": f"{SMALL} --label verb",
    "mae": f"{SMALL} --mask-ratio 0.5 --evaluate.labels noun --evaluate.neighbours 3",
    "caption": SMALL + CAPTIONER,
}
AFTERWARDS: dict[str, tuple[str, str, Callable[[dict[str, Any]], float]]] = {
    "dual-encoder": ("retrieval", "text_to_video_median_rank", lambda result: result["text_to_video"]["median_rank"]),
    "classify": ("classification", "verb_top1", lambda result: result["numbers"]["verb_top1"]),
    "mae": (
        "probe --label noun --neighbours 3",
        "noun_knn_top1",
        lambda result: result["findings"][0]["found"]["top1"],
    ),
    "caption": ("caption", "loss", lambda result: result["loss"]),
}


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("data") / "moving"
    data_dir.mkdir()
    write_moving(data_dir, num_videos=8)
    return data_dir


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder with more videos than the training data."""
    data_dir = tmp_path_factory.mktemp("data") / "other"
    data_dir.mkdir()
    write_moving(data_dir, num_videos=16)
    return data_dir


@pytest.mark.parametrize("task", nightly_beyond(["dual-encoder"], TASKS))
def test_the_loop_finds_on_other_data_what_the_command_finds(
    moving: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    out = tmp_path / "run"
    words = f"--shards {moving} --out {out} --evaluate.every 1 {TASKS[task]}"
    assert (
        train(task, *words.split(), "--where", "begin_s < 1", "--evaluate.shards", f"far={other}@val", f"{moving}") == 0
    )
    printed = capsys.readouterr().out
    assert (
        f"evaluation far: split 'val' of {other}" in printed
        and f"evaluation moving: split 'val' of {moving}" in printed
    )
    kind, number, value = AFTERWARDS[task]
    for line in read_lines(RunFolder(out).metrics):
        assert {name.partition("/")[0] for name in line if "/" in name} == {"far", "moving"}
    for name, data in (("far", other), ("moving", moving)):
        assert train("eval", *kind.split()[:1], out, "--shards", data, *kind.split()[1:], "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert line[f"{name}/{number}"] == pytest.approx(value(result), rel=1e-5), name
    data, facts = (RunFolder(out).read_facts()[name] for name in ("data", "evaluations"))
    assert "where begin_s < 1: 6 of 12 chunks " in data and "selected" in printed, "--where selects only training data"
    assert not any("where" in fact["data"] for fact in facts.values())
    assert facts["far"]["shards"] == str(other.resolve()) and not facts["far"]["is_own_data"]
    assert facts["moving"]["is_own_data"] and facts["moving"]["split"] == "val"
    assert "16" in facts["far"]["data"] and "8" in facts["moving"]["data"]  # every fourth video has four clips
    page = RunFolder(out).page.read_text()
    assert "(far)</h3>" in page and f"far: split “val” of {other}" in page


def test_settings_of_a_file_name_several(moving: Path, other: Path, tmp_path: Path) -> None:
    (tmp_path / "evaluate.yaml").write_text(
        f"evaluate:\n  every: 2\n  shards: [far={other}, 'near={moving}@train:mir']\n"
    )
    words = [*TASKS["dual-encoder"].split(), "--config", tmp_path / "evaluate.yaml"]
    assert train("dual-encoder", "--shards", moving, *words, "--out", tmp_path / "run") == 2  # mir needs nouns
    (tmp_path / "evaluate.yaml").write_text(
        f"evaluate:\n  every: 2\n  label: verb\n  shards: [far={other}, 'near={moving}@train:zero-shot']\n"
    )
    assert train("dual-encoder", "--shards", moving, *words, "--out", tmp_path / "run") == 0
    last = read_lines(RunFolder(tmp_path / "run").metrics)[-1]
    assert {"far/text_to_video_r1", "near/top1"} <= set(last) and "near/text_to_video_r1" not in last


@pytest.mark.parametrize("task", TASKS)
def test_missing_data_are_named_before_training_starts(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    words = f"--shards {moving} --out {tmp_path / 'run'} --evaluate.every 1 {TASKS[task]}".split()
    for flags, message, hint in (
        (("--evaluate.shards", f"far={tmp_path / 'nothing'}"), f"--evaluate.shards far={tmp_path / 'nothing'}: ", ""),
        (
            ("--evaluate.shards", f"far={moving}@test"),
            f"--evaluate.shards far={moving}: {moving} has no videos of split 'test'",
            "use --evaluate.shards far=DATA@SPLIT with a split of this manifest",
        ),
        (
            ("--evaluate.split", "test"),
            f"error: {moving} has no videos of split 'test'",
            "use --evaluate.split with a split",
        ),
    ):
        assert train(task, *words, *flags) == 2
        printed = capsys.readouterr().err
        assert message in printed and hint in printed and " --shards" not in printed and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (("a=x", "a=y"), "the name 'a' to two data folders"),
        (("x/data", "y/data"), "the name 'data' to two data folders"),
        (("a=x@val:unheard-of",), "names the protocol 'unheard-of'"),
        (("",), "--evaluate.shards '' does not name a data folder"),
        (("a=",), "--evaluate.shards 'a=' does not name a data folder"),
        (("=x@val",), "--evaluate.shards '=x@val': '' is not a valid NAME"),
        (("my data=x",), "--evaluate.shards 'my data=x': 'my data' is not a valid NAME"),
        (("x/.data", "y/data"), "the name 'data' to two data folders"),
    ],
)
def test_data_that_cannot_be_told_apart_are_a_mistake(shards: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DualEncoderEvaluation(every=1, shards=shards)


def test_what_names_data() -> None:
    assert [entry.name for entry in DualEncoderEvaluation(every=1, shards=("/data/a=1/b",)).evaluated_data()] == ["b"]
    shards = ("data/ek100", "own=s3://bucket/a=b@test", "vatex=/data/v@test:vatex", "a@b/c")
    data_evaluated = DualEncoderEvaluation(every=1, split="held-out", shards=shards).evaluated_data()
    assert [(entry.name, entry.shards, entry.split, entry.protocol) for entry in data_evaluated] == [
        ("ek100", "data/ek100", "held-out", None),
        ("own", "s3://bucket/a=b", "test", None),
        ("vatex", "/data/v", "test", "vatex"),
        ("c", "a@b/c", "held-out", None),
    ]
    patterns = ("a/*.gif", "b/.hidden", "c/**", "tars/{0..9}.tar")
    named = DualEncoderEvaluation(every=1, shards=patterns).with_absolute_paths()
    assert [data.name for data in named.evaluated_data()] == ["gif", "hidden", "data", "0..9-.tar"]
    assert [data.name for data in named.with_absolute_paths().evaluated_data()] == [
        "gif",
        "hidden",
        "data",
        "0..9-.tar",
    ]
    assert EvaluationSettings(every=1).evaluated_data() == (EvaluatedData(name="val", shards=None, split="val"),)
    kept = DualEncoderEvaluation(every=1, split="held-out", shards=shards).with_absolute_paths()
    assert kept.shards == (
        f"ek100={Path.cwd()}/data/ek100@held-out",
        "own=s3://bucket/a=b@test",
        "vatex=/data/v@test:vatex",
        f"c={Path.cwd()}/a@b/c@held-out",
    )
    assert kept.with_absolute_paths() == kept and EvaluationSettings().with_absolute_paths() == EvaluationSettings()
    with pytest.raises(UserError, match="this task has only one"):
        EvaluationSettings(every=1, shards=("a=x@val:vatex",))


def test_best_is_a_number_of_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--evaluate.every", 1, "--evaluate.shards", "a=x@test:mir", "b=y"]
    assert train("dual-encoder", *words, "--best", "val/text_to_video_r1") == 2
    hint = capsys.readouterr().err
    assert "a/average_mean_ap" in hint and "b/text_to_video_r1" in hint and "val/" not in hint.splitlines()[1]


def test_a_protocol_of_a_whole_test_set_is_not_computed_on_a_part(
    other: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TASKS["dual-encoder"].split(), "--evaluate.every", 1, "--evaluate.max-samples", 2]
    shards = ["--evaluate.shards", f"far={other}@val:paragraph"]
    assert train("dual-encoder", "--shards", moving, *words, *shards, "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert "--evaluate.max-samples is 2, but paragraph needs all 4 clips of far" in error


def test_the_protocol_stands_beside_the_numbers_of_the_loop(
    other: Path, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caption settings of the training data are not used for other data, which do not have these sources."""
    table = read_captions(moving).drop(["caption_id", "source"])
    sources = pa.array(["narrator"] * len(table)).dictionary_encode()
    videos = read_videos(moving).select(["video_id", "source_id", "path", "split"])
    narrated = shutil.copytree(moving, tmp_path / "narrated")
    write_manifest(narrated, "test", videos, table.append_column("source", sources))
    words = [*TASKS["dual-encoder"].split(), "--captions.sources", "narrator=1", "--evaluate.every", 1]
    shards = ["--evaluate.shards", f"far={other}@val:paragraph", "--evaluate.dual-softmax", 0.1]
    assert train("dual-encoder", "--shards", narrated, *words, *shards, "--out", tmp_path / "run") == 0
    last = read_lines(RunFolder(tmp_path / "run").metrics)[-1]
    result = score(
        capsys, "retrieval", tmp_path / "run", "--shards", other, "--protocol", "paragraph", "--dual-softmax", 0.1
    )
    assert last["far/text_to_video_r1"] == result["text_to_video"]["recall"]["1"]  # type: ignore[index]
    assert last["far/text_to_video_dual_softmax_r1"] == result["dual_softmax"]["text_to_video"]["recall"]["1"]  # type: ignore[index]
    page = RunFolder(tmp_path / "run").page.read_text()
    assert "Recall with dual softmax, text → video, % (far)" in page and "Recall, text → video, % (far)" in page
    assert "paragraph: as in Zhang et al. 2018: the text" in page and "at temperature 0.1" in page


def test_a_stream_of_tars_is_evaluated_on_a_data_folder(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = write_tar(tmp_path / "0.tar", encode_chunk(0, 20), [f"clip{number}" for number in range(8)])
    words = [*SMALL.split(), "--shards", tar, "--out", tmp_path / "run", "--evaluate.every", 2]
    assert train("dual-encoder", *words) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "video tars cannot be used for evaluation during training" in error and "--evaluate.shards" in hint
    assert train("dual-encoder", *words, "--evaluate.shards", f"far={other}") == 0
    assert "far/text_to_video_r1" in read_lines(RunFolder(tmp_path / "run").metrics)[-1]
    capsys.readouterr()
    assert train("eval", "retrieval", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "the model was trained on these clips, because the data have no splits; only 8 clips" in printed
    result = tmp_path / "run" / "evaluations" / "retrieval-all.json"
    assert f"written: {result}" in printed and json.loads(result.read_text())["split"] == "all"
    assert train("classify", *SMALL.split(), "--shards", tar, "--label", "class", "--out", tmp_path / "none") == 2
    assert "0.tar names video tars, but labels are in the manifest" in capsys.readouterr().err

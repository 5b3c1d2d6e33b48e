"""EgoMCQ: accuracy by kind compared with the public code, in the loop and by command, and missing data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_captions
from clipmill.train.config.clips import OpenOptions
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.runner import open_for
from clipmill.train.models.text import load_tokenizer
from clipmill.train.registry import find_task
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.egocentric import is_nearest
from clipmill.train.tasks.dual_encoder.protocols import embed_all, protocol_captions
from tests.manifests.test_egovlp import question
from tests.train.evaluation.test_commands import score
from tests.train.running import facts, train
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

VIDEOS = ["a", "b", "c"]
SPANS = [(0.0, 1.0), (1.0, 2.5), (2.5, 3.5)]
TEXTS = ["#C C opens the door", "#C C walks", "#O a man eats", "#C C picks a bag", "#C C looks around", "#C C sits"]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, and three videos whose question clips also have captions from a different source."""
    folder = tmp_path_factory.mktemp("kitchen")
    write_shard(folder, 0, [chunk for name in VIDEOS for chunk in chunks_of(name, 40)], split="val")
    captions = [
        Caption(video, *span, f"{source} of {video} at {span[0]}", source=source)
        for video in VIDEOS
        for span in SPANS
        for source in ("egomcq", "narration_pass_1")
    ]
    write_captions(folder, dict.fromkeys(VIDEOS, "val"), captions)
    rng = np.random.default_rng(0)
    clips = [(video, *span) for video in VIDEOS for span in SPANS]
    questions = {}
    for number in range(24):
        of_video = [clip for clip in clips if clip[0] == VIDEOS[number % 3]]
        # All videos show the same frames, so the spans of inter questions differ, too.
        chosen = of_video if number % 2 else [clips[3 * video + (number // 2 + video) % 3] for video in range(3)]
        questions[str(number)] = question(TEXTS[number % 6], int(rng.integers(3)), *chosen)
    (folder / "egomcq.json").write_text(json.dumps(questions))
    return folder


@pytest.fixture(scope="module")
def run(kitchen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    words = "--model tiny --num-frames 2 --size-px 32 --batch 4 --steps 2 --workers 1 --split val"
    words += " --evaluate.every 2 --evaluate.protocol egomcq --evaluate.split val --evaluate.questions"
    assert train("dual-encoder", "--shards", kitchen, "--out", out, *words.split(), kitchen / "egomcq.json") == 0
    return out


def public_accuracy(run: Path, kitchen: Path) -> dict[str, float]:
    """Return the percentage of questions whose argmax is the answer, by whether the clips come from one video."""
    opened_run = open_for(find_task("dual-encoder"), RunFolder(run), OpenOptions())
    table = protocol_captions(kitchen, "egomcq", split="val", sources=None)
    samples = opened_run.task.samples("val", World(), table=table)
    model = opened_run.trained.fill(opened_run.task.build_model(samples))
    embeddings = embed_all(opened_run.task, model, samples.evaluation_batches(), device=torch.device("cpu"))
    rows = {row["caption_id"]: row for row in read_captions(kitchen).to_pylist()}
    row_of = {}
    for row, caption_id in enumerate(embeddings.caption_id.tolist()):
        caption = rows[caption_id]
        row_of[caption["video_id"], caption["begin_s"], caption["end_s"]] = row
    right: dict[str, list[bool]] = {"inter": [], "intra": []}
    for one_question in json.loads((kitchen / "egomcq.json").read_text()).values():
        clips = [(clip["video_uid"], clip["clip_start"], clip["clip_end"]) for clip in one_question["choices"].values()]
        tokens = torch.from_numpy(load_tokenizer()(one_question["query"]["clip_text"]))[None]
        text = model.embed_text(tokens).detach()[0]  # type: ignore[operator]
        predicted = int(torch.argmax(torch.from_numpy(embeddings.video[[row_of[clip] for clip in clips]]) @ text))
        kind = "intra" if len({clip[0] for clip in clips}) == 1 else "inter"
        right[kind].append(predicted == one_question["answer"])
    return {kind: float(np.mean(of_kind)) for kind, of_kind in right.items()}


def test_accuracies_are_those_of_the_public_rule_and_of_the_loop(
    run: Path, kitchen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result: dict[str, Any] = score(capsys, "egomcq", run, "--questions", kitchen / "egomcq.json")
    expected = public_accuracy(run, kitchen)
    last = read_lines(RunFolder(run).metrics)[-1]
    for kind in ("inter", "intra"):
        assert result[kind]["num_questions"] == 12 and result[kind]["chance"] == pytest.approx(1 / 3)
        assert result[kind]["accuracy"] == pytest.approx(expected[kind])
        assert last[f"val/{kind}_accuracy"] == pytest.approx(expected[kind])
    assert result["incomplete"] == ""
    assert train("eval", "egomcq", run, "--questions", kitchen / "egomcq.json") == 0
    printed = capsys.readouterr().out
    assert "inter-video" in printed and "caution: only 12 inter-video questions, so that " in printed
    assert facts(run)["evaluations"]["val"]["caution"] == "only 24 questions"


def test_questions_without_all_their_clips_make_a_result_incomplete(
    run: Path, kitchen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = json.loads((kitchen / "egomcq.json").read_text())
    questions["0"]["choices"]["0"]["video_uid"] = "gone"
    some = tmp_path / "some.json"
    some.write_text(json.dumps(questions))
    result: dict[str, Any] = score(capsys, "egomcq", run, "--questions", some)
    assert result["inter"]["num_questions"] == 11
    assert result["incomplete"] == "23 of 24 questions scored: not comparable with published numbers"


def test_what_egomcq_needs_is_said(
    run: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eval", "egomcq", run) == 2
    assert "--questions egomcq.json" in capsys.readouterr().err
    with pytest.raises(UserError, match="contains no EgoMCQ clips"):
        protocol_captions(data_dir, "egomcq", split="val", sources=None)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"0": question("what?", 0, ("x", 0, 1), ("y", 0, 1))}))
    assert train("eval", "egomcq", run, "--questions", other) == 2
    assert "has all its clips" in capsys.readouterr().err


def test_ties_and_nan_are_wrong() -> None:
    assert is_nearest(np.array([0.1, 0.3, 0.2], np.float32), 1)
    assert not is_nearest(np.array([0.3, 0.3, 0.2], np.float32), 1)
    assert not is_nearest(np.array([np.nan, 0.3], np.float32), 1)

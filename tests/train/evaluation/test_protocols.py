"""Named protocols of text-video retrieval, compared with ranks by definition, and on data that do not fit."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import OpenOptions
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.runner import OpenedRun, open_for
from clipmill.train.models.text import load_tokenizer
from clipmill.train.registry import find_task
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.dual_encoder.evaluation import open_scorer
from clipmill.train.tasks.dual_encoder.metrics import dual_softmax
from clipmill.train.tasks.dual_encoder.protocols import Embeddings, RetrievalScorer, embed_all, protocol_captions
from clipmill.train.tasks.dual_encoder.spec import DualEncoderEvaluation, DualEncoderSettings, RetrievalName
from tests.train.evaluation.test_commands import score
from tests.train.running import train
from tests.train.search.conftest import overwrite_chunk
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

VIDEOS = [f"v{number}" for number in range(6)]
WHOLE = (0.0, float("inf"))
Captions = list[Caption]


def folder_of(path: Path, captions: Captions, *, videos: Sequence[str] = VIDEOS) -> Path:
    """Write a data folder with a test split of videos with 40, 43, ... frames."""
    chunks = [chunk for number, name in enumerate(videos) for chunk in chunks_of(name, 40 + 3 * number)]
    write_shard(path, 0, chunks, split="test")
    write_captions(path, dict.fromkeys(videos, "test"), captions)
    return path


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    small = "--model tiny --num-frames 2 --size-px 32 --batch 4 --steps 2 --workers 1"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *small.split()) == 0
    return out


@pytest.fixture(scope="module")
def paragraphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with two sentences per video, which only every second video stores in the order of time."""
    captions: Captions = []
    for number, name in enumerate(VIDEOS):
        both = [Caption(name, 0.2, 1.0, f"first {number}"), Caption(name, 1.5, 3.0, f"then {number * number}")]
        captions += both if number % 2 else both[::-1]
    return folder_of(tmp_path_factory.mktemp("paragraphs"), captions)


@pytest.fixture(scope="module")
def vatex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with ten captions per video; the last one is the same for all videos."""
    texts = [[f"{what} of {name}" for what in "abcdefghi"] + ["a video"] for name in VIDEOS]
    captions = [Caption(name, *WHOLE, text) for name, its in zip(VIDEOS, texts, strict=True) for text in its]
    return folder_of(tmp_path_factory.mktemp("vatex"), captions)


def clip4clip(similarity_TV: NDArray[Any], video_of_text: Sequence[int]) -> dict[str, NDArray[np.int64]]:
    """Return ranks from 0 by definition.

    Each text is ranked among the videos, and each video among the texts by the best of its own texts.
    """
    num_texts, num_videos = similarity_TV.shape
    of_text = np.array(
        [
            np.argsort(-similarity_TV[text], kind="stable").tolist().index(video_of_text[text])
            for text in range(num_texts)
        ]
    )
    of_video = []
    for video in range(num_videos):
        order = np.argsort(-similarity_TV[:, video], kind="stable").tolist()
        of_video.append(min(order.index(text) for text in range(num_texts) if video_of_text[text] == video))
    return {"text_to_video": of_text, "video_to_text": np.array(of_video)}


def camoe(similarity_QG: NDArray[Any], temperature: float) -> NDArray[Any]:
    """Return sim * softmax(sim / temperature, dim=0), with queries as rows."""
    scores = torch.from_numpy(similarity_QG).double()
    return (scores * torch.softmax(scores / temperature, dim=0)).numpy()


def same(result: dict[str, Any], ranks: dict[str, NDArray[np.int64]]) -> None:
    for direction, rank in ranks.items():
        recall = {int(k): share for k, share in result[direction]["recall"].items()}
        assert recall == pytest.approx({k: float((rank < k).mean()) for k in (1, 5, 10)}), direction
        assert result[direction]["median_rank"] == np.median(rank) + 1


def table_of(texts: Sequence[str], videos: Sequence[int]) -> pa.Table:
    return pa.table(
        {
            "caption_id": pa.array(range(len(texts)), pa.int64()),
            "video_id": pa.array([f"v{video}" for video in videos]),
            "text": pa.array(texts),
            "source": pa.array(["human"] * len(texts)),
        }
    )


def embeddings(num_videos: int, *, ids: NDArray[np.int64], seed: int = 0) -> Embeddings:
    rng = np.random.default_rng(seed)
    video, text = (rng.normal(size=(num_videos, 16)).astype(np.float32) for _ in range(2))
    text += video
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (video, text)]
    # The first two pairs have the same tokens but belong to different videos.
    key = np.r_[0, 0, np.arange(2, num_videos)].astype(np.int64)
    return Embeddings(unit[0], unit[1], key, ids, np.arange(num_videos))


def no_texts(_: Sequence[str]) -> NDArray[np.float32]:
    raise AssertionError("the texts of the samples are already embedded")


def test_1ka_ranks_a_thousand_pairs_even_where_texts_are_equal() -> None:
    embedded = embeddings(1000, ids=np.arange(1000))
    scorer = RetrievalScorer("msrvtt-1ka", table_of([f"text {max(1, n)}" for n in range(1000)], range(1000)), 0.01)
    result = scorer.score(embedded, no_texts)
    similarity = embedded.text @ embedded.video.T
    same(result, clip4clip(similarity, range(1000)))
    assert result["text_to_video"]["num_queries"] == 1000 and result["incomplete"] == ""
    assert "1 duplicate text" in result["notes"][1] and result["title"] == "MSR-VTT 1k-A retrieval"
    # The default protocol treats equal texts as one.
    assert RetrievalScorer().score(embedded, no_texts)["text_to_video"]["num_queries"] == 999
    dual = result["dual_softmax"]
    same(
        {"text_to_video": dual["text_to_video"]},
        {"text_to_video": clip4clip(camoe(similarity, 0.01), range(1000))["text_to_video"]},
    )
    video_to_text = clip4clip(camoe(similarity.T, 0.01), range(1000))["text_to_video"]
    same({"video_to_text": dual["video_to_text"]}, {"video_to_text": video_to_text})
    assert dual["text_to_video"]["recall"][1] > result["text_to_video"]["recall"][1]


def test_vatex_ranks_every_caption_and_a_video_by_its_best_one() -> None:
    num_videos = 1500
    videos = np.repeat(np.arange(num_videos), 10)
    embedded = embeddings(num_videos, ids=np.arange(0, 10 * num_videos, 10))
    rng = np.random.default_rng(1)
    texts_ME = (embedded.video[videos] + rng.normal(size=(10 * num_videos, 16)) / 2).astype(np.float32)
    scorer = RetrievalScorer("vatex", table_of([f"text {n}" for n in range(len(videos))], videos.tolist()))
    result = scorer.score(embedded, lambda texts: texts_ME[[int(text.split()[1]) for text in texts]])
    similarity = texts_ME @ embedded.video.T
    rank = (similarity > similarity[np.arange(len(videos)), videos][:, None]).sum(axis=1)
    best = np.sort(np.where(videos[:, None] == np.arange(num_videos), similarity, -9), axis=0)[-1]
    same(result, {"text_to_video": rank, "video_to_text": (similarity > best).sum(axis=0)})
    assert (result["text_to_video"]["num_queries"], result["text_to_video"]["gallery_size"]) == (15000, 1500)
    assert (result["video_to_text"]["num_queries"], result["video_to_text"]["gallery_size"]) == (1500, 15000)
    assert result["incomplete"] == "" and result["video_to_text"]["chance"][1] == pytest.approx(10 / 15000)


def test_a_part_of_the_videos_is_not_the_protocols_number() -> None:
    embedded = embeddings(998, ids=np.arange(2, 1000))
    result = RetrievalScorer("msrvtt-1ka", table_of([f"text {n}" for n in range(1000)], range(1000))).score(
        embedded, no_texts
    )
    assert result["title"] == "MSR-VTT 1k-A retrieval (incomplete)"
    assert "998 of 1,000 videos and 998 of 1,000 captions" in result["incomplete"]


def test_dual_softmax_is_not_tied_by_rounding() -> None:
    similarity = np.array([[0.9, -0.9, 0.1], [-0.8, 0.7, 0.3], [0.2, 0.1, -0.5]], np.float32)
    scores = dual_softmax(similarity, temperature=0.01)
    assert np.allclose(scores, camoe(similarity, 0.01)) and len(np.unique(scores)) == 9


def open_model(run: Path, data: Path) -> tuple[OpenedRun, torch.nn.Module]:
    opened_run = open_for(find_task("dual-encoder"), RunFolder(run), OpenOptions(shards=str(data)))
    return opened_run, opened_run.trained.fill(opened_run.task.build_model(opened_run.task.samples("test", World())))


@pytest.mark.nightly
def test_paragraphs_are_sentences_in_order_of_time_and_whole_videos(
    run: Path, paragraphs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = score(capsys, "retrieval", run, "--shards", paragraphs, "--split", "test", "--protocol", "paragraph")
    texts = [f"first {number} then {number * number}" for number in range(6)]
    opened_run, model = open_model(run, paragraphs)
    samples = opened_run.task.samples(
        "test", World(), table=protocol_captions(paragraphs, "paragraph", split="test", sources=None)
    )
    assert sorted(samples.text(sample) for sample in range(6)) == texts
    spans = {samples.text(sample): samples.span_s(sample) for sample in range(6)}
    assert [spans[text] for text in texts] == [(0.0, pytest.approx((40 + 3 * number) / 10)) for number in range(6)]
    embedded = embed_all(opened_run.task, model, samples.evaluation_batches(), device=torch.device("cpu"))
    tokens = np.stack([load_tokenizer()(samples.text(int(sample))) for sample in embedded.samples])
    text = model.embed_text(torch.from_numpy(tokens)).detach().numpy()  # type: ignore[operator]
    same(result, clip4clip(text @ embedded.video.T, range(6)))
    assert result["protocol_name"] == "paragraph" and result["text_to_video"]["num_queries"] == 6  # type: ignore[index]


@pytest.mark.nightly
def test_vatex_from_a_data_folder_is_named_incomplete(
    run: Path, vatex: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("retrieval", run, "--shards", vatex, "--split", "test", "--protocol", "vatex", "--dual-softmax", "0.05")
    result = score(capsys, *words)
    opened_run, model = open_model(run, vatex)
    samples = opened_run.task.samples("test", World())
    embedded = embed_all(opened_run.task, model, samples.evaluation_batches(), device=torch.device("cpu"))
    names = [samples.text(int(sample)).split()[-1] for sample in embedded.samples]
    # The comparison omits "a video", which is a caption of every video: ties count against the model.
    texts = [(video, f"{what} of {name}") for video, name in enumerate(names) for what in "abcdefghi"]
    tokens = np.stack([load_tokenizer()(text) for _, text in texts])
    similarity = model.embed_text(torch.from_numpy(tokens)).detach().numpy() @ embedded.video.T  # type: ignore[operator]
    rank = clip4clip(similarity, [video for video, _ in texts])["text_to_video"]
    common = similarity.shape[1] * float(result["text_to_video"]["recall"]["5"]) * 10 - (rank < 5).sum()  # type: ignore[index]
    assert common == pytest.approx(5)  # among six videos, a text of all videos has five of them in the first five ranks
    assert result["text_to_video"]["num_queries"] == 60 and "6 of 1,500 videos" in str(result["incomplete"])  # type: ignore[index]
    assert train("eval", *words) == 0
    printed = capsys.readouterr().out
    for message in (
        "text → video, vatex (incomplete)",
        "text → video, vatex (incomplete), dual softmax",
        "incomplete: 6 of 1,500 videos and 60 of 15,000 captions",
        "each caption queries all videos",
        "5 duplicate texts",
        "dual softmax: cosines times their softmax over all queries",
        "at temperature 0.05",
    ):
        assert message in printed, message
    assert printed.index("video → text, vatex (incomplete) ") < printed.index("dual softmax")
    page = RunFolder(run).page.read_text()
    assert "VATEX retrieval (incomplete)" in page and "text → video, vatex (incomplete), dual softmax" in page
    # The result without a protocol is in a different file.
    assert train("eval", "retrieval", run, "--shards", vatex, "--split", "test") == 0
    assert len([path for path in RunFolder(run).results() if "vatex-test" in path.name]) == 1


def test_a_result_without_the_clips_that_fail_says_so_everywhere(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captions = [Caption(name, 0.0, 2.0, f"of {name}") for name in VIDEOS]
    damaged, copy = folder_of(tmp_path / "damaged", captions), tmp_path / "run"
    for name in VIDEOS[:4]:
        overwrite_chunk(damaged, f"{name}_000000000")
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluations"))
    assert train("eval", "retrieval", copy, "--shards", damaged, "--split", "test") == 1
    printed = capsys.readouterr()
    (path,) = RunFolder(copy).results()
    assert printed.err.splitlines()[-1] == f"failed: 4 samples could not be decoded; see `failed` in {path}"
    result = json.loads(path.read_text())
    message = "4 samples could not be decoded and are not scored"
    assert result["incomplete"] == message and result["title"] == "Text-video retrieval (incomplete)"
    assert f"incomplete: {message}" in printed.out and "text → video (incomplete)" in printed.out
    assert "<h2>Text-video retrieval (incomplete)</h2>" in RunFolder(copy).page.read_text()
    # The message follows the parts of the protocol that the data lack.
    words = ("--split", "test", "--protocol", "msrvtt-1ka", "--json")
    assert train("eval", "retrieval", copy, "--shards", damaged, *words) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["title"] == "MSR-VTT 1k-A retrieval (incomplete)"
    assert "2 of 1,000 captions of the protocol" in result["incomplete"] and result["incomplete"].endswith(message)


def test_a_protocol_whose_captions_have_no_chunks_names_their_source(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(tmp_path, [], videos=VIDEOS[:2])
    captions = [Caption("elsewhere", *WHOLE, "a video", "human")]
    captions += [Caption(name, *WHOLE, name, "other") for name in VIDEOS[:2]]
    write_captions(tmp_path, dict.fromkeys(["elsewhere", *VIDEOS[:2]], "test"), captions)
    assert train("eval", "retrieval", run, "--shards", tmp_path, "--split", "test", "--protocol", "msrvtt-1ka") == 2
    assert "the protocol msrvtt-1ka uses only the captions of source 'human'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("protocol", "captions", "message"),
    [
        (
            "msrvtt-1ka",
            [("a", WHOLE), ("b", WHOLE)],
            "1 caption for each video, but 6 of 6 videos have a different number, such as v0 with 2",
        ),
        ("vatex", [("a", WHOLE)], "10 captions for each video, but 6 of 6 videos"),
        ("vatex", [(str(n), (n / 10, 3.0)) for n in range(10)], "but the protocol ranks complete videos"),
        ("paragraph", [("a", WHOLE)], "no video has several sentences"),
        ("paragraph", [("a", WHOLE), ("b", WHOLE)], "no video has several sentences with different times"),
    ],
)
def test_data_that_contradict_a_protocol_are_refused(
    tmp_path: Path, protocol: RetrievalName, captions: list[tuple[str, tuple[float, float]]], message: str
) -> None:
    write_captions(
        tmp_path,
        dict.fromkeys(VIDEOS, "test"),
        [Caption(name, *span, text) for name in VIDEOS for text, span in captions],
    )
    with pytest.raises(UserError, match=message) as error:
        protocol_captions(tmp_path, protocol, split="test", sources=None)
    assert f"the protocol {protocol}" in str(error.value) and "--protocol retrieval" in str(error.value.hint)


def test_more_videos_than_the_protocol_has_are_another_test_set(tmp_path: Path) -> None:
    names = [f"v{number}" for number in range(1001)]
    write_captions(tmp_path, dict.fromkeys(names, "test"), [Caption(name, *WHOLE, name) for name in names])
    with pytest.raises(UserError, match="1,000 videos, but the split has 1,001"):
        protocol_captions(tmp_path, "msrvtt-1ka", split="test", sources=None)


def test_captions_of_other_sources_are_not_the_protocols(tmp_path: Path) -> None:
    captions = [
        Caption(name, *WHOLE, f"{source} {name}", source=source) for name in VIDEOS for source in ("human", "narrator")
    ]
    write_captions(tmp_path, dict.fromkeys(VIDEOS, "test"), captions)
    captions_read = protocol_captions(tmp_path, "msrvtt-1ka", split="test", sources=None)
    assert captions_read["text"].to_pylist() == [f"human {name}" for name in VIDEOS]
    captions_read = protocol_captions(tmp_path, "msrvtt-1ka", split="test", sources="narrator=1")
    assert captions_read["text"].to_pylist() == [f"narrator {name}" for name in VIDEOS]


def test_texts_that_reach_the_context_are_counted() -> None:
    texts = ["word " * 75, "word " * 74, "a short one"]
    result = RetrievalScorer("paragraph", table_of(texts, range(3))).score(embeddings(3, ids=np.arange(3)), no_texts)
    assert any(note == "1 text with 77 tokens or more, truncated to 77" for note in result["notes"]), result["notes"]


def test_a_protocol_of_paragraphs_needs_a_text_tower(data_dir: Path) -> None:
    settings = DualEncoderSettings(shards=str(data_dir), text_tower="frozen")
    with pytest.raises(UserError, match="paragraph embeds texts, but this run has no text tower"):
        open_scorer(DualEncoderEvaluation(protocol="paragraph"), settings, None)
    latents = DualEncoderSettings(shards=str(data_dir), input="latents")
    with pytest.raises(UserError, match="vatex scores the clip of each caption, but latents are stored by segment"):
        open_scorer(DualEncoderEvaluation(protocol="vatex"), latents, None)

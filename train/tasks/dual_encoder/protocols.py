"""Embeddings of a split from all ranks, and named text-video retrieval protocols that score these embeddings.

Each rank embeds a part of the split; `gather_embeddings` gathers the embeddings on every rank, in the order of the
samples.

A protocol defines the texts, the clips and the correct pairs of a published benchmark. Data that do not fit the
protocol are rejected. Data with only some of the protocol's videos are scored, and the result is marked as incomplete.
docs/evaluation.md lists the sources, and the differences from public code.

Shape suffixes: B samples in a batch, L views of these samples, C channels, F frames of all views of a sample, T frames
per view, H height, W width, E width of the embeddings, N clips, M distinct texts, V videos,
X tokens of a text or values of its stored embedding.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.divided_videos import select_split
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.caption_rows import no_captions
from clipmill.train.data.captions import choose_sources
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.samples import Samples
from clipmill.train.device.transfer import send
from clipmill.train.distributed.world import World, gather_uneven
from clipmill.train.models.text import CONTEXT_LENGTH, Tokenize, load_tokenizer
from clipmill.train.tasks.dual_encoder.metrics import score_retrieval
from clipmill.train.tasks.dual_encoder.spec import ProtocolName, RetrievalName

_KEY_BYTES = 8
_TEXTS_PER_BATCH = 256

# Function that takes texts and returns their unit-length embeddings, [M, E].
EmbedTexts = Callable[[Sequence[str]], NDArray[np.float32]]


class EmbeddingTask(Protocol):
    """Interface of a task whose model embeds clips and captions."""

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's input: the clips and captions of a batch."""
        ...


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of clips and captions, with one row for each sample that could be decoded.

    Attributes:
        video: Unit-length embeddings of the clips, float32 [N, E].
        text: Unit-length embeddings of the captions, float32 [N, E].
        text_key: Keys of the texts, int64 [N]. Texts with equal tokens, or equal stored embeddings, have equal keys.
        caption_id: IDs of the captions in the manifest, int64 [N].
        samples: Indices of the samples, int64 [N].
        num_failed: Number of samples that could not be decoded on this rank or, after `gather_embeddings`, on all
            ranks.
        failed: Samples that could not be decoded on this rank.
    """

    video: NDArray[np.float32]
    text: NDArray[np.float32]
    text_key: NDArray[np.int64]
    caption_id: NDArray[np.int64]
    samples: NDArray[np.int64]
    num_failed: int = 0
    failed: tuple[FailedSample, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)


@torch.no_grad()  # not inference_mode, because training reuses tensors that the model caches, such as masks
def embed_all(
    task: EmbeddingTask, model: nn.Module, batches: Iterable[LoadedBatch], *, device: torch.device, num_clips: int = 1
) -> Embeddings:
    """Embed all batches of this rank with a model in evaluation mode.

    Args:
        num_clips: Number of temporal views per clip. A batch contains the frames of a clip's views in sequence. The
            embedding of a clip is the normalised mean of the unit-length embeddings of its views.

    Raises:
        FailedWork: An embedding is not finite.
    """
    parts: list[tuple[NDArray[np.generic], ...]] = []
    failed: list[FailedSample] = []
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch: Batch = to_device(loaded.batch, device)
        clips_BCFHW, captions = task.inputs(batch, is_training=False)
        views_LCTHW = clips_BCFHW.unflatten(2, (num_clips, -1)).transpose(1, 2).flatten(0, 1)
        video_LE, text_BE = model(views_LCTHW, captions)
        video_BE = video_LE.float()
        if num_clips > 1:
            video_BE = nn.functional.normalize(video_BE.unflatten(0, (-1, num_clips)).mean(dim=1), dim=-1)
        ids = (batch["caption_id"], batch["position"])
        parts.append(
            (
                video_BE.cpu().numpy(),
                text_BE.float().cpu().numpy(),
                text_keys(captions.cpu().numpy()),
                # Copy the IDs, because later batches reuse the memory of these tensors.
                *(column.cpu().clone().numpy() for column in ids),
            )
        )
    # A rank may have no samples.
    no_rows, no_ids = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else []
    video, text, text_key, caption_id, samples = columns or (no_rows, no_rows, no_ids, no_ids, no_ids)
    embeddings = Embeddings(video, text, text_key, caption_id, samples, len(failed), tuple(failed))
    is_finite = np.isfinite(embeddings.video).all(axis=1) & np.isfinite(embeddings.text).all(axis=1)
    if num_bad := int((~is_finite).sum()):
        raise FailedWork(f"{num_bad} of {len(embeddings)} embeddings are not finite: the weights have diverged")
    return embeddings


@torch.no_grad()
def embed_texts(
    embed: Callable[[torch.Tensor], torch.Tensor], texts: Sequence[str], *, tokenize: Tokenize, device: torch.device
) -> NDArray[np.float32]:
    """Embed texts with a text tower, and return their unit-length embeddings, float32 [N, E].

    Args:
        embed: Function that takes token IDs (one row per text) and returns unit-length embeddings [B, E].
    """
    parts = []
    for start in range(0, len(texts), _TEXTS_PER_BATCH):
        tokens = np.stack([tokenize(text) for text in texts[start : start + _TEXTS_PER_BATCH]])
        parts.append(embed(send(tokens, device)).float().cpu().numpy())
    return np.concatenate(parts)


def text_keys(text_NX: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return a hash of each text's tokens or stored embedding, int64 [N]."""
    rows = np.ascontiguousarray(text_NX)
    digests = (hashlib.blake2b(row.tobytes(), digest_size=_KEY_BYTES).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def distinct_texts(text_key_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index the distinct texts in order of first occurrence.

    Returns:
        First row of each distinct text, [M], and the index of each row's distinct text, [N].
    """
    _, first_rows, key_index = np.unique(text_key_N, return_index=True, return_inverse=True)
    order = np.argsort(first_rows)
    text_index = np.empty_like(order)
    text_index[order] = np.arange(len(order))
    return first_rows[order], text_index[key_index.reshape(-1)]


def gather_embeddings(embeddings: Embeddings, world: World, *, device: torch.device) -> Embeddings:
    """Return the embeddings of all ranks on every rank, in the order of the samples. All ranks must call this function.

    The number of samples may differ between ranks, and may be 0.

    Raises:
        FailedWork: No rank has any embeddings.
    """

    def gather_rows(rows: NDArray[Any]) -> NDArray[Any]:
        return gather_uneven(send(rows, device), world).cpu().numpy()

    num_failed = int(world.gather(torch.tensor([embeddings.num_failed], device=device)).sum())
    samples = gather_rows(embeddings.samples)
    if not len(samples):
        detail = f"; the first failure: {embeddings.failed[0].detail}" if embeddings.failed else ""
        raise FailedWork(f"none of the samples to evaluate could be decoded{detail}")
    order = np.argsort(samples, kind="stable")
    return replace(
        embeddings,
        video=gather_rows(embeddings.video)[order],
        text=gather_rows(embeddings.text)[order],
        text_key=gather_rows(embeddings.text_key)[order],
        caption_id=gather_rows(embeddings.caption_id)[order],
        samples=samples[order],
        num_failed=num_failed,
    )


CLIP_BENCHMARK: RetrievalName = "clip-benchmark"  # the only protocol for images
EGOMCQ: ProtocolName = "egomcq"  # also the source of EgoMCQ's clips in the manifest
_TIES = "ties count against the model"
_OWN_TEXTS_RULE = f"only a video's own texts are correct for the video, even if two videos have equal texts; {_TIES}"
_HINT = "use --protocol retrieval (during training: --evaluate.protocol), or the data of this benchmark"


@dataclass(frozen=True)
class RetrievalProtocol:
    """A protocol of text-video retrieval.

    Attributes:
        title: Title of the results table.
        definition: Description of queries, galleries and correct pairs, with the source.
        num_videos: Number of videos in the test set; None if the protocol does not fix this number.
        num_captions: Number of captions per video; None if the protocol does not fix this number.
    """

    title: str
    definition: str
    num_videos: int | None = None
    num_captions: int | None = None


PROTOCOLS: dict[str, RetrievalProtocol] = {
    "retrieval": RetrievalProtocol(
        "Text-video retrieval",
        "text to video: each distinct text queries all clips, and any clip with this text is correct; "
        f"video to text: each clip queries the distinct texts; {_TIES}",
    ),
    "msrvtt-1ka": RetrievalProtocol(
        "MSR-VTT 1k-A retrieval",
        "MSR-VTT 1k-A (Yu et al. 2018): 1,000 videos with one caption each; text to video: each caption queries all "
        f"videos; video to text: each video queries all captions; {_OWN_TEXTS_RULE}",
        num_videos=1000,
        num_captions=1,
    ),
    "paragraph": RetrievalProtocol(
        "Video-paragraph retrieval",
        "as in Zhang et al. 2018: the text of a video is the paragraph of its sentences in temporal order, and the "
        "clip is the complete video; text to video: each paragraph queries all videos; video to text: each video "
        f"queries all paragraphs; {_OWN_TEXTS_RULE}",
    ),
    "vatex": RetrievalProtocol(
        "VATEX retrieval",
        "VATEX (Wang et al. 2019; test split of Chen et al. 2020): 1,500 videos with ten captions each; text to video: "
        "each caption queries all videos; video to text: each video queries all captions, and its best own caption "
        f"determines the rank; {_OWN_TEXTS_RULE}",
        num_videos=1500,
        num_captions=10,
    ),
    CLIP_BENCHMARK: RetrievalProtocol(
        "Image-text retrieval",
        "as in CLIP_benchmark: each line of an image's txt is a caption; text to image (text → video): each caption "
        "queries all images; image to text: each image queries all captions, and its best own caption determines the "
        f"rank; {_OWN_TEXTS_RULE.replace('video', 'image')}",
    ),
}


# Protocols that determine which captions are used.
NAMED = (*(name for name in PROTOCOLS if name not in ("retrieval", CLIP_BENCHMARK)), EGOMCQ)


def _dual_softmax_rule(temperature: float) -> str:
    return (
        "cosines times their softmax over all queries of the test set, for each item, at temperature "
        f"{temperature:g} (Cheng et al. 2021); not comparable with plain recall, which scores each query separately"
    )


def protocol_captions(data_dir: Path, name: ProtocolName, *, split: str, sources: str | None) -> pa.Table:
    """Return the captions of a split for a protocol in `NAMED`, all from one source.

    For the protocol `paragraph`, the sentences of a video are joined into one caption.

    Args:
        sources: Value of `--captions.sources`. Only the first source is used. EgoMCQ has a fixed source.

    Raises:
        UserError: The split has no captions, or its captions do not fit the protocol.
    """
    captions = read_captions(data_dir)
    all_sources = pc.unique(captions["source"]).to_pylist()
    captions = select_split(captions, data_dir, split)
    if not captions.num_rows:
        raise no_captions(data_dir, split)
    # Decode the dictionaries, because the chunks of a column may have different dictionaries.
    for column_name in ("video_id", "source"):
        column_index = captions.column_names.index(column_name)
        captions = captions.set_column(column_index, column_name, captions[column_name].cast(pa.string()))
    sources_of_split = pc.unique(captions["source"]).to_pylist()
    if name == EGOMCQ:
        if EGOMCQ not in sources_of_split:
            raise UserError(
                f"split {split!r} of {data_dir} contains no EgoMCQ clips",
                hint="pass egomcq.json to prep manifest ego4d --annotations",
            )
        return captions.filter(pc.equal(captions["source"], EGOMCQ))
    source = choose_sources(sources_of_split, weights=sources, all_sources=all_sources).names[0]
    captions = captions.filter(pc.equal(captions["source"], source))
    if misfit := _find_misfit(captions, name):
        raise UserError(f"split {split!r} of {data_dir} does not fit the protocol {name}: {misfit}", hint=_HINT)
    return _join_sentences(captions) if name == "paragraph" else captions


def image_captions(samples: Samples[Any]) -> pa.Table:
    """Return the captions of images for CLIP_benchmark's protocol: each line of an image's text is a caption.

    The ID of a caption is the index of its image.
    """
    texts = [[line for line in samples.text(image).splitlines() if line.strip()] for image in range(len(samples))]
    image_M = np.repeat(np.arange(len(texts)), list(map(len, texts)))
    return pa.table(
        {
            "caption_id": image_M,
            "video_id": pa.array(map(str, image_M.tolist()), pa.string()),
            "text": pa.array([line for lines in texts for line in lines], pa.string()),
            "source": pa.array(["txt"] * len(image_M), pa.string()),
        }
    )


def _find_misfit(captions: pa.Table, name: ProtocolName) -> str:
    """Describe why captions do not fit a protocol; return "" if they fit. Missing videos or captions are allowed."""
    counts = pc.value_counts(captions["video_id"].combine_chunks())
    captions_V, videos = counts.field("counts").to_numpy(), counts.field("values")
    has_times = len(captions.group_by(["video_id", "begin_s", "end_s"]).aggregate([])) > len(videos)
    if name == "paragraph":
        return "" if has_times else "no video has several sentences with different times"
    max_videos, num_captions = PROTOCOLS[name].num_videos, PROTOCOLS[name].num_captions
    if max_videos is not None and len(videos) > max_videos:
        return f"the protocol has {max_videos:,} videos, but the split has {len(videos):,}"
    if num_captions is not None and (captions_V.max() > num_captions or np.median(captions_V) != num_captions):
        rows = np.flatnonzero(captions_V != num_captions)
        example = f"{videos[int(rows[0])]} with {captions_V[rows[0]]}"
        return (
            f"the protocol has {count_noun(num_captions, 'caption')} for each video, but {len(rows):,} of "
            f"{len(videos):,} videos have a different number, such as {example}"
        )
    return "captions of a video have different times, but the protocol ranks complete videos" if has_times else ""


def _join_sentences(captions: pa.Table) -> pa.Table:
    """Join each video's sentences in temporal order; return one caption per video, with the first sentence's ID."""
    order = [("begin_s", "ascending"), ("end_s", "ascending"), ("caption_id", "ascending")]
    columns = captions.select(["video_id", "begin_s", "end_s", "caption_id", "source", "text"])
    grouped = columns.sort_by(order).group_by(["video_id"], use_threads=False)
    videos = grouped.aggregate([("text", "list"), ("caption_id", "first"), ("source", "first")])
    return pa.table(
        {
            "caption_id": videos["caption_id_first"],
            "video_id": videos["video_id"],
            "begin_s": pa.array(np.zeros(len(videos))),
            "end_s": pa.array(np.full(len(videos), np.inf)),
            "text": pc.binary_join(videos["text_list"], " "),
            "source": videos["source_first"],
        }
    ).sort_by("caption_id")


@dataclass(frozen=True)
class Match:
    """Similarities and correct pairs of clips and texts.

    Attributes:
        is_right_NM: True if the clip and the text are a correct pair.
        clip_N: Rows of the clips in the embeddings, int64.
        row_M: First row of each text in the embeddings, int64.
        texts: Texts of a named protocol; None if the texts of the samples are used.
        incomplete: Description of the protocol's missing data; empty if no data are missing.
        notes: Remarks about the texts.
    """

    similarity_NM: NDArray[np.float32]
    is_right_NM: NDArray[np.bool_]
    clip_N: NDArray[np.int64]
    row_M: NDArray[np.int64]
    texts: tuple[str, ...] | None = None
    incomplete: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RetrievalScorer:
    """Scorer for text-video retrieval with a protocol.

    Attributes:
        name: Name of the protocol.
        captions: Captions of the protocol (`protocol_captions`); None for `retrieval`, which uses the samples' texts.
        temperature: Temperature of the additional result with dual softmax; None to omit this result.
        context_length: Maximum number of tokens per text; None if unknown, so that truncated texts are not reported.
    """

    name: RetrievalName = "retrieval"
    captions: pa.Table | None = None
    temperature: float | None = None
    context_length: int | None = CONTEXT_LENGTH

    @property
    def definition(self) -> str:
        """Definition of the protocol and, if used, of dual softmax."""
        dual = "" if self.temperature is None else f"; dual softmax: {_dual_softmax_rule(self.temperature)}"
        return PROTOCOLS[self.name].definition + dual

    def describe_missing(self, num_videos: int) -> str:
        """Describe what is missing if only `num_videos` videos are present; return "" if nothing is missing."""
        num_texts = 0 if self.captions is None else len(self.captions)
        return _missing_text(PROTOCOLS[self.name], num_videos=num_videos, num_texts=num_texts)

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        """Return the values for the result file."""
        return self.result(self.match(embeddings, embed))

    def match(self, embeddings: Embeddings, embed: EmbedTexts) -> Match:
        """Compare the clips and texts of the protocol.

        Raises:
            FailedWork: None of the protocol's clips could be decoded.
        """
        if self.captions is not None:
            return self._match_protocol(self.captions, embeddings, embed)
        row_M, text_of_N = distinct_texts(embeddings.text_key)
        is_right_NM = text_of_N[:, None] == np.arange(len(row_M))
        return Match(embeddings.video @ embeddings.text[row_M].T, is_right_NM, np.arange(len(embeddings)), row_M)

    def result(self, match: Match) -> dict[str, Any]:
        """Return the values for the result file. The key `dual_softmax` contains the scores with dual softmax."""
        protocol = PROTOCOLS[self.name]
        result: dict[str, Any] = {
            "protocol_name": self.name,
            "title": protocol.title + (" (incomplete)" if match.incomplete else ""),
            "protocol": protocol.definition,
            "incomplete": match.incomplete,
            "notes": list(match.notes),
            **asdict(score_retrieval(match.similarity_NM, match.is_right_NM)),
        }
        if self.temperature is not None:
            scores = score_retrieval(match.similarity_NM, match.is_right_NM, temperature=self.temperature)
            rule = _dual_softmax_rule(self.temperature)
            result["dual_softmax"] = {"temperature": self.temperature, "rule": rule, **asdict(scores)}
        return result

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        """Return the metrics to log during training. Metrics with dual softmax have separate names."""
        metrics: dict[str, float] = {}
        for kind in ("", "dual_softmax"):
            scores = result.get(kind, {}) if kind else result
            for direction in ("text_to_video", "video_to_text") if scores else ():
                name = f"{direction}_{kind}".rstrip("_")
                metrics |= {f"{name}_r{k}": recall for k, recall in scores[direction]["recall"].items()}
                metrics[f"{name}_median_rank"] = scores[direction]["median_rank"]
        return metrics

    def _match_protocol(self, captions: pa.Table, embeddings: Embeddings, embed: EmbedTexts) -> Match:
        id_M = captions["caption_id"].to_numpy()
        video_M = captions["video_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        clip_N = np.flatnonzero(np.isin(embeddings.caption_id, id_M))
        if not len(clip_N):
            raise FailedWork(f"none of the clips of the protocol {self.name} could be decoded")
        caption_N = np.searchsorted(id_M, embeddings.caption_id[clip_N])
        # With one caption per video, the captions have already been embedded with the clips.
        if len(np.unique(video_M)) == len(video_M):
            rows, text_ME = caption_N, embeddings.text[clip_N]
        else:
            rows, text_ME = np.flatnonzero(np.isin(video_M, video_M[caption_N])), None
        texts = tuple(captions["text"].take(pa.array(rows)).to_pylist())
        text_ME = embed(texts) if text_ME is None else text_ME
        is_right_NM = video_M[caption_N][:, None] == video_M[rows]
        return Match(
            embeddings.video[clip_N] @ text_ME.T,
            is_right_NM,
            clip_N,
            row_M=clip_N[is_right_NM.argmax(axis=0)],
            texts=texts,
            incomplete=_missing_text(PROTOCOLS[self.name], num_videos=len(clip_N), num_texts=len(texts)),
            notes=tuple(_notes(texts, source=captions["source"][0].as_py(), context_length=self.context_length)),
        )


def _missing_text(protocol: RetrievalProtocol, *, num_videos: int, num_texts: int) -> str:
    if protocol.num_videos is None or protocol.num_captions is None:
        return ""
    num_captions = protocol.num_videos * protocol.num_captions
    if (num_videos, num_texts) == (protocol.num_videos, num_captions):
        return ""
    return (
        f"{num_videos:,} of {protocol.num_videos:,} videos and {num_texts:,} of {num_captions:,} captions of the "
        "protocol: not comparable with published numbers"
    )


def _notes(texts: tuple[str, ...], *, source: str, context_length: int | None) -> list[str]:
    num_truncated = 0
    if context_length is not None:
        tokenize = load_tokenizer(context_length)
        num_truncated = sum(bool(tokenize(text)[-1]) for text in texts)
    num_equal = len(texts) - len(set(texts))
    notes = [f"captions of source {source}"]
    if num_equal:
        notes.append(f"{count_noun(num_equal, 'duplicate text')}")
    if num_truncated:
        notes.append(
            f"{count_noun(num_truncated, 'text')} with {context_length} tokens or more, truncated to {context_length}"
        )
    return notes

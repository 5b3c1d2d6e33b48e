"""Protocols of text-video retrieval by name: texts and clips, what is correct, and whether the data fit.

A protocol is the rule of a published benchmark. Data that contradict it are refused; data with a part of its videos are
scored, and the result is called incomplete. Sources and differences from public code: docs/evaluation.md.

Shape suffixes: N clips, M texts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import read_captions
from clipmill.train.data.caption_choice import choose_sources
from clipmill.train.data.caption_rows import no_captions
from clipmill.train.data.chunk_table import rows_of
from clipmill.train.data.chunks import videos_of_split
from clipmill.train.models.text import CONTEXT_LENGTH, load_tokenizer
from clipmill.train.tasks.dual_encoder.embeddings import Embeddings, EmbedTexts, distinct_texts
from clipmill.train.tasks.dual_encoder.metrics import score_retrieval
from clipmill.train.tasks.dual_encoder.settings import ProtocolName, RetrievalName

OF_IMAGES: RetrievalName = "clip-benchmark"
EGOMCQ: ProtocolName = "egomcq"  # and the source of its clips
_TIES = "ties count against the model"
_OWN = f"only a video's own texts are correct for it, even where two videos have equal texts; {_TIES}"
_HINT = "use --protocol retrieval (in training --evaluate.protocol), or the data of this benchmark"


@dataclass(frozen=True)
class RetrievalProtocol:
    """A protocol of text-video retrieval.

    Attributes:
        title: in tables.
        definition: what is ranked among what, what is correct, and the source.
        num_videos, num_captions: of the benchmark's test set, and of each of its videos; None if they may differ.
    """

    title: str
    definition: str
    num_videos: int | None = None
    num_captions: int | None = None


PROTOCOLS: dict[str, RetrievalProtocol] = {
    "retrieval": RetrievalProtocol(
        "Text-video retrieval",
        "text to video: each distinct text among all clips, any clip with that text is correct; "
        f"video to text: each clip among the distinct texts; {_TIES}",
    ),
    "msrvtt-1ka": RetrievalProtocol(
        "MSR-VTT 1k-A retrieval",
        "MSR-VTT 1k-A (Yu et al. 2018): 1,000 videos with one caption each; text to video: each caption among all "
        f"videos; video to text: each video among all captions; {_OWN}",
        num_videos=1000,
        num_captions=1,
    ),
    "paragraph": RetrievalProtocol(
        "Video-paragraph retrieval",
        "as Zhang et al. 2018: the sentences of a video, joined in order of time, are its text, and the whole "
        "video is its clip; text to video: each paragraph among all videos; video to text: each video among all "
        f"paragraphs; {_OWN}",
    ),
    "vatex": RetrievalProtocol(
        "VATEX retrieval",
        "VATEX (Wang et al. 2019; test split of Chen et al. 2020): 1,500 videos with ten captions each; text to video: "
        "each caption among all videos; video to text: each video among all captions, by the best of its own ten; "
        f"{_OWN}",
        num_videos=1500,
        num_captions=10,
    ),
    OF_IMAGES: RetrievalProtocol(
        "Image-text retrieval",
        "as CLIP_benchmark: each line of an image's txt is a caption; text to image (text → video): each caption among "
        "all images; image to text: each image among all captions, by the best of its own; "
        f"{_OWN.replace('video', 'image')}",
    ),
}


# Of benchmarks: they have captions of their own.
NAMED = (*(name for name in PROTOCOLS if name not in ("retrieval", OF_IMAGES)), EGOMCQ)


def _dual_softmax_rule(temperature: float) -> str:
    return (
        "cosines times their softmax over all queries of the test set together, of each item, at temperature "
        f"{temperature:g} (Cheng et al. 2021); not comparable with plain recall, where a query is alone"
    )


def protocol_captions(data_dir: Path, name: ProtocolName, *, split: str, sources: str | None) -> pa.Table:
    """The captions of a split as a protocol of `NAMED` has them, of one source; paragraphs are one caption each.

    Args:
        sources: `--captions.sources`, whose first one is used; EgoMCQ has its own.

    Raises:
        UserError: the captions contradict the protocol.
    """
    captions = read_captions(data_dir)
    elsewhere = pc.unique(captions["source"]).to_pylist()
    captions = captions.filter(pa.array(rows_of(captions["video_id"], videos_of_split(data_dir, split)) >= 0))
    if not captions.num_rows:
        raise no_captions(data_dir, split)
    for name_of_column in ("video_id", "source"):  # dictionaries, which may differ between chunks
        number = captions.column_names.index(name_of_column)
        captions = captions.set_column(number, name_of_column, captions[name_of_column].cast(pa.string()))
    there = pc.unique(captions["source"]).to_pylist()
    if name == EGOMCQ:
        if EGOMCQ not in there:
            raise UserError(
                f"split {split!r} of {data_dir} has no clips of EgoMCQ",
                hint="give egomcq.json to prep manifest ego4d --annotations",
            )
        return captions.filter(pc.equal(captions["source"], EGOMCQ))
    first = choose_sources(there, wanted=sources, elsewhere=elsewhere).names[0]
    captions = captions.filter(pc.equal(captions["source"], first))
    if misfit := _misfit(captions, name):
        raise UserError(f"split {split!r} of {data_dir} is not for the protocol {name}: {misfit}", hint=_HINT)
    return _join_sentences(captions) if name == "paragraph" else captions


def _misfit(captions: pa.Table, name: ProtocolName) -> str:
    """What contradicts a protocol; empty if nothing does. A part of its videos or captions does not."""
    counts = pc.value_counts(captions["video_id"].combine_chunks())
    num_N, videos = counts.field("counts").to_numpy(), counts.field("values")
    has_times = len(captions.group_by(["video_id", "begin_s", "end_s"]).aggregate([])) > len(num_N)
    if name == "paragraph":
        return "" if has_times else "no video has several sentences with different times"
    most, wanted = PROTOCOLS[name].num_videos, PROTOCOLS[name].num_captions
    if most is not None and len(num_N) > most:
        return f"the protocol has {most:,} videos, and the split {len(num_N):,}"
    if wanted is not None and (num_N.max() > wanted or np.median(num_N) != wanted):
        other = np.flatnonzero(num_N != wanted)
        return (
            f"the protocol has {count_noun(wanted, 'caption')} for each video, and {len(other):,} of {len(num_N):,} "
            f"videos have another number, such as {videos[int(other[0])]} with {num_N[other[0]]}"
        )
    return "captions of a video have different times, and the protocol ranks whole videos" if has_times else ""


def _join_sentences(captions: pa.Table) -> pa.Table:
    """A caption for each video: its sentences in order of time, and the whole video; the id is that of the first."""
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
    """Similarities of clips and texts, and which belong together.

    Attributes:
        clip_N: int64, rows of the embeddings.
        row_M: int64, the first of these rows that has the text.
        texts: of a named protocol; None for those of the samples.
        incomplete: what the data lack of the protocol's; empty for nothing.
        notes: what else is to know.
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
    """Text-video retrieval by a named protocol.

    Attributes:
        captions: of the protocol (`protocol_captions`); None for `retrieval`, whose texts are those of the samples.
        temperature: of dual softmax, which has a result of its own; None for none.
    """

    name: RetrievalName = "retrieval"
    captions: pa.Table | None = None
    temperature: float | None = None
    context_length: int | None = CONTEXT_LENGTH

    @property
    def definition(self) -> str:
        """That of the protocol, and of dual softmax."""
        dual = "" if self.temperature is None else f"; dual softmax: {_dual_softmax_rule(self.temperature)}"
        return PROTOCOLS[self.name].definition + dual

    def missing(self, num_videos: int) -> str:
        """What `num_videos` with their captions lack of the protocol's; empty for nothing."""
        num_texts = 0 if self.captions is None else len(self.captions)
        return _missing_text(PROTOCOLS[self.name], num_videos=num_videos, num_texts=num_texts)

    def score(self, embeddings: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        """The result as plain values."""
        return self.result(self.match(embeddings, embed_texts))

    def match(self, embeddings: Embeddings, embed_texts: EmbedTexts) -> Match:
        """Clips and texts of the protocol; raises FailedWork if no clip of it could be decoded."""
        if self.captions is not None:
            return self._named(self.captions, embeddings, embed_texts)
        row_M, text_of_N = distinct_texts(embeddings.text_key)
        is_right_NM = text_of_N[:, None] == np.arange(len(row_M))
        return Match(embeddings.video @ embeddings.text[row_M].T, is_right_NM, np.arange(len(embeddings)), row_M)

    def result(self, match: Match) -> dict[str, Any]:
        """The result of a match; that of dual softmax is apart."""
        protocol = PROTOCOLS[self.name]
        result: dict[str, Any] = {
            "protocol_name": self.name,
            "title": protocol.title + (" (incomplete)" if match.incomplete else ""),
            "protocol": protocol.definition,
            "incomplete": match.incomplete,
            "notes": list(match.notes),
            **score_retrieval(match.similarity_NM, match.is_right_NM).as_json(),
        }
        if self.temperature is not None:
            scores = score_retrieval(match.similarity_NM, match.is_right_NM, temperature=self.temperature)
            rule = _dual_softmax_rule(self.temperature)
            result["dual_softmax"] = {"temperature": self.temperature, "rule": rule, **scores.as_json()}
        return result

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        """The metrics that are logged during training; those of dual softmax have names of their own."""
        metrics: dict[str, float] = {}
        for kind in ("", "dual_softmax"):
            scored = result.get(kind, {}) if kind else result
            for direction in ("text_to_video", "video_to_text") if scored else ():
                name = f"{direction}_{kind}".rstrip("_")
                metrics |= {f"{name}_r{k}": share for k, share in scored[direction]["recall"].items()}
                metrics[f"{name}_median_rank"] = scored[direction]["median_rank"]
        return metrics

    def _named(self, captions: pa.Table, embeddings: Embeddings, embed_texts: EmbedTexts) -> Match:
        id_M = captions["caption_id"].to_numpy()
        video_M = captions["video_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        clip_N = np.flatnonzero(np.isin(embeddings.caption_id, id_M))
        if not len(clip_N):
            raise FailedWork(f"none of the clips of the protocol {self.name} could be decoded")
        own_N = np.searchsorted(id_M, embeddings.caption_id[clip_N])
        if len(np.unique(video_M)) == len(video_M):
            shown, text_ME = own_N, embeddings.text[clip_N]
        else:
            shown, text_ME = np.flatnonzero(np.isin(video_M, video_M[own_N])), None
        texts = tuple(captions["text"].take(pa.array(shown)).to_pylist())
        text_ME = embed_texts(texts) if text_ME is None else text_ME
        is_right_NM = video_M[own_N][:, None] == video_M[shown]
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
    num_all = protocol.num_videos * protocol.num_captions
    if (num_videos, num_texts) == (protocol.num_videos, num_all):
        return ""
    return (
        f"{num_videos:,} of {protocol.num_videos:,} videos and {num_texts:,} of {num_all:,} captions of the protocol: "
        "not comparable with published numbers"
    )


def _notes(texts: tuple[str, ...], *, source: str, context_length: int | None) -> list[str]:
    num_cut = 0
    if context_length is not None:
        tokenize = load_tokenizer(context_length)
        num_cut = sum(bool(tokenize(text)[-1]) for text in texts)
    num_equal = len(texts) - len(set(texts))
    notes = [f"captions of source {source}"]
    if num_equal:
        notes.append(f"{count_noun(num_equal, 'text')} equal to an earlier one")
    if num_cut:
        notes.append(
            f"{count_noun(num_cut, 'text')} with {context_length} tokens or more, which are cut after {context_length}"
        )
    return notes

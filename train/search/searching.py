"""Implementation of `train search`: find the embedded clips that are most similar to texts or to example clips."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import publish_bytes
from clipmill.shards.pages.templates import load_template
from clipmill.train.evaluation.player import Player
from clipmill.train.search.folder import VIDEO, EmbeddedClip, EmbeddingFolder
from clipmill.train.search.nearest import find_nearest

Vectors = NDArray[np.float32]
EncodeTexts = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True)
class Hit:
    """A clip in a search result, and its cosine similarity to the query."""

    score: float
    clip: EmbeddedClip


@dataclass(frozen=True)
class Result:
    """Result of one query.

    Attributes:
        query: Text; or the key or row of the example clip, as the user wrote it.
        example: Example clip, which is not among the hits; None for a text query.
        hits: Most similar clips, by descending score.
    """

    query: str
    example: EmbeddedClip | None
    hits: tuple[Hit, ...]

    @property
    def title(self) -> str:
        """Heading for the query."""
        return self.query if self.example is None else f"like “{self.example.text or self.example.key}”"


def search(
    folder: EmbeddingFolder,
    texts: Sequence[str],
    *,
    like: Sequence[str] = (),
    top: int,
    encode: EncodeTexts,
    on_progress: Callable[[int], object] = lambda num_rows: None,
) -> list[Result]:
    """Find the `top` most similar clips for each text and each example clip, in one pass over the embeddings.

    Args:
        like: Keys or rows of the example clips.
        encode: Function that takes texts and returns unit-length embeddings [Q, E]; called only if there are texts.
        on_progress: Function that is called with the number of rows of each finished block.

    Raises:
        UserError: There is no query, a query is empty, an example clip is unknown, or the stored features cannot be
            compared with a query.
    """
    _check_queries(folder, texts, like=like, top=top)
    examples = [folder.row_of(name) for name in like]
    vectors = [folder.vector(row) for row in examples]
    query_QE = np.stack([*(encode(texts) if texts else ()), *vectors]).astype(np.float32, copy=False)
    matches = find_nearest(
        folder.path / VIDEO,
        query_QE,
        count=top + bool(examples),  # an example also finds itself
        is_unit_length=folder.record["features"] == "embedding",
        on_progress=on_progress,
    )
    clips = {clip.row: clip for clip in folder.clips([*examples, *np.unique(matches.row_QK).tolist()])}
    queries = [*((text, None) for text in texts), *((name, row) for name, row in zip(like, examples, strict=True))]
    results = []
    for (query, example), row_K, score_K in zip(
        queries, matches.row_QK.tolist(), matches.score_QK.tolist(), strict=True
    ):
        hits = [Hit(score, clips[row]) for row, score in zip(row_K, score_K, strict=True) if row != example]
        results.append(Result(query, None if example is None else clips[example], tuple(hits[:top])))
    return results


def search_folder(
    folder: EmbeddingFolder,
    texts: Sequence[str],
    *,
    like: Sequence[str],
    top: int,
    weights: str | None,
    device: Literal["auto", "cpu", "cuda"],
) -> list[Result]:
    """Encode the texts with the weights that embedded the clips, then search and show the progress.

    Raises:
        UserError: See `search`. The error is also raised if the weights are missing or have changed.
    """
    _check_queries(folder, texts, like=like, top=top)
    vectors = _encode(folder, texts, weights=weights, device=device) if texts else None
    with Activity("searching") as activity:
        add = activity.adder(folder.num_clips, unit="clip")
        return search(folder, texts, like=like, top=top, encode=lambda _: cast(Vectors, vectors), on_progress=add)


def _encode(
    folder: EmbeddingFolder, texts: Sequence[str], *, weights: str | None, device: Literal["auto", "cpu", "cuda"]
) -> NDArray[np.float32]:
    """Encode texts with the weights that embedded the clips."""
    from clipmill.train.inference import load_model

    record, clip = folder.record["weights"], folder.record["clip"]
    source = str(record["source"]) if weights is None else weights
    clip_settings = {name: clip[name] for name in ("num_frames", "sampling", "size_px")}
    try:
        with Activity(f"loading {source}"):
            model = load_model(source, device=device, **clip_settings)
    except UserError as error:
        error.add_hint("if the weights have moved, pass their location with --weights")
        raise
    if model.identity != record["identity"]:
        raise UserError(
            f"{source} does not contain the weights that computed the embeddings in {folder.path}: "
            f"{record['description']}",
            hint="pass the original weights with --weights, or run train embed again with a new --out",
        )
    return model.encode_text(texts).cpu().numpy()


def _check_queries(folder: EmbeddingFolder, texts: Sequence[str], *, like: Sequence[str], top: int) -> None:
    if not texts and not like:
        raise UserError("there is no query", hint='pass a text, such as "a dog catches a frisbee", or --like KEY')
    if any(not text.strip() for text in texts):
        raise UserError("a query is empty", hint='pass a text, such as "a dog catches a frisbee"')
    if top < 1:
        raise UserError(f"--top {top} is less than 1", hint="use 1 or more", flags=("--top",))
    features = folder.record["features"]
    if features == "tokens":
        raise UserError(
            f"{folder.path} holds all tokens of each clip, but a search compares one vector per clip",
            hint="run train embed with --features pooled, or without --features, and a new --out",
        )
    if texts and features != "embedding":
        raise UserError(
            f"{folder.path} holds {features} features, which cannot be compared with texts",
            hint="use --like KEY to search by example, or embed the clips with the weights of a dual encoder",
        )


def result_json(folder: EmbeddingFolder, results: Sequence[Result]) -> dict[str, Any]:
    """Return the results as a JSON-serialisable dict."""
    return {
        "folder": str(folder.path),
        "weights": folder.record["weights"],
        "num_clips": folder.num_clips,
        "results": [
            {
                "query": result.query,
                "like": None if result.example is None else asdict(result.example),
                "found": [{"score": hit.score, **asdict(hit.clip)} for hit in result.hits],
            }
            for result in results
        ],
    }


def describe(results: Sequence[Result]) -> str:
    """Return the results as text, with the score, key, times, caption and file of each clip."""
    lines = []
    for result in results:
        lines.append(on_one_line(result.title))
        width = max((len(hit.clip.key) for hit in result.hits), default=0)
        for rank, hit in enumerate(result.hits, start=1):
            clip = hit.clip
            times = f"{clip.begin_s:8.2f}-{clip.end_s:.2f} s"
            details = filter(None, (on_one_line(clip.text or ""), on_one_line(clip.file)))
            lines.append(f"{rank:4}  {hit.score:6.3f}  {clip.key:{width}}  {times:20}  {'  '.join(details)}".rstrip())
    return "\n".join(lines)


def write_search_page(
    path: Path, folder: EmbeddingFolder, results: Sequence[Result], *, shards: str | None = None
) -> int:
    """Publish a page that plays the clips of the results.

    Args:
        shards: Current location of the data folder. Default: the location that `train embed` recorded.

    Returns:
        The number of clips that could not be read or decoded. The page shows the reason in place of each such clip.

    Raises:
        UserError: The data cannot be opened, or contain none of the videos in the results.
    """
    record = folder.record
    data = {**record["data"], **({} if shards is None else {"shards": shards})}
    player = Player(str(data["shards"]), split=str(data["split"]))
    clips = [hit.clip for result in results for hit in result.hits]
    if clips and not any(map(player.has_chunks, clips)):
        raise UserError(
            f"the embeddings in {folder.path} were not computed from {data['shards']}: split {data['split']!r} "
            f"contains none of the videos in the results, such as {clips[0].video}",
            hint=f"use --shards with the data folder that was embedded: {record['data']['description']}",
        )
    facts = {
        "weights": record["weights"]["description"],
        "clip": record["clip"]["description"],
        "data": data["description"],
        "folder": str(folder.path.resolve()),
    }
    template = load_template(Path(__file__).with_name("search.html.j2"))
    content = template.render(
        results=results, show=player.show, clips=count_noun(folder.num_clips, "clip"), data=data, facts=facts
    )
    publish_bytes(path, content.encode("utf-8", errors="replace"))
    return player.num_missing

"""Captioned clips: spans of videos with all captions of each span, and frames from the `video` column."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from clipmill.manifests.caption_spans import CaptionSpans, open_stored_captions
from clipmill.manifests.store import num_captions_of, read_captions, read_videos
from clipmill.train.config.clips import CaptionSettings
from clipmill.train.data.caption_rows import make_clip_table
from clipmill.train.data.captions import Captions, RowCaptions
from clipmill.train.data.chunks import ClipQuery, ClipReader, query_clips
from clipmill.train.data.query import DataQuery
from clipmill.train.data.samples import Samples, SampleTable, Source, open_fingerprint, open_table
from clipmill.train.models.text import Tokenize

if TYPE_CHECKING:
    from clipmill.train.data.relevancy import RelevantCaptions
    from clipmill.train.data.stored_text import StoredText
    from clipmill.train.data.views import GroupedCaptions

ALL_CAPTIONS = CaptionSettings()
MakeCaptions = Callable[[RowCaptions, pa.ChunkedArray], Captions]


def open_captioned_clips(
    query: ClipQuery,
    *,
    tokenize: Tokenize | None = None,
    captions: CaptionSettings = ALL_CAPTIONS,
    has_stored_text: bool = False,
    each_caption: bool = False,
    table: pa.Table | None = None,
    make_captions: MakeCaptions | None = None,
) -> Samples[ClipReader]:
    """Open the captioned clips of a split. A clip is a span of a video with all captions of this span.

    Training draws one of the captions (clipmill.train.data.captions); an evaluation uses the first caption of the first
    source. Batches contain `tokens` if there is a tokenizer, `text` with stored embeddings, and otherwise `caption`.

    Args:
        query: Query for the clips. Its conditions on captions select the captions that may be shown.
        tokenize: Function that tokenizes captions; None to keep captions as text.
        captions: Settings for the choice of a clip's caption.
        has_stored_text: True to replace captions with the embeddings that `prep text` stored. Captions without an
            embedding are omitted.
        each_caption: True to make a clip for each caption instead of each span, for evaluations that score every
            caption.
        table: Table of captions, with the columns of the manifest's table; None for the captions of the manifest.
        make_captions: Function that makes the `Captions`, for forms other than tokens, text and embeddings.

    Raises:
        UserError: The data do not exist, or no clip is usable.
    """
    data_dir, chunks = query.data_dir, query.open_chunks(has_captions=True)
    groups: GroupedCaptions | None = None
    if query.views:
        from clipmill.train.data import views

        groups = views.open_groups(query, chunks, table)
        table = groups.captions
    stored_text: StoredText | None = None
    if has_stored_text:
        from clipmill.train.data import stored_text as stored_texts

        stored_text = stored_texts.StoredText(data_dir, chunks.video_ids, videos=chunks.videos, tars=query.tars)
    spans = (
        open_stored_captions(data_dir)
        if table is None
        else CaptionSpans.from_table(table, read_videos(data_dir, columns=["video_id"])["video_id"].combine_chunks())
    )

    def make() -> SampleTable:
        spans.verify()
        return make_clip_table(
            spans,
            chunks,
            data_dir=data_dir,
            split=query.split,
            weights=captions.sources,
            stored_text=stored_text,
            each_caption=each_caption,
            table=table,
        )

    text_mark = () if stored_text is None else stored_text.depends_on
    depends_on = (*chunks.depends_on, *chunks.selection.depends_on, text_mark, captions, each_caption, spans.mark)
    num_rows = chunks.num_rows + num_captions_of(data_dir) if table is None else 0
    clip_table = open_table("captions", make, depends_on=depends_on, num_rows=num_rows)
    assert clip_table.captions is not None
    caption_draw: RelevantCaptions | None = None
    if captions.min_relevancy is not None and len(clip_table):
        from clipmill.train.data import relevancy

        labelled = read_captions(data_dir) if table is None else table
        caption_draw = relevancy.RelevantCaptions(clip_table.captions, labelled, min_relevancy=captions.min_relevancy)
    if make_captions is None:
        make_captions = partial(Captions, tokenize=tokenize, stored_text=stored_text, caption_draw=caption_draw)
    clip_captions = make_captions(clip_table.captions, spans.texts)  # spans.verify() has checked the files
    variant_name = chunks.variant_name
    if stored_text is not None:
        variant_name = f"{variant_name} and {stored_text.variant_name}"
    facts: tuple[object, ...] = (variant_name, query.loading.group, captions.min_relevancy, chunks.selection.text)
    reader: Any
    if groups is None:
        reader = ClipReader(chunks, clip_table, query.shape, annotations=[clip_captions])
    else:
        reader, facts = groups.reader(clip_table, query.shape, annotations=[clip_captions]), (*facts, *groups.facts)
    source = Source(
        split=query.split,
        variant_name=variant_name,
        fingerprint=lambda: open_fingerprint(
            clip_table, (*facts, *clip_captions.facts()), depends_on=depends_on, num_rows=num_rows
        ),
        empty_error=query.empty_error(chunks),
        mixture_facts={} if stored_text is None else {"text embeddings": stored_text.encoder},
        text_width=None if stored_text is None else stored_text.width,
    )
    return Samples(clip_table, reader, source, query.loading, captions=clip_captions)


def open_captions(query: DataQuery) -> Samples[ClipReader]:
    """Open the captioned clips that a task needs; raise UserError as `open_captioned_clips` does."""
    return open_captioned_clips(
        query_clips(query),
        tokenize=query.tokenize,
        captions=query.captions if query.table is None else ALL_CAPTIONS,
        table=query.table,
        has_stored_text=query.has_stored_text,
        each_caption=query.each_caption,
    )

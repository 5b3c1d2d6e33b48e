"""The HTML of a page of chunks. All text that comes from data is escaped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from clipmill.manifests.quoting import counted
from clipmill.manifests.units import clock, short_number, size_text
from clipmill.prep.core.histograms import HISTOGRAM_STYLE, histogram_html
from clipmill.prep.core.pages import page_head
from clipmill.prep.video.page.cards import CaptionLine, Card
from clipmill.prep.video.page.clips import data_uri
from clipmill.prep.video.page.header import SECONDS_IN, Header, time_unit
from clipmill.prep.video.page.pictures import PREVIEW_S

_MAX_CAPTIONS = 3  # before the others are folded
_MAX_FOLDED, _MAX_FOLDED_CHARS = 100, 20_000
_MAX_CAPTION_CHARS = 1000
_MAX_HOLES = 20
_MAX_OPTIONS = 400
SCRIPT = Path(__file__).with_name("page.js").read_text()
STYLE = HISTOGRAM_STYLE + Path(__file__).with_name("page.css").read_text()


@dataclass(frozen=True)
class Pages:
    """The pages that belong together: number 1, `name`, beside the folder, and the others in it, with a list of all.

    Attributes:
        folder: address of the folder beside the first page.
        num_shown: number of chunks on all pages.
    """

    name: str
    folder: str
    number: int
    count: int
    num_shown: int

    def address(self, number: int) -> str:
        """Return the address of a page from this one."""
        if number == self.number:
            return ""
        if number == 1:
            return f"../{quote(self.name)}"
        return f"{self.inside}page-{number}.html"

    @property
    def inside(self) -> str:
        """Address of the folder from this page."""
        return self.folder if self.number == 1 else ""

    def nav(self, label: str) -> Iterator[str]:
        """Yield the links to the other pages."""
        if self.count == 1:
            return
        near = {1, self.count, *range(max(1, self.number - 2), min(self.count, self.number + 2) + 1)}
        yield f'<nav aria-label="{label}">'
        if self.number > 1:
            yield f'<a rel="prev" href="{self.address(self.number - 1)}">Previous</a>'
        last = 0
        for number in sorted(near):
            yield "<span>…</span>" if number > last + 1 else ""
            if number == self.number:
                yield f'<span aria-current="page">{number}</span>'
            else:
                yield f'<a href="{self.address(number)}" aria-label="Page {number}">{number}</a>'
            last = number
        if self.number < self.count:
            yield f'<a rel="next" href="{self.address(self.number + 1)}">Next</a>'
        yield f'<a data-all href="{self.inside}all.html">Search all {self.num_shown:,} chunks</a></nav>'


def chunk_page(cards: Sequence[Card], header: Header, pages: Pages, *, media: str) -> Iterator[str]:
    """Yield the lines of a page; only the first one has all of the header."""
    title = header.title if pages.number == 1 else f"{header.title}, page {pages.number}"
    yield page_head(title, style=STYLE, script=SCRIPT, media=media)
    yield f"<header><h1>{escape(title)}</h1><p>{escape(header.summary)}</p>"
    if pages.number == 1:
        yield from _header_html(header)
    yield "</header>"
    yield from pages.nav("Pages")
    yield from _filters_html(cards)
    yield '<main><div class="chunks">'
    for order, card in enumerate(cards):
        yield from card_html(card, order=order, inside=pages.inside)
    yield '</div><p class="none" hidden>No chunk on this page matches.</p></main>'
    yield from pages.nav("Pages, again")
    yield f"<script>{SCRIPT}</script></body></html>"


def list_page(cards: Sequence[tuple[Card, int]], header: Header, pages: Pages) -> Iterator[str]:
    """Yield the lines of the list of all chunks, without pictures, with links to their pages."""
    title = f"{header.title}, list of chunks"
    yield page_head(title, style=STYLE, script=SCRIPT)
    yield f"<header><h1>{escape(title)}</h1><p>{escape(header.summary)}</p></header>"
    yield f'<nav aria-label="Pages"><a href="{pages.address(1)}">Pictures and distributions</a></nav>'
    yield from _filters_html([card for card, _ in cards])
    yield '<main><div class="chunks">'
    for order, (card, number) in enumerate(cards):
        yield from card_html(card, order=order, inside="", link=f"{pages.address(number)}#{escape(quote(card.key))}")
    yield '</div><p class="none" hidden>No chunk matches.</p></main>'
    yield f"<script>{SCRIPT}</script></body></html>"


def _header_html(header: Header) -> Iterator[str]:
    words, stored = (escape(text) for text in header.settings)
    yield f'<p>{words}</p><details><summary>All settings</summary><code class="soft">{stored}</code></details>'
    yield '<ul class="tiles">'
    for value, what in header.tiles:
        yield f"<li><b>{escape(value)}</b>{escape(what)}</li>"
    yield "</ul>"
    if header.holes:
        more = len(header.holes) - _MAX_HOLES
        yield f'<div class="holes"><h2>{counted(len(header.holes), "shard")} missing or damaged</h2><ul>'
        yield from (f"<li>{escape(hole)}</li>" for hole in header.holes[:_MAX_HOLES])
        yield f"<li>and {more:,} more</li>" if more > 0 else ""
        yield '</ul><p class="small">Run <code>prep verify</code> for the command that makes them again.</p></div>'
    if len(header.splits) > 1:
        unit = time_unit(sum(split.seconds for split in header.splits))
        yield '<div class="wide"><table><tr><th scope="col">Split</th><th scope="col">Videos</th>'
        yield f'<th scope="col">Chunks</th><th scope="col">{unit.title()}</th><th scope="col">Size</th></tr>'
        for split in header.splits:
            yield f'<tr><th scope="row">{escape(split.name)}</th><td>{split.num_videos:,}</td>'
            time = short_number(split.seconds / SECONDS_IN[unit])
            yield f"<td>{split.num_chunks:,}</td><td>{time}</td>"
            yield f"<td>{size_text(split.size_bytes)}</td></tr>"
        yield "</table></div>"
    yield '<div class="plots">'
    for shown in header.distributions:
        yield f'<section><h2>{escape(shown.title)}</h2><p class="soft small">{escape(shown.about)}</p>'
        yield from histogram_html(shown.histogram, title=shown.title, unit=shown.unit)
        yield "</section>"
    yield "</div>"
    for note in (*header.notes, header.clips):
        yield f'<p class="soft small">{escape(note)}</p>' if note else ""


def _filters_html(cards: Sequence[Card]) -> Iterator[str]:
    yield '<form class="filters" role="search" hidden><div>'
    yield '<label>Search captions, keys and sources<input type="search" name="q" autocomplete="off"></label>'
    for name, label, values in (
        ("split", "Split", {card.split: None for card in cards}),
        ("dataset", "Dataset", {card.dataset: None for card in cards if card.dataset}),
        ("video", "Source video", {card.video_id: None for card in cards}),
    ):
        if 1 < len(values) <= _MAX_OPTIONS:
            options = "".join(f"<option>{escape(value)}</option>" for value in values)
            yield f'<label>{label}<select name="{name}"><option value="">all</option>{options}</select></label>'
    orders = [("order", "video and time"), ("length", "longest first"), ("bitrate", "highest bit rate first")]
    orders += [("captions", "most captions first")] if any(card.captions for card in cards) else []
    orders += [("motion", "most motion first")] if any("motion" in card.scores for card in cards) else []
    options = "".join(f'<option value="{value}">{label}</option>' for value, label in orders)
    yield f'<label>Order<select name="sort">{options}</select></label>'
    yield '<button type="button" hidden>Clear</button><output role="status"></output></div></form>'


def card_html(card: Card, *, order: int, inside: str, link: str = "") -> Iterator[str]:
    """Yield the lines of a card; with a `link` to its page, a card of the list, without pictures and clip."""
    motion = f' data-motion="{card.scores["motion"]:.6g}"' if "motion" in card.scores else ""
    yield f'<article id="{escape(card.key)}" data-split="{escape(card.split)}" data-dataset="{escape(card.dataset)}"'
    yield f' data-video="{escape(card.video_id)}" data-order="{order}" data-length="{card.seconds:.3f}"'
    yield f' data-bitrate="{card.kbit_s:.1f}" data-captions="{len(card.captions)}"{motion}>'
    times = f"{clock(card.begin_s, decimals=3)} to {clock(card.end_s, decimals=3)}"
    if card.problem is not None:
        yield f'<p class="bad lost problem">{escape(card.problem)}</p>'
    elif not link:
        yield from _clip_html(card, times=times, inside=inside)
    key = f'<a href="{link}"><code>{escape(card.key)}</code></a>' if link else f"<code>{escape(card.key)}</code>"
    yield f'<p class="position"><time>{escape(times)}</time><span class="badge">{escape(card.split)}</span></p>'
    source = card.source_id if card.source_id not in ("", card.video_id) else ""
    of_source = " · ".join(escape(text) for text in (card.video_id, source, card.dataset) if text)
    yield f'<p class="source small" title="{escape(card.path)}"><bdi>{of_source}</bdi><br>{key}</p>'
    facts = (card.facts, f"{card.seconds:.4g} s", f"{short_number(card.kbit_s)} kbit/s", card.place)
    yield f'<p class="soft small">{escape(" · ".join(fact for fact in facts if fact))}</p>'
    if card.scores:
        scores = "".join(f"<div><dt>{name}</dt><dd>{short_number(of)}</dd></div>" for name, of in card.scores.items())
        yield f'<dl class="scores">{scores}</dl>'
    yield from _captions_html(card.captions)
    yield "</article>"


def _clip_html(card: Card, *, times: str, inside: str) -> Iterator[str]:
    images = "".join(
        f'<img alt="Frame at {clock(card.begin_s + picture.time_s, decimals=1)}"'
        f' src="{data_uri(picture.jpeg, "image/jpeg")}">'
        for picture in card.pictures
    )
    frames = "frames one" if len(card.pictures) == 1 else "frames"
    yield f'<div class="clip"><div class="{frames}">{images}</div>'
    if card.clip is not None:
        is_data = card.clip.address.startswith("data:")
        address = card.clip.address if is_data else f"{inside}{quote(card.clip.address)}"
        what = "first seconds, " if card.clip.is_preview and card.seconds > PREVIEW_S else ""
        label = escape(f"Play {card.key}, {what}{times} of {card.video_id}")
        yield f'<video controls loop muted playsinline preload="none" aria-label="{label}" src="{address}"></video>'
    yield "</div>"


def _captions_html(captions: Sequence[CaptionLine]) -> Iterator[str]:
    for caption in captions[:_MAX_CAPTIONS]:
        yield f'<p class="caption" dir="auto">{_caption_html(caption)}</p>'
    folded = captions[_MAX_CAPTIONS:]
    if not folded:
        return
    yield f"<details><summary>and {counted(len(folded), 'more caption')}</summary><ul>"
    num_listed, num_chars = 0, 0
    while num_listed < min(len(folded), _MAX_FOLDED) and num_chars < _MAX_FOLDED_CHARS:
        line = _caption_html(folded[num_listed])
        num_listed, num_chars = num_listed + 1, num_chars + len(line)
        yield f'<li dir="auto">{line}</li>'
    if num_listed < len(folded):
        yield f"<li>and {len(folded) - num_listed:,} more: run <code>prep inspect KEY</code></li>"
    yield "</ul></details>"


def _caption_html(caption: CaptionLine) -> str:
    text = caption.text
    text = text if len(text) <= _MAX_CAPTION_CHARS else f"{text[:_MAX_CAPTION_CHARS]}… ({len(text):,} characters)"
    end = "the end" if caption.end_s is None else clock(caption.end_s, decimals=1)
    return f"{escape(text)} <time>{clock(caption.begin_s, decimals=1)} to {end}</time>"

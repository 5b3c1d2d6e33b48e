"""What the template of a page of chunks shows: its title, filters and orders, its cards, and the pages beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from clipmill.prep.video.page.cards import Card
from clipmill.prep.video.page.header import Header
from clipmill.shards.pages.templates import SEARCH_SCRIPT
from clipmill.shards.score_fields import SCORES

_MAX_OPTIONS = 400
TEMPLATE = Path(__file__).with_name("chunks.html.j2")
_SCRIPT = Path(__file__).with_name("chunks.js").read_text()


@dataclass(frozen=True)
class Pages:
    """The pages that belong together: number 1, `name`, beside the folder, and the others in it, with a list of all.

    Attributes:
        folder: address of the folder beside the first page.
        number: of this page; 0 for the list.
        num_shown: number of chunks on all pages.
    """

    name: str
    folder: str
    number: int
    count: int
    num_shown: int

    @property
    def is_list(self) -> bool:
        """Whether this page is the list of all chunks, without pictures."""
        return self.number == 0

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

    @property
    def near(self) -> list[int | None]:
        """Numbers of the pages that this one links to; None where some are left out."""
        shown = {1, self.count, *range(max(1, self.number - 2), min(self.count, self.number + 2) + 1)}
        found: list[int | None] = []
        last = 0
        for number in sorted(shown):
            found += [None, number] if number > last + 1 else [number]
            last = number
        return found


def page_values(cards: Sequence[tuple[Card, int]], header: Header, pages: Pages, *, media: str) -> dict[str, Any]:
    """Return the values of the template.

    Args:
        cards: chunks of the page with the number of the page that shows their pictures.
        media: sources of clips.
    """
    part = ", list of chunks" if pages.is_list else "" if pages.number == 1 else f", page {pages.number}"
    return {
        "title": f"Chunks{part}",
        "header": header,
        "pages": pages,
        "filters": _filters([card for card, _ in cards]),
        "orders": _orders([card for card, _ in cards]),
        "cards": [
            (card, f"{pages.address(number)}#{quote(card.key)}" if pages.is_list else "") for card, number in cards
        ],
        "scripts": [SEARCH_SCRIPT, _SCRIPT],
        "media": media,
    }


def _filters(cards: Sequence[Card]) -> list[tuple[str, str, list[str]]]:
    """Return name, label and values of each filter that tells chunks apart."""
    known = (
        ("split", "Split", [card.split for card in cards]),
        ("dataset", "Dataset", [card.dataset for card in cards if card.dataset]),
        ("video", "Source video", [card.video_id for card in cards]),
    )
    distinct = ((name, label, list(dict.fromkeys(values))) for name, label, values in known)
    return [one for one in distinct if 1 < len(one[2]) <= _MAX_OPTIONS]


def _orders(cards: Sequence[Card]) -> list[tuple[str, str]]:
    orders = [("order", "video and time"), ("length", "longest first"), ("bitrate", "highest bit rate first")]
    orders += [("captions", "most captions first")] if any(card.captions for card in cards) else []
    sorting = [(score.name, score.order) for score in SCORES if score.order]
    return orders + [(name, order) for name, order in sorting if any(name in card.scores for card in cards)]

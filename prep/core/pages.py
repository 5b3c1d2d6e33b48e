"""What the HTML pages of `prep inspect --html` have in common: the request, the head with its policy, publishing.

A page loads nothing from elsewhere. Its content security policy allows pictures that are in it, its own style sheet,
and only those scripts and clips that the page names.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import folder_lock, publish_bytes, remove_temporaries
from clipmill.manifests.quoting import visible


@dataclass(frozen=True)
class PageRequest:
    """What `prep inspect --html` asks for.

    Attributes:
        path: HTML file to write.
        where: expression (clipmill.shards.where), or None.
        num_samples: number of samples to show; None for the default of the page.
        on_sample: called with (number of samples read, number to read).
    """

    path: Path
    where: str | None = None
    num_samples: int | None = None
    on_sample: Callable[[int, int], None] = lambda done, total: None


def require_page_path(path: Path) -> None:
    """Raise a UserError if a page cannot be written to `path`."""
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UserError(f"--html {path} {why}", hint="give a file in an existing folder")


def publish_page(path: Path, lines: Iterable[str]) -> int:
    """Publish a page, in which hidden characters become visible, and remove what killed commands have left of it.

    Returns:
        Its size in bytes.

    Raises:
        UserError: it cannot be written.
    """
    content = visible("\n".join(lines) + "\n").encode()
    try:
        with folder_lock(path.parent):
            remove_temporaries(path.parent, of=path.name.__eq__)
            publish_bytes(path, content)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}", hint="give another file") from None
    return len(content)


def page_head(title: str, *, style: str, script: str = "", media: str = "") -> str:
    """Return the beginning of a page up to `<body>`.

    Args:
        script: the script that the page has, and the only one that the policy allows.
        media: sources of clips, for the policy.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    policy += f"; media-src {media}" if media else ""
    if script:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
        )
    )

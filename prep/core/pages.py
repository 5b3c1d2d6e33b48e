"""What the HTML pages of `prep inspect --html` have in common: the request, and publishing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_bytes, remove_temporaries
from clipmill.shards.pages.templates import load_template


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


def publish_page(path: Path, template: Path, **values: Any) -> int:
    """Publish a page from a template, and remove what killed commands have left of it.

    Returns:
        Its size in bytes.

    Raises:
        UserError: it cannot be written.
    """
    content = load_template(template).render(**values).encode()
    try:
        with folder_lock(path.parent):
            remove_temporaries(path.parent, of=path.name.__eq__)
            publish_bytes(path, content)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}", hint="give another file") from None
    return len(content)

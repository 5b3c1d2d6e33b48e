"""Templates for the HTML pages that `prep` and `train` write, the title of a page, and its content security policy.

A page extends `page.html.j2`. Text from users and files never becomes markup: values are escaped, and their invisible
characters are made visible.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import (
    clock,
    count_noun,
    duration_text,
    escape_invisible,
    percent,
    short_number,
    size_text,
)

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_FOLDER = Path(__file__).parent
SEARCH_SCRIPT = (_FOLDER / "search.js").read_text(encoding="utf-8")
_TITLE = re.compile("<title>([^<]*) · clipmill</title>")  # title of every page
_TITLE_BYTES = 4096  # number of bytes at the start of a page in which the title must be


def page_title(path: Path) -> str | None:
    """Return the title of an HTML page that clipmill wrote; None for other files.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        title = _TITLE.search(file.read(_TITLE_BYTES).decode(errors="replace"))
    return None if title is None else html.unescape(title[1])


def require_page_path(path: Path, *, flag: str) -> None:
    """Raise a UserError if the folder of a page does not exist, or if `path` is a file that clipmill did not write."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} ({flag})", hint=f"create it, or use a different {flag}")
    if path.exists() and not (path.is_file() and page_title(path) is not None):
        raise UserError(f"{path} exists and is not a page of clipmill ({flag})", hint=f"use a different {flag}")


def load_template(path: Path) -> "Template":
    """Load a jinja2 template. It can also use the templates in this folder."""
    return _environment(path.parent).get_template(path.name)


def policy(scripts: Sequence[str], media: str = "data:") -> str:
    """Return the content security policy of a page: the page loads only clips, and runs only `scripts`.

    Args:
        media: Allowed sources of clips.
    """
    directives = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; media-src {media}"
    directives += "; base-uri 'none'; form-action 'none'"
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"{directives}; script-src {sources}" if sources else directives


@cache
def _environment(folder: Path) -> "Environment":
    """Return the jinja2 environment of a folder, so that a process compiles each template only once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([folder, _FOLDER]),
        autoescape=True,
        finalize=lambda value: (
            Markup(escape_invisible(value)) if isinstance(value, Markup) else escape_invisible(str(value))
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `markup` is only for scripts and rendered sections that come from clipmill itself.
    environment.filters |= {
        "clock": clock,
        "counted": count_noun,
        "duration": duration_text,
        "markup": Markup,
        "percent": percent,
        "policy": policy,
        "short": short_number,
        "size": size_text,
    }
    return environment

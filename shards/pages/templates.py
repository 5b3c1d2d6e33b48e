"""Load the templates of the HTML pages that `prep` and `train` write, and compute their content security policy.

A page extends `page.html.j2`. Text from users and files never becomes markup: values are escaped, and invisible
characters in them are made visible.
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
_TITLE = re.compile("<title>([^<]*) · clipmill</title>")
_TITLE_BYTES = 4096  # the title is in the first bytes of a page


def page_title(path: Path) -> str | None:
    """Return the title of an HTML page that clipmill wrote; None for other files.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        title = _TITLE.search(file.read(_TITLE_BYTES).decode(errors="replace"))
    return None if title is None else html.unescape(title[1])


def require_page_path(path: Path, *, flag: str) -> None:
    """Raise a UserError unless a page can be written to `path`.

    The folder must exist, and an existing file must be a page that clipmill wrote.

    Args:
        flag: Flag whose value is the path.
    """
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} ({flag})", hint=f"create it, or use a different {flag}")
    if path.exists() and not (path.is_file() and page_title(path) is not None):
        raise UserError(
            f"{path} ({flag}) exists, but is not a page that clipmill wrote", hint=f"use a different {flag}"
        )


def load_template(path: Path) -> "Template":
    """Load a jinja2 template. The template can also use the templates in the folder of this module."""
    return _environment(path.parent).get_template(path.name)


def policy(scripts: Sequence[str], media: str = "data:") -> str:
    """Return the content security policy of a page that runs only its own scripts and loads nothing but clips.

    Args:
        scripts: Source code of the scripts.
        media: Allowed sources of clips.
    """
    directives = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; media-src {media}"
    directives += "; base-uri 'none'; form-action 'none'"
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"{directives}; script-src {sources}" if sources else directives


@cache
def _environment(folder: Path) -> "Environment":
    """Return the jinja2 environment of a folder. The cache lets a process compile each template only once."""
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
    # The filter `markup` is only for scripts and sections that clipmill itself has written.
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

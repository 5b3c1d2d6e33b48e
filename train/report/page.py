"""Pages: one file each, nothing to load, and nothing from outside becomes markup."""

from pathlib import Path
from typing import Any

from manifests.publish import publish_bytes
from train.evaluation.tables import percent

_TEMPLATES = Path(__file__).parent


def publish_page(template: str, path: Path, **values: Any) -> None:
    """Fills a template of this folder and publishes the page."""
    # Markup from jinja2 itself: what the charts return is markup, all else is escaped.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "markup": Markup}
    publish_bytes(path, environment.get_template(template).render(**values).encode())

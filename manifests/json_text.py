"""Parsing JSON from untrusted sources."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it is not JSON, not valid UTF-8, or nested too deeply for the parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None

"""Parsing JSON that somebody else may have written."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is no JSON, no text in UTF-8, or nested more deeply than the parser can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

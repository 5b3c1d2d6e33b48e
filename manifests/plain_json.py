"""Reading JSON that somebody else may have written."""

import json
from typing import Any


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or is nested more deeply than Python can follow.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error

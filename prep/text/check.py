"""Deep check of a `text` sample: array and JSON member are compared with the index row."""

from typing import Any

import numpy as np

from clipmill.manifests.publish import parse_json
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.text.digests import text_digest
from clipmill.prep.text.recipe import MEMBER
from clipmill.shards.npy import load_npy

_MAX_LENGTH_ERROR = 0.01  # far more than the rounding of a unit vector to float16


def check_text(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Load the array of a sample and compare it and the JSON member with the index row."""
    array = load_npy(members[MEMBER])
    is_sequence = bool(row["row_tokens"])
    wanted = (sum(row["row_tokens"]) if is_sequence else row["num_rows"], row["width"])
    if array is None:
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, "text.npy cannot be loaded")], 0)
    if array.shape != wanted or array.dtype.str != "<f2":
        found = f"text.npy is {array.dtype} {array.shape}, but float16 {wanted} in the index"
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, found)], 0)
    differences = []
    lengths = np.linalg.norm(array.astype(np.float32), axis=1)
    if not np.isfinite(lengths).all():
        differences.append("text.npy contains non-finite values")
    elif not is_sequence and not bool((np.abs(lengths - 1) < _MAX_LENGTH_ERROR).all()):
        differences.append("text.npy contains rows that do not have unit length")
    try:
        described = parse_json(members["json"])
        digests = [text_digest(text) for text in described["texts"]]
        rows = described["caption_id"], described["caption_row"], described.get("row_tokens", [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        differences.append(f"the json member cannot be read: {error!r}")
    else:
        if digests != row["text_digest"]:
            differences.append("the texts in the json member differ from the index")
        if rows != (row["caption_id"], row["caption_row"], row["row_tokens"]):
            differences.append("the caption rows in the json member differ from the index")
    return CheckedSample([(DeepCode.ARRAY_DIFFERS, difference) for difference in differences], len(array))

"""Captions in COCO's results format: a JSON list of {"image_id": ..., "caption": ...}."""

import json
from collections.abc import Mapping
from pathlib import Path

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import publish_json

_HINT = 'COCO\'s results format is a JSON list of {"image_id": id, "caption": text}'


def write_coco_results(path: Path, candidates: Mapping[str, str]) -> None:
    """Publishes captions by video id, in their order."""
    publish_json(path, [{"image_id": video_id, "caption": caption} for video_id, caption in candidates.items()])


def read_coco_results(path: Path) -> dict[str, str]:
    """Captions by video id; ids that are numbers become text.

    Raises:
        UserError: no such file, not that format, a video twice.
    """
    try:
        rows = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint="give a file of captions") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(rows, list):
        raise UserError(f"{path} is not a list", hint=_HINT)
    captions: dict[str, str] = {}
    for number, row in enumerate(rows):
        match row:
            case {"image_id": bool()}:
                pass
            case {"image_id": str() | int() as video_id, "caption": str() as caption}:
                if str(video_id) in captions:
                    raise UserError(f"{path} has {video_id} twice", hint="one caption for each video")
                captions[str(video_id)] = caption
                continue
        raise UserError(f"{path}, row {number}: {json.dumps(row)[:80]}", hint=_HINT)
    return captions

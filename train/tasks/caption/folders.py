"""Whether a folder has a captioner, by its small files alone. Nothing heavy is imported: flags are checked by it."""

from pathlib import Path

from manifests.json_text import parse_json


def has_captioner(folder: Path) -> bool:
    """Whether it is a run of `train caption`, or what transformers know as a model of an encoder and a decoder."""
    is_run = _value(folder / "run.json", "task") == "caption"
    return is_run or _value(folder / "config.json", "model_type") == "vision-encoder-decoder"


def _value(path: Path, name: str) -> object:
    """Nothing where the file is not there or damaged: whoever needs it says so."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found.get(name) if isinstance(found, dict) else None

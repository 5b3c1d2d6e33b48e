"""The formats of weights, and which of them a file or a folder has."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.train.models.hugging_face import read_processor
from clipmill.train.weights.avion import AVION, LAVILA
from clipmill.train.weights.conversion import Format, SourceFacts
from clipmill.train.weights.files import read_config
from clipmill.train.weights.hf_caption import HF_TIMESFORMER
from clipmill.train.weights.hf_clip import HF_CLIP
from clipmill.train.weights.hf_videomae import HF_VIDEOMAE
from clipmill.train.weights.open_clip import OPEN_CLIP, OPENAI, facts_of_open_clip
from clipmill.train.weights.videomae import VIDEOMAE

# The formats, in the order in which names of tensors are compared with them. A new one is a file beside this one that
# defines a Format, its row here, and its name among the choices of `--init.format` (config/model.py).
FORMATS = {one.name: one for one in (HF_CLIP, HF_TIMESFORMER, HF_VIDEOMAE, VIDEOMAE, AVION, LAVILA, OPENAI, OPEN_CLIP)}


def detect_format(names: Iterable[str]) -> Format:
    """The format of a state dict, by the names of its tensors.

    Raises:
        UserError: no format has such names, or a tower is of another kind.
    """
    known = frozenset(names)
    for form in FORMATS.values():
        if form.matches(known):
            return form
    first = ", ".join(sorted(known)[:3])
    raise UserError(
        "these are not the weights of a CLIP, VideoMAE or TimeSformer of any known format; the first tensors: "
        f"{first or 'none'}",
        hint=f"known are {', '.join(FORMATS)}; name one with --init.format to see what fits",
    )


def facts_in(folder: Path) -> SourceFacts | None:
    """Facts from the configuration files in a folder; None if it has none.

    Raises:
        UserError: a file is damaged, or of a model that the towers here cannot be.
    """
    own = read_config(folder / "open_clip_config.json")
    if own is not None:
        preprocess = own.get("preprocess_cfg") or {}
        return facts_of_open_clip(own.get("model_cfg", own) or {}, preprocess, source=str(folder))
    config = read_config(folder / "config.json")
    if config is None:
        return None
    preprocess = read_processor(str(folder))
    kind = str(config.get("model_type"))
    for form in FORMATS.values():
        if form.read_config is not None and any(fnmatchcase(kind, pattern) for pattern in form.model_types):
            return form.read_config(config, preprocess, source=str(folder))
    raise UserError(
        f"{folder}: the model is a {config.get('model_type')!r}, not a 'clip' or a 'videomae'",
        hint="name the folder of a CLIPModel or a VideoMAE",
    )

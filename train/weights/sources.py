"""Open weights from a file, a folder, a clipmill run, the Hugging Face Hub, or an open_clip name and tag.

`FORMATS` lists the supported formats. By default, the format is detected. The weights of the text tower may come from a
different source (`--init.text`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote, show_urls
from clipmill.train.config.model import LIBRARY, DualEncoderInit, DualEncoderTowers, Init, Towers
from clipmill.train.config.shards import HUB_PREFIX, NAME_AND_TAG, local_folder
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.hugging_face import read_hf, read_processor
from clipmill.train.models.transformer import NORM_EPS, merge_adapters
from clipmill.train.run.checkpoint import content_of, read_metadata, read_weights
from clipmill.train.run.folder import RunFolder, is_run, open_run
from clipmill.train.weights.architecture import read_logits
from clipmill.train.weights.conversion import (
    LOGIT_SCALE,
    MEANS,
    STDS,
    ConvertedStateDict,
    Format,
    SourceFacts,
    kind_of_tensors,
    require_finite,
    require_float_weights,
    require_floats,
    tensors_by_origin,
)
from clipmill.train.weights.exported import EXTRAS_FILE, read_extras
from clipmill.train.weights.files import hub_folder, read_config, read_tensors, weights_file, without_prefixes
from clipmill.train.weights.hf_caption import HF_TIMESFORMER
from clipmill.train.weights.hf_clip import HF_CLIP
from clipmill.train.weights.library import TEXT_COMPONENTS, facts_of_entry, library_facts, library_format
from clipmill.train.weights.open_clip import AVION, LAVILA, OPEN_CLIP, OPENAI, facts_of_open_clip, file_of_tag
from clipmill.train.weights.source import Base, Say, Source
from clipmill.train.weights.videomae import HF_VIDEOMAE, VIDEOMAE

# Formats, in the order in which detection tries them. To add a format, define a `Format` in a file of this folder, and
# add a row here and the name to the choices of `--init.format` (config/model.py).
FORMATS = {
    weight_format.name: weight_format
    for weight_format in (HF_CLIP, HF_TIMESFORMER, HF_VIDEOMAE, VIDEOMAE, AVION, LAVILA, OPENAI, OPEN_CLIP)
}


def detect_format(names: Iterable[str]) -> Format:
    """Detect the format of a state dict from the names of its tensors.

    Raises:
        UserError: No format uses these names, or a tower is of an unsupported kind.
    """
    tensor_names = frozenset(names)
    for weight_format in FORMATS.values():
        if weight_format.matches(tensor_names):
            return weight_format
    first_names = ", ".join(sorted(tensor_names)[:3])
    raise UserError(
        "these are not the weights of a CLIP, VideoMAE or TimeSformer in a known format; "
        + (f"the first tensors are {first_names}" if tensor_names else "they contain no tensors"),
        hint=f"set --init.format to one of {', '.join(FORMATS)} to see which tensors fit",
    )


def facts_in(folder: Path) -> SourceFacts | None:
    """Return facts from the configuration files in a folder; None if the folder contains no such file.

    Raises:
        UserError: A file is damaged, or describes a model that our towers cannot represent.
    """
    clip_config = read_config(folder / "open_clip_config.json")
    if clip_config is not None:
        preprocess = clip_config.get("preprocess_cfg") or {}
        return facts_of_open_clip(clip_config.get("model_cfg", clip_config) or {}, preprocess, source=str(folder))
    config = read_config(folder / "config.json")
    if config is None:
        return None
    preprocess = read_processor(str(folder))
    kind = str(config.get("model_type"))
    for weight_format in FORMATS.values():
        is_match = any(fnmatchcase(kind, pattern) for pattern in weight_format.model_types)
        if weight_format.read_config is not None and is_match:
            return weight_format.read_config(config, preprocess, source=str(folder))
    raise UserError(
        f"{folder}: the model type {config.get('model_type')!r} is not supported",
        hint="use the folder of a CLIPModel, a VideoMAE or a TimeSformer",
    )


_DEFAULT_TOWERS = Towers()


def path_of_weights(weights: str) -> Path:
    """Return the local file or folder of `--init.weights`.

    For hf:NAME, this is the folder in the cache. The model is downloaded unless it is cached. For a run in a bucket,
    this is the local folder that mirrors the run.

    Raises:
        UserError: The model is not cached and cannot be downloaded.
    """
    if not weights.startswith(HUB_PREFIX):
        return local_folder(weights)
    return hub_folder(weights.removeprefix(HUB_PREFIX))


def fetch_tag(init: Init, towers: Towers = _DEFAULT_TOWERS, *, say: Say) -> None:
    """Download weights that have an open_clip or Hugging Face name, unless they are cached. Do nothing for files.

    Args:
        init: Sources of the weights.
        towers: Settings of the towers that the weights are for.
        say: Function that prints a line.

    Raises:
        UserError: The weights do not exist, or cannot be downloaded.
    """
    for part, part_towers in _parts_of(init, towers):
        if (part.weights or "").startswith(HUB_PREFIX):
            say(f"weights: loading {part.weights} from Hugging Face's cache, or downloading it")
            path_of_weights(str(part.weights))
        match = NAME_AND_TAG.fullmatch(part.weights or "")
        if match and not Path(match[0]).exists():
            say(f"weights: loading {part.weights} from open_clip's cache, or downloading it")
            file_of_tag(match[1], match[2], read_facts=None if library_format(part_towers) is None else facts_of_entry)


def open_weights(init: Init, towers: Towers = _DEFAULT_TOWERS) -> Source | None:
    """Read the weights of `--init.weights` (and `--init.text`). Return None if `--init.weights` is not set.

    Args:
        init: Sources of the weights, and their format.
        towers: Settings of the towers that the weights are for. A tower that a library builds needs weights with the
            library's names.

    Raises:
        UserError: The weights are missing or damaged, have an unknown format, are not floating-point, or belong to a
            model that our towers cannot represent.
    """
    if init.weights is None:
        return None
    source, *text_sources = [_open_source(*part) for part in _parts_of(init, towers)]
    if not text_sources:
        return source
    text = text_sources[0]
    converted = paired_tensors(source.converted, text.converted, title=text.title)
    facts = paired_facts(source.facts, text.facts, towers)
    return Source(title=f"{source.title}, with the text tower of {text.title}", converted=converted, facts=facts)


def _parts_of(init: Init, towers: Towers) -> list[tuple[Init, Towers]]:
    """Return the settings of each source of weights, and the towers that use its weights."""
    if not isinstance(init, DualEncoderInit) or init.text is None:
        return [(init, towers)]
    text_towers = DualEncoderTowers()
    if isinstance(towers, DualEncoderTowers) and towers.text is not None:
        text_towers = DualEncoderTowers(text=towers.text, text_pooling=towers.text_pooling)
    return [(replace(init, text=None), DualEncoderTowers(image=towers.image)), (Init(weights=init.text), text_towers)]


def _open_source(init: Init, towers: Towers) -> Source:
    """Read the weights of one source."""
    assert init.weights is not None
    path, match = path_of_weights(init.weights), NAME_AND_TAG.fullmatch(init.weights)
    if is_run(path) or is_remote(init.weights):
        return open_run_weights(open_run(path))
    library = library_format(towers)
    if path.is_dir():
        file, facts = weights_file(path), facts_in(path) if library is None else library_facts(path)
    elif path.is_file() or not match:
        file, facts = path, None
    else:
        read_facts = None if library is None else partial(facts_of_entry, towers=towers)
        file, facts = file_of_tag(match[1], match[2], read_facts=read_facts)
    is_hf = library is not None and "model_type" in (read_config(path / "config.json") or {})
    state = read_hf(path) if is_hf else without_prefixes(read_tensors(file))
    require_float_weights(state, source=file)
    weight_format = library or (FORMATS[init.format] if init.format != "auto" else detect_format(state))
    converted = weight_format.convert(state)
    if path.is_dir() and (extras := read_extras(path, weights_path=file)):
        converted = replace(
            converted,
            tensors={**converted.tensors, **extras},
            origins={**converted.origins, **{name: f"{EXTRAS_FILE}: {name}" for name in extras}},
        )
    require_floats(tensors_by_origin(converted), source=file)
    if (scale := converted.tensors.get(LOGIT_SCALE)) is not None:
        name = converted.origins[LOGIT_SCALE]
        if scale.numel() != 1:
            raise UserError(f"{file}: {name} has {scale.numel()} values, but must have one", hint="use other weights")
        require_finite({name: scale}, source=file)
    title = f"{init.weights} ({weight_format.title})"
    return Source(title=title, converted=converted, facts=facts or weight_format.facts)


# Weights of runs.

_TOWERS = "towers."


def open_run_weights(run: RunFolder, *, checkpoint: Path | None = None) -> Source:
    """Return the weights of a run's latest checkpoint, or of `checkpoint`.

    Averaged weights (EMA) are returned if the checkpoint contains them.

    Raises:
        UserError: The run has no checkpoint, or the checkpoint cannot be read.
    """
    path = checkpoint or run.require_checkpoint()
    metadata = read_metadata(path)
    # The checkpoint records the settings used in training. settings.yaml may have been edited since then.
    settings = metadata.settings
    # Omit the batch counters of batch norms, because no model is initialised from them.
    tensors = {name: tensor for name, tensor in complete_weights(path).items() if tensor.is_floating_point()}
    if (log_scale := read_logits(path).log_scale) is not None:
        tensors[LOGIT_SCALE] = torch.tensor(log_scale)
    towers = _towers_in(settings)
    size = size_of(settings["model"], towers)
    tower_fields = ("image", "pool_frames", "text", "text_pooling", "context_length")
    kind = kind_of_tensors(tensors) or "clip"
    return Source(
        title=f"{show_urls(str(run.path))} (step {metadata.step} of a run)",
        converted=ConvertedStateDict(tensors=tensors, origins={name: name for name in tensors}),
        facts=SourceFacts(
            activation=size.video.trunk.activation,
            video_eps=None if kind == LIBRARY else size.video.trunk.norm_eps,
            text_eps=NORM_EPS,
            mean=_triple(settings["init.pixel_mean"]) or MEANS.get(kind),
            std=_triple(settings["init.pixel_std"]) or STDS.get(kind),
            video_heads=None if kind == LIBRARY else size.video.trunk.num_heads,
            text_heads=None if towers.text is not None else size.text.trunk.num_heads,
            frame_px=settings["size_px"] if settings.get("input", "pixels") == "pixels" else None,
            towers={name: getattr(towers, name) for name in tower_fields},
        ),
    )


def _towers_in(settings: Mapping[str, Any]) -> DualEncoderTowers:
    """Return the `--towers.*` settings of a run, limited to settings that dual encoders have."""
    towers = {name.removeprefix(_TOWERS): value for name, value in settings.items() if name.startswith(_TOWERS)}
    field_names = {field.name for field in fields(DualEncoderTowers)}
    return DualEncoderTowers(**{name: value for name, value in towers.items() if name in field_names})


# Checkpoints that contain only adapters.
#
# If some parts are frozen and others have low-rank adapters, a checkpoint contains only trained tensors. The frozen
# tensors that were copied unchanged from --init.weights are called the base. They are read from the same source again,
# and a digest verifies that they have not changed.


def base_of(source: Source, init: Init, *, names: Iterable[str], scale: float) -> Base:
    """Return the base: the tensors `names` of `source`, which was opened with the settings `init`."""
    assert init.weights is not None
    names, text = sorted(names), getattr(init, "text", None)
    return Base(
        weights=_make_absolute(init.weights),
        text=None if text is None else _make_absolute(text),
        format=init.format,
        sha256=_digest_of(source, names),
        tensors={name: list(source.converted.tensors[name].shape) for name in names},
        scale=scale,
    )


def _make_absolute(weights: str) -> str:
    return str(Path(weights).resolve()) if Path(weights).exists() else weights


def _digest_of(source: Source, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = source.converted.tensors[name].float().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def open_base(checkpoint: Path) -> tuple[Base, Source] | None:
    """Return the base of a checkpoint and the source that contains it; None if the checkpoint is complete.

    Raises:
        UserError: The checkpoint is damaged, or the weights are missing or have changed since training.
    """
    metadata = read_metadata(checkpoint)
    if not metadata.base:
        return None
    base = Base(**metadata.base)
    hint = f"restore the weights that the run started from: {base.weights}{f', {base.text}' if base.text else ''}"
    init = DualEncoderInit(weights=base.weights, format=base.format, text=base.text)
    try:
        source = open_weights(init, _towers_in(metadata.settings))
    except UserError as error:
        raise UserError(
            f"{checkpoint} contains only adapters, and the weights that they adapt cannot be read: {error}", hint=hint
        ) from error
    assert source is not None
    if not source.converted.tensors.keys() >= base.tensors.keys() or _digest_of(source, base.tensors) != base.sha256:
        problem = f"{checkpoint} contains only adapters, but the weights that they adapt have changed: {source.title}"
        raise UserError(problem, hint=hint)
    return base, source


def complete_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a checkpoint, averaged (EMA) if available, with adapters merged into their matrices.

    Raises:
        UserError: The checkpoint cannot be read, or `open_base` fails.
    """
    weights = read_weights(checkpoint)
    if not content_of(checkpoint).get("base") or (base_and_source := open_base(checkpoint)) is None:
        return weights
    base, source = base_and_source
    return merge_adapters(
        {name: source.converted.tensors[name].float() for name in base.tensors} | weights, scale=base.scale
    )


def _triple(values: list[float] | None) -> tuple[float, float, float] | None:
    return None if values is None else (values[0], values[1], values[2])


_TEXT_SETTINGS = ("text", "text_pooling", "context_length")


def paired_tensors(video: ConvertedStateDict, text: ConvertedStateDict, *, title: str) -> ConvertedStateDict:
    """Return the tensors of `video`, with its text tower replaced by the text tower of `text`.

    The temperature is omitted, because it belongs to the original pair of towers.

    Args:
        video: Weights with the video tower.
        text: Weights with the text tower.
        title: Title of `text`, for error messages.

    Raises:
        UserError: `text` has no text tower.
    """
    if not any(_root(name) == "text" for name in text.tensors):
        raise UserError(f"{title} has no text tower", hint="pass weights with a text tower to --init.text")

    def merge_towers(video_values: Mapping[str, Any], text_values: Mapping[str, Any]) -> dict[str, Any]:
        merged_values = {name: value for name, value in video_values.items() if _root(name) not in TEXT_COMPONENTS}
        return merged_values | {
            name: value for name, value in text_values.items() if _root(name) in TEXT_COMPONENTS and name != LOGIT_SCALE
        }

    return ConvertedStateDict(
        tensors=merge_towers(video.tensors, text.tensors),
        origins=merge_towers(video.origins, text.origins),
        unknown=merge_towers(video.unknown, text.unknown),
        ignored=(*video.ignored, *text.ignored),
    )


def paired_facts(video: SourceFacts, text: SourceFacts, towers: Towers) -> SourceFacts:
    """Return the facts about the weights that `paired_tensors` returns.

    Raises:
        UserError: Both towers are ours and share one activation, but were trained with different activations.
    """
    has_own_text = getattr(towers, "text", None) is None
    video_activation, text_activation = video.activation or "gelu", text.activation or "gelu"
    if towers.image is None and has_own_text and video_activation != text_activation:
        raise UserError(
            f"--init.weights has the activation {video_activation}, but --init.text has {text_activation}, and the "
            "towers of --model share one activation",
            hint="use a text tower from open_clip, which has its own activation: --towers.text open_clip:NAME",
            flags=("--init.weights", "--init.text", "--model"),
        )
    return replace(
        video,
        activation=video.activation if towers.image is None else text.activation,
        text_eps=text.text_eps,
        text_heads=text.text_heads,
        towers={**video.towers, **{name: text.towers.get(name) for name in _TEXT_SETTINGS}},
        remarks=(*video.remarks, *text.remarks),
    )


def _root(name: str) -> str:
    return name.partition(".")[0]

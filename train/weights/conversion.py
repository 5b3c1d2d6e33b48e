"""Convert state dicts of other projects to this project's parameter names, and back.

In our names, `video.*` and `text.*` are the towers of clipmill.train.models.dual_encoder.DualEncoder. A
MaskedAutoencoder or a Captioner also has `decoder.*`, a Captioner may have `projection.*`, and a VideoClassifier has
`fc_norm.*` and `head.*`. `logit_scale` belongs to the objective.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Activation, Kind

Tensors = Mapping[str, torch.Tensor]
Transform = Callable[[str, torch.Tensor], torch.Tensor]
Mean = tuple[float, float, float]

LOGIT_SCALE = "logit_scale"
TEMPORAL_EMBEDDING = "video.temporal_embedding"
CONV = "video.conv1.weight"
PROJECTION = "video.proj"
# Mean and standard deviation of pixel values from 0 to 1, in the order R, G, B. VideoMAE uses ImageNet's values.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TIMESFORMER_MEAN, _TIMESFORMER_STD = (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)
# Default normalisation of each kind of tower.
MEANS: dict[str, Mean] = {"clip": CLIP_MEAN, "videomae": IMAGENET_MEAN, "timesformer": _TIMESFORMER_MEAN}
STDS: dict[str, Mean] = {"clip": CLIP_STD, "videomae": IMAGENET_STD, "timesformer": _TIMESFORMER_STD}


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Properties of pretrained weights that cannot be read from tensors; None if unknown.

    Attributes:
        activation: Activation of the MLPs, `gelu` or `quick_gelu`.
        video_eps: Epsilon of the video tower's layer norms.
        text_eps: Epsilon of the text tower's layer norms.
        mean: Mean of R, G and B that is subtracted from pixel values in [0, 1].
        std: Standard deviation of R, G and B by which pixel values are then divided.
        video_heads: Number of attention heads in the video tower.
        text_heads: Number of attention heads in the text tower.
        video_depth: Number of blocks in the video tower.
        text_depth: Number of blocks in the text tower.
        decoder_heads: Number of attention heads in a masked autoencoder's decoder.
        frame_px: Side length of the frames that the weights were trained on, in pixels.
        towers: Values of the `--towers.*` settings that give a model the same modules as the weights, by name.
        remarks: Notes for the user.
    """

    activation: Activation | None = None
    video_eps: float | None = None
    text_eps: float | None = None
    mean: Mean | None = None
    std: Mean | None = None
    video_heads: int | None = None
    text_heads: int | None = None
    video_depth: int | None = None
    text_depth: int | None = None
    decoder_heads: int | None = None
    frame_px: int | None = None
    towers: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConvertedStateDict:
    """State dict with our names.

    Attributes:
        tensors: Tensors, keyed by our names.
        origins: Our name -> name in the source; `{q,k,v}` in a source name lists tensors that were concatenated.
        unknown: Tensors without a name in our models, by name in the source.
        ignored: Names of buffers in the source that our models do not need (sizes, position IDs, masks).
    """

    tensors: dict[str, torch.Tensor]
    origins: dict[str, str]
    unknown: dict[str, torch.Tensor] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


_INDEX, _LEAF, _PARTS = re.compile(r"\.(\d+)\."), re.compile(r"(weight|bias)$"), re.compile(r"\{(.+)\}")


def _keep_tensor(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """Table that maps our parameter names to the names in another project.

    `N` in a name stands for the index of a block, and `*` for weight or bias. Braces in a foreign name list several
    tensors that our models store as one, concatenated along the first dimension: `attention.{query,key,value}.*`.

    Attributes:
        owner: Model class or project, for error messages.
        names: Our name -> foreign name, for reading and writing.
        aliases: Foreign name -> our name, only for reading.
        roots: First component of a foreign name -> first component of our name, for names in neither `names` nor
            `aliases`; only for reading.
        ignored: Name suffixes of buffers to ignore.
        canonical: Function that takes a foreign name and returns it with the prefix that `names` expects. Some variants
            of a model lack the prefix.
        to_ours: Function that takes our name and a tensor, and converts the tensor from the foreign layout.
        to_theirs: Function that takes our name and a tensor, and converts the tensor to the foreign layout.
    """

    owner: str
    names: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    roots: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    canonical: Callable[[str], str] = str
    to_ours: Transform = _keep_tensor
    to_theirs: Transform = _keep_tensor

    def read(self, state: Tensors) -> ConvertedStateDict:
        """Convert a foreign state dict to our names."""
        tensors: dict[str, torch.Tensor] = {}
        origins: dict[str, str] = {}
        unknown: dict[str, torch.Tensor] = {}
        ignored = []
        for name, tensor in self._concatenate(state).items():
            if name.endswith(self.ignored):
                ignored.append(name)
                continue
            canonical = self.canonical(name)
            our_name = _translate_name(self._our_names, canonical)
            if our_name is None and (root := canonical.partition(".")[0]) in self.roots:
                our_name = f"{self.roots[root]}{canonical.removeprefix(root)}"
            if our_name is None or our_name in tensors:
                unknown[name] = tensor
                continue
            try:
                tensors[our_name] = self.to_ours(our_name, tensor)
            except (IndexError, RuntimeError):
                tensors[our_name] = tensor  # the shape is wrong; the comparison with the model will report it
            origins[our_name] = name
        return ConvertedStateDict(tensors=tensors, origins=origins, unknown=unknown, ignored=tuple(ignored))

    def write(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Convert our tensors to a foreign state dict.

        Raises:
            ValueError: The foreign model has no parameter for one of our tensors.
        """
        state: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            their_name = _translate_name(self.names, name)
            if their_name is None:
                raise ValueError(f"{self.owner} has no parameter for {name}")
            parts = _expand_name(their_name)
            converted = self.to_theirs(name, tensor)
            state |= dict(zip(parts, converted.chunk(len(parts)) if len(parts) > 1 else [converted], strict=True))
        return state

    @cached_property
    def _our_names(self) -> dict[str, str]:
        return {**{their_name: our_name for our_name, their_name in self.names.items()}, **self.aliases}

    def _concatenate(self, state: Tensors) -> dict[str, torch.Tensor]:
        """Return the state dict with queries, keys and values concatenated, if all three are present."""
        # Name of the first tensor in braces -> name with all tensors in braces.
        first_parts = {
            _expand_name(their_name)[0]: their_name for their_name in self.names.values() if "{" in their_name
        }
        tensors = dict(state)
        for name in state:
            canonical = self.canonical(name)
            if joint_name := _translate_name(first_parts, canonical):
                joint_name = joint_name.removeprefix(canonical.removesuffix(name))
                parts = _expand_name(joint_name)
                if state[name].ndim and all(part in state and state[part].shape == state[name].shape for part in parts):
                    tensors[joint_name] = torch.cat([tensors.pop(part) for part in parts])
        return tensors


def _translate_name(rows: Mapping[str, str], name: str) -> str | None:
    """Translate `name` with `rows`, and keep its block index and suffix. Return None if no row matches."""
    index, leaf = _INDEX.search(name), _LEAF.search(name)
    pattern = _INDEX.sub(".N.", name, count=1)
    name_pattern = rows.get(pattern)
    if name_pattern is None and leaf:
        name_pattern = rows.get(f"{pattern.removesuffix(leaf[1])}*")
        name_pattern = None if name_pattern is None else name_pattern.replace("*", leaf[1])
    return name_pattern if name_pattern is None or index is None else name_pattern.replace(".N.", f".{index[1]}.")


def _expand_name(name: str) -> list[str]:
    """Return `a.{q,k}.b` as [`a.q.b`, `a.k.b`]."""
    braces = _PARTS.search(name)
    return [name.replace(braces[0], part) for part in braces[1].split(",")] if braces else [name]


@dataclass(frozen=True, kw_only=True)
class Format:
    """Weight format, listed in `FORMATS` of clipmill.train.weights.sources.

    Attributes:
        name: Value of `--init.format`.
        title: Name of the format for the user.
        convert: Function that converts a state dict to our names.
        matches: Function that takes tensor names and returns True if they belong to this format.
        facts: Facts that are the same for all weights of this format.
        model_types: Patterns for the `model_type` in config.json.
        read_config: Function that takes the contents of config.json and of the processor (`read_processor`), and
            returns facts. Its argument `source` is the folder, for error messages.
    """

    name: str
    title: str
    convert: Callable[[Tensors], ConvertedStateDict]
    matches: Callable[[frozenset[str]], bool]
    facts: SourceFacts = SourceFacts()
    model_types: tuple[str, ...] = ()
    read_config: Callable[..., SourceFacts] | None = None


def any_starts_with(names: Iterable[str], *prefixes: str) -> bool:
    """Return True if at least one name begins with one of the prefixes."""
    return any(name.startswith(prefixes) for name in names)


def kind_of_tensors(names: Iterable[str]) -> Kind | None:
    """Derive the kind of video tower from our parameter names; return None if there is no video tower."""
    video = [name for name in names if name.startswith("video.")]
    if any(name.startswith("video.model.") for name in video):
        return "library"
    if any(".time_attn." in name for name in video):
        return "timesformer"
    if any(name == "video.conv1.bias" or name.endswith(".attn.q_bias") for name in video):
        return "videomae"
    return "clip" if video else None


# Checks of foreign tensors.

_MIN_BYTES = 2


def require_floats(tensors: Tensors, *, source: object) -> None:
    """Raise a UserError for the first tensor that is not floating-point with 16, 32 or 64 bits.

    Quantised weights contain integers or 8-bit floats, which are meaningless without their scales.
    """
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < _MIN_BYTES:
            raise UserError(
                f"{source}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, but weights must be "
                "floating-point with 16, 32 or 64 bits",
                hint="use weights that are not quantised",
            )


def require_float_weights(state: Tensors, *, source: object) -> None:
    """Apply `require_floats` to a state dict before conversion. Skip integer tensors that may be buffers."""
    weights = {
        name: tensor
        for name, tensor in state.items()
        if name.endswith("weight") or tensor.is_floating_point() or tensor.is_complex()
    }
    require_floats(weights, source=source)


def tensors_by_origin(converted: ConvertedStateDict) -> dict[str, torch.Tensor]:
    """Return the converted tensors, keyed by their names in the source."""
    return {converted.origins[name]: tensor for name, tensor in converted.tensors.items()}


def require_finite(tensors: Tensors, *, source: object) -> None:
    """Raise a UserError for the first tensor that contains NaN or infinity in float32, the dtype of training."""
    for name, tensor in tensors.items():
        if not bool(tensor.float().isfinite().all()):
            raise UserError(
                f"{source}: {name} contains non-finite values (NaN or infinity)",
                hint="use other weights: the file is damaged, or the training that produced it diverged",
            )

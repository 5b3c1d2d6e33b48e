"""What the formats become: tensors under this project's names, and what is known beside them.

`video.*` and `text.*` are the parameters of train.models.dual_encoder.DualEncoder, `decoder.*` those that a
MaskedAutoencoder has besides, `fc_norm.*` and `head.*` a VideoClassifier's; `logit_scale` belongs to the objective.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from manifests.errors import UserError
from train.config.model import Activation, Kind

Tensors = Mapping[str, torch.Tensor]
Rename = Callable[[str], str | None]
Transform = Callable[[torch.Tensor], torch.Tensor]

LOGIT_SCALE = "logit_scale"
TEMPORAL_EMBEDDING = "video.temporal_embedding"
# CLIP's normalisation of pixels from 0 to 1, in the order R, G, B.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# ImageNet's, which VideoMAE uses.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# What TimeSformer's published weights were trained with.
_TIMESFORMER_MEAN, _TIMESFORMER_STD = (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)
# What a tower's inputs are normalised by where nobody says another.
MEANS: dict[Kind, tuple[float, float, float]] = {
    "clip": CLIP_MEAN,
    "videomae": IMAGENET_MEAN,
    "timesformer": _TIMESFORMER_MEAN,
}
STDS: dict[Kind, tuple[float, float, float]] = {
    "clip": CLIP_STD,
    "videomae": IMAGENET_STD,
    "timesformer": _TIMESFORMER_STD,
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a model needs to know of its weights and cannot see in them; None where nothing is known.

    Attributes:
        activation: of the MLPs, `gelu` or `quick_gelu`.
        video_eps: of the video tower's layer norms.
        text_eps: of the text tower's.
        mean: that inputs are normalised by: R, G, B, from 0 to 1.
        std: likewise.
        video_heads: of the video tower's attention.
        text_heads: of the text tower's.
        decoder_heads: of a masked autoencoder's decoder.
        picture_px: side of the pictures that the weights were trained on.
        remarks: what the user should hear about these weights.
    """

    activation: Activation | None = None
    video_eps: float | None = None
    text_eps: float | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    video_heads: int | None = None
    text_heads: int | None = None
    decoder_heads: int | None = None
    picture_px: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Tensors under our names.

    Attributes:
        tensors: by our name.
        origins: the name, or the names, that the tensor of our name had.
        unknown: by their own name: tensors that the format does not have.
        ignored: names of tensors that are no weights (sizes, positions as integers), which the format explains.
    """

    tensors: dict[str, torch.Tensor]
    origins: dict[str, str]
    unknown: dict[str, torch.Tensor] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def kind_of_tensors(names: Iterable[str]) -> Kind | None:
    """The kind of the video tower among tensors or parameters of our names; None where there is none."""
    kind: Kind | None = None
    names = list(names)
    if any(name.startswith("video.") and ".time_attn." in name for name in names):
        return "timesformer"
    for name in names:
        if name == "video.conv1.bias" or (name.startswith("video.") and name.endswith(".attn.q_bias")):
            return "videomae"
        if name.startswith("video."):
            kind = "clip"
    return kind


def convert_names(
    state: Tensors,
    rename: Rename,
    *,
    no_weights: Iterable[str] = (),
    transforms: Mapping[str, Transform] | None = None,
) -> Converted:
    """Gives each tensor its name of ours.

    Args:
        rename: our name of a name, or None where there is none.
        no_weights: ends of names that are left aside.
        transforms: by our name, what is done to the tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    origins: dict[str, str] = {}
    unknown: dict[str, torch.Tensor] = {}
    ignored = []
    for name, tensor in state.items():
        if name.endswith(tuple(no_weights)):
            ignored.append(name)
            continue
        ours = rename(name)
        if ours is None or ours in tensors:
            unknown[name] = tensor
            continue
        transform = (transforms or {}).get(ours)
        tensors[ours] = transform(tensor) if transform else tensor
        origins[ours] = name
    return Converted(tensors=tensors, origins=origins, unknown=unknown, ignored=tuple(ignored))


# Whether tensors from elsewhere hold numbers that a model can start from.


_LEAST_BYTES = 2


def require_floats(tensors: Tensors, *, source: object) -> None:
    """Raises a UserError at the first tensor that is not of floating point of 16, 32 or 64 bits.

    Integers and 8-bit floats are what quantisation leaves: without their scales they are other numbers.
    """
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < _LEAST_BYTES:
            raise UserError(
                f"{source}: {name} is of {str(tensor.dtype).removeprefix('torch.')}, and weights are floating point of "
                "16, 32 or 64 bits",
                hint="use the weights as they were before they were quantised or converted",
            )


def require_whole_dtypes(state: Tensors, *, source: object) -> None:
    """The same before tensors are put together, of what cannot be a size, a position or a mask by its dtype or name."""
    certain = {
        name: tensor
        for name, tensor in state.items()
        if name.endswith("weight") or tensor.is_floating_point() or tensor.is_complex()
    }
    require_floats(certain, source=source)


def by_origin(converted: Converted) -> dict[str, torch.Tensor]:
    """The tensors that have a place here, by the names that they came with."""
    return {converted.origins[name]: tensor for name, tensor in converted.tensors.items()}


def require_finite(tensors: Tensors, *, source: object) -> None:
    """Raises a UserError at the first tensor that holds NaN or infinity in float32, which models are trained in."""
    for name, tensor in tensors.items():
        if not bool(tensor.float().isfinite().all()):
            raise UserError(
                f"{source}: {name} holds numbers that are not finite (NaN or infinity)",
                hint="the training that made these weights went wrong, or the file is damaged: use other weights",
            )

"""Names of open_clip and of OpenAI's CLIP, which are the same; the towers here carry them too.

ours                 open_clip, OpenAI       open_clip's CustomTextCLIP
video.*              visual.*                visual.*
text.*               *                       text.*
logit_scale          logit_scale             logit_scale
"""

import torch

from train.weights.converted import LOGIT_SCALE, TEMPORAL_EMBEDDING, Converted, Tensors, convert_names

TEXT_PARTS = ("positional_embedding", "token_embedding", "transformer", "ln_final", "text_projection")
# Sizes that OpenAI stored as tensors, and masks that old versions of open_clip stored.
NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask")


def our_name(name: str) -> str | None:
    """Our name of a tensor of open_clip, or None."""
    first, _, rest = name.partition(".")
    if name == LOGIT_SCALE:
        return name
    if first == "visual" and rest:
        return f"video.{rest}"
    if first == "text" and rest:
        return name
    return f"text.{name}" if first in TEXT_PARTS else None


def open_clip_name(name: str) -> str:
    """open_clip's name of one of ours."""
    first, _, rest = name.partition(".")
    return {"video": f"visual.{rest}", "text": rest}.get(first, name)


def from_open_clip(state: Tensors) -> Converted:
    """A state dict of open_clip or OpenAI under our names."""
    return convert_names(state, our_name, no_weights=NO_WEIGHTS)


def to_open_clip(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Our tensors as a state dict of open_clip's CLIP; the temporal embedding has no place there."""
    return {open_clip_name(name): tensor for name, tensor in tensors.items() if name != TEMPORAL_EMBEDDING}

"""The model `tiny` in a quarter of its size, which tests train and the commands that they fork.

The embedding of CLIP's 49,408 tokens makes up nine tenths of the model, and the layers of its towers the rest. To
draw, hash, write and read them took a quarter of the time of the tests that train.
"""

from dataclasses import replace

from clipmill.train.models.dual_encoder import SIZES

_COMPLETE = SIZES["tiny"]
_SMALL = replace(
    _COMPLETE,
    video=replace(_COMPLETE.video, trunk=replace(_COMPLETE.video.trunk, depth=2)),
    text=replace(_COMPLETE.text, trunk=replace(_COMPLETE.text.trunk, width=8, num_heads=1)),
)


def shrink() -> None:
    """From now on, in this process, `tiny` has half of its video layers and a sixteenth of its text tower's width."""
    SIZES["tiny"] = _SMALL


def restore() -> None:
    """From now on, in this process, `tiny` is as users have it."""
    SIZES["tiny"] = _COMPLETE

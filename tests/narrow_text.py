"""The model `tiny` with a text tower of an eighth of its width, which tests train and the commands that they fork.

The embedding of CLIP's 49,408 tokens makes up nine tenths of the model. To draw, hash, write and read it took a fifth
of the time of the tests that train.
"""

from dataclasses import replace

from clipmill.train.models.dual_encoder import SIZES

_WHOLE = SIZES["tiny"]
_NARROW = replace(_WHOLE.text.trunk, width=16, num_heads=1)


def narrow() -> None:
    """From now on, in this process, `tiny` has the narrow text tower."""
    SIZES["tiny"] = replace(_WHOLE, text=replace(_WHOLE.text, trunk=_NARROW))


def whole() -> None:
    """From now on, in this process, `tiny` is as users have it."""
    SIZES["tiny"] = _WHOLE

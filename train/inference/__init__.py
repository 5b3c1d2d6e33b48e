"""Trained weights of any kind, ready for use: `load_model`, part of the public Python interface (docs/python.md)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.inference.model import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from train.inference import model

    return getattr(model, name)

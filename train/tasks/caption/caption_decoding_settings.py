"""Settings of decoding: a group of the settings of `train caption` and of what writes captions afterwards."""

from dataclasses import dataclass, replace
from typing import Literal

from manifests.errors import UserError

Method = Literal["greedy", "sample", "beam"]

_TEMPERATURE, _NUM_BEAMS, _LENGTH_PENALTY, _MAX_TOKENS = 1.0, 4, 1.0, 30
_OF_METHOD: dict[Method, tuple[str, ...]] = {
    "greedy": (),
    "sample": ("temperature", "top_k", "top_p"),
    "beam": ("num_beams", "length_penalty", "early_stopping"),
}
_MOST_BEAMS = 1000


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How captions are written."""

    method: Method = "greedy"
    """greedy: the likeliest token each time; sample: drawn; beam: the likeliest captions of a beam search."""
    temperature: float | None = None
    """sample: logits are divided by it; 1 when left out."""
    top_k: int | None = None
    """sample: only the likeliest K tokens are drawn."""
    top_p: float | None = None
    """sample: only the likeliest tokens that have this probability together are drawn (nucleus)."""
    num_beams: int | None = None
    """beam: captions that are followed at once; 4 when left out."""
    length_penalty: float | None = None
    """beam: log probabilities are divided by the length to this power; 1 when left out, more for longer captions."""
    early_stopping: bool | None = None
    """beam: stop at as many finished captions as beams; else, and when left out, once no better ones can come."""
    min_tokens: int = 0
    """Tokens before a caption may end."""
    max_tokens: int | None = None
    """Tokens of a caption at most, its end included; 30 when left out, or the decoder's context if that is less."""
    seed: int = 0
    """sample: of what is drawn, with the clip's own number."""

    def __post_init__(self) -> None:
        for method, names in _OF_METHOD.items():
            for name in names:
                if method != self.method and getattr(self, name) is not None:
                    raise UserError(
                        f"{_flag(name)} {getattr(self, name)} does nothing with {_flag('method')} {self.method}",
                        hint=f"use {_flag('method')} {method}, or leave it out",
                    )
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise UserError(
                f"{_flag('temperature')} is {self.temperature}",
                hint=f"it must be a finite number more than 0; {_flag('method')} greedy is the limit",
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"{_flag('top_k')} is {self.top_k}", hint="it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"{_flag('top_p')} is {self.top_p}", hint="it must be more than 0, and 1 at most")
        if self.num_beams is not None and not 1 <= self.num_beams <= _MOST_BEAMS:
            raise UserError(f"{_flag('num_beams')} is {self.num_beams}", hint=f"it must be from 1 to {_MOST_BEAMS:,}")
        if self.length_penalty is not None and not abs(self.length_penalty) < float("inf"):
            raise UserError(f"{_flag('length_penalty')} is {self.length_penalty}", hint="it must be a number")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"{_flag('max_tokens')} is {self.max_tokens}", hint="it must be at least 1")
        if self.min_tokens < 0:
            raise UserError(f"{_flag('min_tokens')} is {self.min_tokens}", hint="it must be 0 or more")
        # How long captions may be if nothing is said depends on the decoder: see `within`.
        if self.max_tokens is not None and self.min_tokens >= self.max_tokens:
            raise UserError(
                f"{_flag('min_tokens')} is {self.min_tokens}",
                hint=f"it must be from 0 to below {_flag('max_tokens')}, {self.max_tokens}",
            )


def temperature_of(settings: DecodingSettings) -> float:
    """What logits are divided by."""
    return _TEMPERATURE if settings.temperature is None else settings.temperature


def num_beams_of(settings: DecodingSettings) -> int:
    """Captions of a clip that are followed at once."""
    return _NUM_BEAMS if settings.num_beams is None else settings.num_beams


def length_penalty_of(settings: DecodingSettings) -> float:
    """The power of the length that log probabilities are divided by."""
    return _LENGTH_PENALTY if settings.length_penalty is None else settings.length_penalty


def max_tokens_of(settings: DecodingSettings) -> int:
    """Tokens of a caption at most, where the decoder's context has as many."""
    return _MAX_TOKENS if settings.max_tokens is None else settings.max_tokens


def within(settings: DecodingSettings, context_length: int, *, is_of_run: bool = False) -> DecodingSettings:
    """The same for a decoder whose texts have at most so many tokens, with `max_tokens` as a number.

    Args:
        is_of_run: they were saved with a run; runs of before have a default of 30 there, which nobody asked for.

    Raises:
        UserError: a limit that was asked for is beyond them.
    """
    if is_of_run and settings.max_tokens == _MAX_TOKENS:
        settings = replace(settings, max_tokens=None)
    if settings.max_tokens is not None and settings.max_tokens > context_length:
        raise UserError(
            f"{_flag('max_tokens')} is {settings.max_tokens}, and the decoder's context has {context_length} tokens",
            hint=f"give {context_length} at most, or leave it out",
        )
    if settings.min_tokens >= context_length:
        raise UserError(
            f"{_flag('min_tokens')} is {settings.min_tokens}, and the decoder's context has {context_length} tokens",
            hint=f"give {context_length - 1} at most",
        )
    most = min(max_tokens_of(settings), context_length)
    if settings.min_tokens >= most:
        raise UserError(
            f"{_flag('min_tokens')} is {settings.min_tokens}, and captions have {most} tokens at most",
            hint=f"give {most - 1} at most, or a larger {_flag('max_tokens')}: the context has {context_length} tokens",
        )
    return replace(settings, max_tokens=most)


def _flag(name: str) -> str:
    return f"--decoding.{name.replace('_', '-')}"

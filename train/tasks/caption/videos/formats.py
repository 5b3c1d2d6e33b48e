"""The formats that captions are written in, by name; loads nothing, for the command line."""

from typing import Literal

Format = Literal["csv", "json", "srt"]
FORMATS: tuple[Format, ...] = ("csv", "json", "srt")

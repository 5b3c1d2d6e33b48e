"""File corruption: flipped bits (also in names), overwritten and zeroed ranges, truncation, deletion, and exchange.

The modification time is preserved, as on a disk that loses bits; a comparison of sizes and times misses most of it.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

_BLANK_BYTES = 512
_NAME = re.compile(rb"[a-z][a-z0-9_]{3,}")  # name of a column or a key, judged by its form alone


@dataclass(frozen=True)
class Decay:
    """Corruption of one file in a folder.

    Attributes:
        fault: Kind of corruption, in one word.
        path: Path of the file, relative to the folder.
        where: Affected bit, byte or size, or the other file.
        do: Function that applies the corruption in a folder.
    """

    fault: str
    path: Path
    where: str
    do: Callable[[Path], None]

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.path}@{self.where}"


def draw_decay(random: Random, folder: Path, fault: str, *, paths: list[Path], partners: list[Path]) -> Decay | None:
    """Draw a corruption of one of `paths` (relative to `folder`); None if this fault does not apply to the file.

    Args:
        partners: Files that a file may be exchanged with.
    """
    path = random.choice(paths)
    content = (folder / path).read_bytes()
    if fault == "exchange":
        others = [other for other in partners if other != path and (folder / other).read_bytes() != content]
        if not others:
            return None
        # Files of equal size can be distinguished only by their checksum.
        same_size = [other for other in others if (folder / other).stat().st_size == len(content)]
        other = random.choice(same_size if same_size and random.random() < 0.5 else others)
        return Decay(fault, path, str(other), lambda target: _exchange(target / path, target / other))
    if fault == "lose":
        return Decay(fault, path, "all", lambda target: (target / path).unlink())
    if not content:
        return None
    at, damaged = random.randrange(len(content)), bytearray(content)
    if fault == "rename":
        words = {match[0]: match.start() for match in _NAME.finditer(content)}
        if not words:
            return None
        name = random.choice(sorted(words))
        at = words[name] + random.randrange(len(name))
        damaged[at] ^= 1 << random.randrange(3)
    if fault == "cut":
        damaged = damaged[:at]
    elif fault == "flip":
        damaged[at] ^= 1 << random.randrange(8)
    elif fault == "overwrite":
        damaged[at : at + 16] = random.randbytes(len(damaged[at : at + 16]))
    elif fault == "blank":
        damaged[at : at + _BLANK_BYTES] = bytes(len(damaged[at : at + _BLANK_BYTES]))
    if damaged == content:
        return None
    return Decay(fault, path, str(at), lambda target: _write_in_place(target / path, bytes(damaged)))


FAULTS = ("flip", "rename", "overwrite", "blank", "cut", "lose", "exchange")


def _write_in_place(path: Path, content: bytes) -> None:
    state = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def _exchange(path: Path, other: Path) -> None:
    kept = path.with_name("exchanged")
    path.rename(kept)
    other.rename(path)
    kept.rename(other)

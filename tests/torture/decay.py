"""Ways in which a file decays: flipped bits, overwritten and blank parts, a lost end, a lost file, an exchange.

Each keeps the file's time of change, as a disk that loses bits does; a look at sizes and times sees the least of it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

_BLANK_BYTES = 512


@dataclass(frozen=True)
class Decay:
    """What happens to one file of a folder.

    Attributes:
        fault: what it is, in a word.
        path: the file, relative to the folder.
        where: the bit, byte or size that it is about, or the other file.
        do: does it in a folder.
    """

    fault: str
    path: Path
    where: str
    do: Callable[[Path], None]

    @property
    def name(self) -> str:
        return f"{self.fault}:{self.path}@{self.where}"


def draw_decay(random: Random, folder: Path, fault: str, *, paths: list[Path], partners: list[Path]) -> Decay | None:
    """A decay of one of `paths` (relative to `folder`); None where this one cannot decay so.

    Args:
        partners: what a file may be exchanged with.
    """
    path = random.choice(paths)
    content = (folder / path).read_bytes()
    if fault == "exchange":
        others = [other for other in partners if other != path and (folder / other).read_bytes() != content]
        if not others:
            return None
        # Those of the same size are what only a checksum tells apart.
        same_size = [other for other in others if (folder / other).stat().st_size == len(content)]
        other = random.choice(same_size if same_size and random.random() < 0.5 else others)
        return Decay(fault, path, str(other), lambda target: _exchange(target / path, target / other))
    if fault == "lose":
        return Decay(fault, path, "all", lambda target: (target / path).unlink())
    if not content:
        return None
    at, damaged = random.randrange(len(content)), bytearray(content)
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


FAULTS = ("flip", "overwrite", "blank", "cut", "lose", "exchange")


def _write_in_place(path: Path, content: bytes) -> None:
    state = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def _exchange(path: Path, other: Path) -> None:
    kept = path.with_name("exchanged")
    path.rename(kept)
    other.rename(path)
    kept.rename(other)

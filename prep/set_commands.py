"""`prep status`, `verify`, `inspect` and `gc`: looking after a shard set."""

from prep.options import Data, Json


def status(*, data: Data = None, json: Json = False) -> None:
    """x"""


def verify(*, data: Data = None, json: Json = False) -> None:
    """x"""


def inspect(*, data: Data = None, json: Json = False) -> None:
    """x"""


def gc(*, data: Data = None, json: Json = False) -> None:
    """x"""

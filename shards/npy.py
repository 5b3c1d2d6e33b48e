"""Arrays as `.npy` members of tars, aligned so that their data can be gathered from a memory-mapped tar."""

import struct
from io import BytesIO

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy_format

from clipmill.shards.format import BLOCK_BYTES

_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX_BYTES = len(_MAGIC) + 2


def npy_bytes(array: np.ndarray) -> bytes:
    """Serialize an array as a version 1.0 npy file whose header is padded to a multiple of 512 bytes.

    A payload begins on a 512-byte boundary of the tar, so the array's data also begin on such a boundary.

    Raises:
        ValueError: The array contains Python objects, which would have to be pickled.
    """
    if array.dtype.hasobject:
        raise ValueError(f"an array with dtype {array.dtype} contains Python objects, which would have to be pickled")
    array = np.asarray(array, order="C")
    header = repr(npy_format.header_data_from_array_1_0(array)).encode("latin1")
    header_bytes = _PREFIX_BYTES + len(header) + 1
    header += b" " * (-header_bytes % BLOCK_BYTES) + b"\n"
    return _MAGIC + struct.pack("<H", len(header)) + header + array.tobytes()


def data_offset(payload: bytes) -> int:
    """Return the offset in bytes of the array's data in a version 1.0 npy file.

    Raises:
        ValueError: `payload` is not a version 1.0 npy file.
    """
    if payload[: len(_MAGIC)] != _MAGIC or len(payload) < _PREFIX_BYTES:
        raise ValueError("not a version 1.0 npy file")
    (header_bytes,) = struct.unpack_from("<H", payload, len(_MAGIC))
    return _PREFIX_BYTES + int(header_bytes)


def load_npy(payload: bytes) -> np.ndarray | None:
    """Load the array from an npy file; return None if `payload` is not an npy file, or contains pickled objects."""
    try:
        array: np.ndarray = np.load(BytesIO(payload), allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return None
    return array


def compress_frame(payload: bytes) -> bytes:
    """Compress `payload` as one Zstandard frame."""
    frame: bytes = pa.Codec("zstd", compression_level=3).compress(payload, asbytes=True)
    return frame


def decompress_frame(frame: bytes | memoryview, *, size_bytes: int) -> bytes:
    """Decompress the output of `compress_frame`.

    Args:
        size_bytes: Size of the decompressed payload in bytes.

    Raises:
        ValueError: The frame is damaged, or the payload has a different size.
    """
    try:
        payload: bytes = pa.decompress(frame, decompressed_size=size_bytes, codec="zstd", asbytes=True)
    except OSError as error:
        raise ValueError(str(error)) from None
    return payload

"""Arrays as `.npy` members of tars, whose data can be gathered from a memory-mapped tar."""

import struct
from io import BytesIO

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy_format

from clipmill.shards.format import BLOCK_BYTES

_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX_BYTES = len(_MAGIC) + 2


def npy_bytes(array: np.ndarray) -> bytes:
    """Serialize `array` as a version 1.0 npy file whose header is padded to a multiple of 512 bytes.

    Payloads in a tar begin on 512-byte boundaries, and so do the array's data.

    Raises:
        ValueError: The array has dtype object, which would require pickling.
    """
    if array.dtype.hasobject:
        raise ValueError(f"an array of {array.dtype} contains Python objects, which would require pickling")
    array = np.asarray(array, order="C")
    text = repr(npy_format.header_data_from_array_1_0(array)).encode("latin1")
    header_bytes = _PREFIX_BYTES + len(text) + 1
    text += b" " * (-header_bytes % BLOCK_BYTES) + b"\n"
    return _MAGIC + struct.pack("<H", len(text)) + text + array.tobytes()


def data_offset(payload: bytes) -> int:
    """Return the byte offset of the array's data in a version 1.0 npy payload.

    Raises:
        ValueError: `payload` is not a version 1.0 npy file.
    """
    if payload[: len(_MAGIC)] != _MAGIC or len(payload) < _PREFIX_BYTES:
        raise ValueError("not a version 1.0 npy file")
    (text_bytes,) = struct.unpack_from("<H", payload, len(_MAGIC))
    return _PREFIX_BYTES + int(text_bytes)


def load_npy(payload: bytes) -> np.ndarray | None:
    """Load the array of an npy file; None if `payload` is not an npy file or would require unpickling."""
    try:
        array: np.ndarray = np.load(BytesIO(payload), allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return None
    return array


def compress_frame(payload: bytes) -> bytes:
    """Compress `payload` to one Zstandard frame."""
    packed: bytes = pa.Codec("zstd", compression_level=3).compress(payload, asbytes=True)
    return packed


def decompress_frame(packed: bytes | memoryview, *, size_bytes: int) -> bytes:
    """Decompress the output of `compress_frame`, whose payload has `size_bytes` bytes.

    Raises:
        ValueError: The frame is damaged, or its payload has a different size.
    """
    try:
        payload: bytes = pa.decompress(packed, decompressed_size=size_bytes, codec="zstd", asbytes=True)
    except OSError as error:
        raise ValueError(str(error)) from None
    return payload

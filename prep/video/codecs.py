"""The video codecs of `prep chunk`, with their encoders, their defaults, and their arguments for rate control and GOP.

All encoders run single-threaded and without adaptive frame placement, so that the output bytes depend only on the
frames and the settings. GOP layouts, with frames in display order:

    comb    closed, `I b ... b P b ... b P ...`: a P frame every 16 frames; `b` is a B frame that no frame references.
            Decoding a frame requires only the key frame, the P frames before it in decoding order, and its own packet
    star    a comb with a single P frame; to obtain any frame, at most three frames are decoded
    closed  a closed GOP; the encoder chooses its frame types
    intra   every frame is a key frame

docs/encoding.md lists the cost and the quality of these layouts.

Any change to the arguments changes the output bytes. Therefore the fingerprint of a recipe contains a hash of the
arguments (`arguments_hash`), unless they are unchanged since recipe schema 1.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError

if TYPE_CHECKING:
    from av.packet import Packet

COMB, STAR, CLOSED, INTRA = "comb", "star", "closed", "intra"
DEFAULT_KEYINT = {COMB: 90, STAR: 16, CLOSED: 30, INTRA: 1}
COMB_STEP = 16  # distance in frames between consecutive P frames
X26X_PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")
MAX_CONSECUTIVE_B_FRAMES = 16  # limit of libx264 and libx265; a star has keyint - 2 consecutive B frames

# Lookahead of the preset `faster`, in frames. A lookahead shorter than the distance between P frames, as in quicker
# presets, costs 0.6 dB at the same file size.
_COMB_LOOKAHEAD = 20

Arguments = dict[str, str | int]


@dataclass(frozen=True)
class Codec:
    """Properties of one value of `--codec`.

    Attributes:
        encoder: Name of the ffmpeg encoder.
        decoder: libav name of the decoder, stored in the index.
        gops: Supported GOP layouts, with the default first.
        crf_range: Smallest (best) and largest value of `--crf`; for MJPEG, the quantiser scale.
        presets: Values of `--preset`; empty if the encoder has no presets.
        preset_argument: ffmpeg option that takes the value of `--preset`; empty if the encoder has no presets.
        gop_arguments: Function that takes a GOP layout and a key frame interval, and returns ffmpeg output arguments.
        crf_argument: ffmpeg option that takes the value of `--crf`.
        encode_s_per_megapixel: Cost of encoding at the default settings, in seconds per megapixel, on an x86-64 server
            core at about 3 GHz.
        bits_per_pixel: Bits per pixel of the chunks at the default settings.
        fixed_arguments: Further ffmpeg output arguments, the same for all GOP layouts.
    """

    encoder: str
    decoder: str
    gops: tuple[str, ...]
    crf_range: tuple[int, int]
    default_crf: int
    presets: tuple[str, ...]
    default_preset: str
    preset_argument: str
    crf_argument: str
    gop_arguments: Callable[[str, int], Arguments]
    encode_s_per_megapixel: float
    bits_per_pixel: float
    fixed_arguments: tuple[tuple[str, str | int], ...] = ()


def _h264_gop(gop: str, keyint: int) -> Arguments:
    return {
        # CABAC and deblocking dominate the cost of H.264 decoding; fastdecode disables both.
        "tune": "fastdecode",
        "bf": _num_b_frames(gop, keyint),
        "forced-idr": 1,
        "x264-params": f"{_x26x_gop(gop, keyint)}:open-gop=0:b-pyramid=none"
        + {STAR: ":b-adapt=0", COMB: f":b-adapt=0:rc-lookahead={_COMB_LOOKAHEAD}"}.get(gop, ""),
    }


def _hevc_gop(gop: str, keyint: int) -> Arguments:
    b_frames = _num_b_frames(gop, keyint)
    params = f"{_x26x_gop(gop, keyint)}:open-gop=0:bframes={b_frames}:b-pyramid=0:pools=none:frame-threads=1"
    if gop in (COMB, STAR):
        # With cutree, x265 makes the frame after a forced key frame a P frame, so a star would require four
        # decodes. The lookahead must be longer than the run of b frames, but in the fast presets it is shorter.
        params += f":b-adapt=0:cutree=0:rc-lookahead={MAX_CONSECUTIVE_B_FRAMES + 4}"
    return {"tune": "fastdecode", "tag:v": "hvc1", "forced-idr": 1, "x265-params": f"{params}:log-level=error"}


def _num_b_frames(gop: str, keyint: int) -> int:
    """Return the maximum number of consecutive B frames. A comb of up to COMB_STEP + 1 frames has one P frame."""
    return {STAR: keyint - 2, COMB: min(COMB_STEP - 1, keyint - 2), INTRA: 0}.get(gop, 3)


def _x26x_gop(gop: str, keyint: int) -> str:
    length = 1 if gop == INTRA else keyint
    return f"keyint={length}:min-keyint={length}:scenecut=0"


def _av1_gop(gop: str, keyint: int) -> Arguments:
    length = 1 if gop == INTRA else keyint
    # Key frames of SVT-AV1 close the GOP. lp=1 selects a single thread.
    return {"g": length, "svtav1-params": "lp=1:scd=0"}


def _vp9_gop(gop: str, keyint: int) -> Arguments:
    length = 1 if gop == INTRA else keyint
    return {"g": length, "keyint_min": length, "deadline": "good", "row-mt": 0}


def _mjpeg_gop(gop: str, keyint: int) -> Arguments:
    return {"huffman": "optimal"}


def _nvenc_gop(gop: str, keyint: int) -> Arguments:
    length = 1 if gop == INTRA else keyint
    return {"g": length, "bf": 0, "forced-idr": 1, "no-scenecut": 1, "strict_gop": 1, "rc": "vbr"}


_NVENC_PRESETS = tuple(f"p{level}" for level in range(1, 8))

CODECS: dict[str, Codec] = {
    "h264": Codec(
        encoder="libx264",
        decoder="h264",
        gops=(COMB, STAR, CLOSED, INTRA),
        crf_range=(1, 51),
        default_crf=24,
        presets=X26X_PRESETS,
        default_preset="faster",
        preset_argument="preset",
        crf_argument="crf",
        gop_arguments=_h264_gop,
        encode_s_per_megapixel=0.0026,
        bits_per_pixel=0.13,
    ),
    "hevc": Codec(
        encoder="libx265",
        decoder="hevc",
        gops=(COMB, STAR, CLOSED, INTRA),
        crf_range=(1, 51),
        default_crf=24,
        presets=X26X_PRESETS,
        default_preset="veryfast",
        preset_argument="preset",
        crf_argument="crf",
        gop_arguments=_hevc_gop,
        encode_s_per_megapixel=0.019,
        bits_per_pixel=0.1,
    ),
    "av1": Codec(
        encoder="libsvtav1",
        decoder="av1",
        gops=(CLOSED, INTRA),
        crf_range=(1, 63),
        default_crf=45,
        presets=tuple(str(level) for level in range(14)),
        default_preset="9",
        preset_argument="preset",
        crf_argument="crf",
        gop_arguments=_av1_gop,
        encode_s_per_megapixel=0.014,
        bits_per_pixel=0.03,
    ),
    "vp9": Codec(
        encoder="libvpx-vp9",
        decoder="vp9",
        gops=(CLOSED, INTRA),
        crf_range=(1, 63),
        default_crf=33,
        presets=tuple(str(level) for level in range(9)),
        default_preset="5",
        preset_argument="cpu-used",
        crf_argument="crf",
        gop_arguments=_vp9_gop,
        encode_s_per_megapixel=0.045,
        bits_per_pixel=0.12,
        # Hidden alternate reference frames would produce packets without a visible frame.
        fixed_arguments=(("auto-alt-ref", 0), ("lag-in-frames", 0)),
    ),
    "mjpeg": Codec(
        encoder="mjpeg",
        decoder="mjpeg",
        gops=(INTRA,),
        crf_range=(2, 31),
        default_crf=8,
        presets=(),
        default_preset="",
        preset_argument="",
        crf_argument="q:v",
        gop_arguments=_mjpeg_gop,
        encode_s_per_megapixel=0.001,
        bits_per_pixel=0.8,
    ),
    "h264_nvenc": Codec(
        encoder="h264_nvenc",
        decoder="h264",
        gops=(CLOSED, INTRA),
        crf_range=(1, 51),
        default_crf=26,
        presets=_NVENC_PRESETS,
        default_preset="p4",
        preset_argument="preset",
        crf_argument="cq",
        gop_arguments=_nvenc_gop,
        encode_s_per_megapixel=0.0007,
        bits_per_pixel=0.2,
    ),
    "hevc_nvenc": Codec(
        encoder="hevc_nvenc",
        decoder="hevc",
        gops=(CLOSED, INTRA),
        crf_range=(1, 51),
        default_crf=28,
        presets=_NVENC_PRESETS,
        default_preset="p4",
        preset_argument="preset",
        crf_argument="cq",
        gop_arguments=_nvenc_gop,
        encode_s_per_megapixel=0.0007,
        bits_per_pixel=0.12,
        fixed_arguments=(("tag:v", "hvc1"),),
    ),
}


def find_codec(name: str) -> Codec:
    """Return the codec for a value of `--codec`.

    Raises:
        UserError: No codec has this name.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise UserError(f'unknown codec "{name}"', hint=f"use one of {', '.join(CODECS)}") from None


# Key frame intervals at which the arguments of a codec may change: the limits and the default of each layout, and
# intervals around COMB_STEP.
_INTERVALS = {COMB: (3, 16, 17, 18, 90, 600), STAR: (3, 16, 18), CLOSED: (1, 30, 90, 600), INTRA: (1,)}


def arguments_hash(name: str, gop: str) -> str | None:
    """Return a hash of a codec's encoder arguments for a GOP layout; None if the hash is in `_SCHEMA_1_HASHES`.

    The hash is part of the recipe's fingerprint. Therefore a change to this file makes only the affected chunks stale.
    """
    codec = find_codec(name)
    names = [codec.encoder, codec.crf_argument, codec.preset_argument, *map(list, codec.fixed_arguments)]
    arguments = [sorted(codec.gop_arguments(gop, keyint).items()) for keyint in _INTERVALS[gop]]
    digest = hashlib.sha256(json.dumps([*names, *arguments]).encode()).hexdigest()[:16]
    return None if digest == _SCHEMA_1_HASHES.get(name, {}).get(gop) else digest


# Hashes for recipe schema 1, whose fingerprints contain no hash. Never change an entry, and add none for new codecs.
_SCHEMA_1_HASHES: dict[str, dict[str, str]] = {
    "h264": {
        "comb": "29127b4a227db357",
        "star": "16a2be4aadcebc91",
        "closed": "89049e4b0e6cdf16",
        "intra": "449e90fc4a049bfa",
    },
    "hevc": {
        "comb": "004d9cb05bdd0087",
        "star": "178e0d0ebee55ecc",
        "closed": "ae883c3f929cf200",
        "intra": "9a5daf1c1bf9436f",
    },
    "av1": {"closed": "57b10e7b9328c97e", "intra": "ae3ae2854ce6204f"},
    "vp9": {"closed": "56a90a86f3c1edd9", "intra": "20f08caefa79cd27"},
    "mjpeg": {"intra": "728a6525ec0748ff"},
    "h264_nvenc": {"closed": "5b96ab4bad6de135", "intra": "de69c0882433c69a"},
    "hevc_nvenc": {"closed": "747cb8515f59b6df", "intra": "ce204b1071d00701"},
}


# Types of NAL units with a slice: H.264 table 7-1, H.265 table 7-1. Even-numbered HEVC types up to
# _HEVC_LAST_SUBLAYER_TYPE are sub-layer non-reference pictures.
_H264_SLICE_TYPES = frozenset({1, 2, 3, 4, 5})
_HEVC_LAST_SLICE_TYPE = 31
_HEVC_LAST_SUBLAYER_TYPE = 14
_IDR_TYPES = {"h264": (5,), "hevc": (16, 17, 18, 19, 20)}


def slice_reader(codec: str, extradata: bytes) -> "Callable[[Packet | bytes], int | None]":
    """Return a function that reads the NAL unit header of the first slice in a packet of H.264 or HEVC.

    The function returns None for other codecs, for packets without a slice, and for streams without NAL unit lengths.
    """
    is_h264 = codec == "h264" and len(extradata) > 4 and extradata[0] == 1
    if not is_h264 and not (codec == "hevc" and len(extradata) > 21):
        return lambda packet: None
    length_bytes = (extradata[4 if is_h264 else 21] & 3) + 1

    def first_slice(packet: "Packet | bytes") -> int | None:
        payload, position = memoryview(packet), 0
        while position + length_bytes < len(payload):
            header = payload[position + length_bytes]
            if header & 31 in _H264_SLICE_TYPES if is_h264 else header >> 1 & 63 <= _HEVC_LAST_SLICE_TYPE:
                return header
            position += length_bytes + int.from_bytes(payload[position : position + length_bytes], "big")
        return None

    return first_slice


def is_reference(codec: str, header: int | None) -> bool:
    """Return True if other frames may reference a frame, or if the header of its first slice is unknown (None)."""
    if header is None:
        return True
    if codec == "h264":
        return header >> 5 & 3 != 0  # nal_ref_idc (H.264 7.3.1)
    unit_type = header >> 1 & 63
    return unit_type > _HEVC_LAST_SUBLAYER_TYPE or unit_type % 2 == 1


def is_idr(codec: str, header: int | None) -> bool:
    """Return True if a key frame is an IDR picture, according to the header of its first slice."""
    if codec not in _IDR_TYPES:
        return True
    return header is not None and (header & 31 if codec == "h264" else header >> 1 & 63) in _IDR_TYPES[codec]

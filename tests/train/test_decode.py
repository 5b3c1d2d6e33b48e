import random
from fractions import Fraction

import pytest

from prep.synthetic.frame_code import read_frame_number
from tests.train.tiny_data import FPS, encode_chunk
from train.data.decode import decode_frames
from train.data.failures import SampleFailed

NUM_FRAMES = 40
KEY_FRAMES = [0, 8, 16, 24, 32]


@pytest.fixture(scope="module")
def payload() -> bytes:
    return encode_chunk(100, NUM_FRAMES)


def numbers(payload: bytes, frames: list[int], *, key_frames: list[int] = KEY_FRAMES) -> list[int]:
    pictures = decode_frames(payload, frames, fps=Fraction(FPS), key_frames=key_frames, key="v_000000000")
    return [read_frame_number(picture) for picture in pictures]


def test_every_single_frame_is_the_one_asked_for(payload: bytes) -> None:
    for frame in range(NUM_FRAMES):
        assert numbers(payload, [frame]) == [100 + frame]


def test_any_choice_of_frames_comes_in_the_order_asked_for(payload: bytes) -> None:
    draw = random.Random(0)
    for _ in range(100):
        frames = draw.choices(range(NUM_FRAMES), k=draw.randint(1, 6))
        assert numbers(payload, frames) == [100 + frame for frame in frames]


def test_a_packet_table_that_knows_no_key_frames_costs_time_only(payload: bytes) -> None:
    assert numbers(payload, [39, 3], key_frames=[]) == [139, 103]


def test_a_packet_table_that_lies_about_key_frames_cannot_change_a_frame(payload: bytes) -> None:
    assert numbers(payload, [3, 21, 39], key_frames=[0, 5, 19, 21, 39]) == [103, 121, 139]


@pytest.mark.parametrize("frames", [[40], [3, 41], [1000]])
def test_a_frame_beyond_the_end_is_an_error(payload: bytes, frames: list[int]) -> None:
    with pytest.raises(SampleFailed, match="do not come out") as caught:
        numbers(payload, frames)
    assert (caught.value.key, caught.value.reason) == ("v_000000000", "frame_missing")


@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_a_file_that_is_no_video_is_an_error(payload: bytes, damage: str) -> None:
    content = {"empty": b"", "text": b"no video at all" * 100, "cut": payload[: len(payload) // 2]}[damage]
    with pytest.raises(SampleFailed) as caught:
        numbers(content, [5, 30])
    assert caught.value.reason in ("undecodable", "frame_missing")

"""Tests of how sizes, durations and rates are written, and how the values of flags are parsed."""

from fractions import Fraction

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import (
    bitrate_text,
    clock,
    duration_text,
    parse_bitrate,
    parse_length,
    parse_size,
    range_text,
    rate_text,
    short_number,
    size_text,
)


def test_sizes_have_three_digits_and_a_unit() -> None:
    texts = {0: "0 bytes", 999: "999 bytes", 1000: "1 kB", 1_234_000: "1.23 MB", 999_960_000: "1 GB", 10**11: "100 GB"}
    assert {size: size_text(size) for size in texts} == texts and size_text(2e16) == "20,000 TB"


def test_durations_and_rates_have_a_suitable_unit() -> None:
    assert [duration_text(seconds) for seconds in (0.2, 55, 130, 3600, 4e6)] == [
        "0 s",
        "55 s",
        "2.2 min",
        "1.0 h",
        "1,111.1 h",
    ]
    assert [rate_text(rate) for rate in (1200, 1.5, 0.5)] == ["1,200/s", "1.5/s", "30.0/min"]
    assert [short_number(number) for number in (0, 12345, 2.5, 0.0312)] == ["0", "12,345", "2.5", "0.0312"]
    assert range_text("2 h", "4 h") == "2 to 4 h" and range_text("30 min", "2 h") == "30 min to 2 h"
    assert range_text("2 h", "2 h") == "2 h"


def test_times_read_as_in_a_player() -> None:
    assert [clock(seconds) for seconds in (0.4, 34, 59.6, 725, 3723)] == ["0:00", "0:34", "1:00", "12:05", "1:02:03"]
    exact = [clock(seconds, decimals=3) for seconds in (0, 15, 75.5, 3723, 59.9996)]
    assert exact == ["0:00", "0:15", "1:15.5", "1:02:03", "1:00"] and clock(3.25, decimals=1) == "0:03.2"


@pytest.mark.parametrize(
    ("text", "size"), [("100GB", 10**11), ("1.5 tb", 1_500_000_000_000), ("10k", 10_000), ("0.1kB", 100), ("60 B", 60)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text, flag="--cache-size") == size


@pytest.mark.parametrize("text", ["", "0GB", "GB", "-1GB", "1XB", "100 %", "60", "1e3GB"])
def test_what_is_no_size_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError, match="is not a size") as caught:
        parse_size(text, flag="--cache-size")
    assert "--cache-size 100GB" in str(caught.value.hint)


def test_lengths_and_bitrates_are_read_exactly() -> None:
    assert (parse_length("15s", flag="--len"), parse_length("0.5ms", flag="--len")) == (Fraction(15), Fraction(1, 2000))
    assert (parse_bitrate("800k", flag="--bitrate"), parse_bitrate("2M", flag="--bitrate")) == (8e5, 2e6)
    for text in ("15", "0s", "-1s", "1m", "s"):
        with pytest.raises(UserError, match=f'--len "{text}" is not a length'):
            parse_length(text, flag="--len")
    for texts, canonical in (
        (("800k", "0.8M", ".8M", "800K", "800.0k", "0.80M"), "800k"),
        (("2M", "2000k", "2.M", "2.0M"), "2M"),
        (("1.5M", "1500k"), "1500k"),
        (("1.25k", "0.00125M"), "1.25k"),
        (("1050k", "1.05M"), "1050k"),
        (("0.01k",), "0.01k"),
    ):
        assert {bitrate_text(parse_bitrate(text, flag="--bitrate")) for text in texts} == {canonical}
        assert parse_bitrate(canonical, flag="--bitrate") == parse_bitrate(texts[0], flag="--bitrate")
    for text, message in (
        *(("2000000", "has no unit"), ("2G", "is not a bitrate"), ("0k", "is not a bitrate")),
        *((text, "is not a bitrate") for text in ("0.0M", "0.0001k", "-1M", "1e3k", ".k", "1,5M", "800m")),
    ):
        with pytest.raises(UserError, match=message):
            parse_bitrate(text, flag="--bitrate")

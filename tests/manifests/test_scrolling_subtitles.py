"""Tests of automatic subtitles that show each phrase several times: YouTube's cues, and the output of converters."""

import re

import pytest

from clipmill.manifests.adapters.subtitles import read_cues

# `yt-dlp --write-auto-subs` saves cues like these: a pause starts with a line that holds one blank, and each phrase is
# shown three times.
AUTOMATIC = """WEBVTT
Kind: captions
Language: en

00:00:00.469 --> 00:00:03.169 align:start position:0%
{blank}
welcome<00:00:01.469><c{colour}> to</c><00:00:01.620><c{colour}> the</c><00:00:01.740><c{colour}> series</c>

00:00:03.169 --> 00:00:03.179 align:start position:0%
welcome to the series
{blank}

00:00:03.179 --> 00:00:05.910 align:start position:0%
welcome to the series
on<00:00:03.480><c{colour}> neural</c><00:00:03.900><c{colour}> networks</c>

00:00:05.910 --> 00:00:05.920 align:start position:0%
on neural networks
{blank}

00:00:09.000 --> 00:00:11.000 align:start position:0%
{blank}
no

00:00:11.000 --> 00:00:11.010 align:start position:0%
no
{blank}

00:00:11.010 --> 00:00:12.000 align:start position:0%
no
no
"""
PHRASES = [
    (0.469, 3.169, "welcome to the series"),
    (3.179, 5.91, "on neural networks"),
    (9.0, 11.0, "no"),
    (11.01, 12.0, "no"),
]


def phrases(text: str) -> list[tuple[float, float, object]]:
    return [(cue.begin_s, cue.end_s, cue.text) for cue in read_cues(text)]


@pytest.mark.parametrize("blank", [" ", "\t", "\u00a0", "&nbsp;"])
@pytest.mark.parametrize("colour", ["", ".colorE5E5E5"])
def test_automatic_subtitles_have_each_phrase_once(blank: str, colour: str) -> None:
    assert phrases(AUTOMATIC.format(blank=blank, colour=colour)) == PHRASES


def test_automatic_subtitles_that_were_converted_have_each_phrase_once() -> None:
    cues, body = [], AUTOMATIC.format(blank=" ", colour="").partition("\n\n")[2]
    for number, cue in enumerate(body.split("\n\n"), start=1):
        times, _, text = cue.replace(".", ",").partition("\n")
        plain = re.sub(r"<[^>]*>", "", text)
        cues.append(f"{number}\n{times.partition(' align')[0]}\n{plain}")
    assert phrases("\n\n".join(cues)) == PHRASES


def test_lines_that_people_say_twice_stay() -> None:
    times = ("00:01.000 --> 00:02.000", "00:02.000 --> 00:03.000", "00:03.000 --> 00:04.000")
    texts = ("No.", "No.\nNever.", "Never.")
    text = "\n\n".join(["WEBVTT", *map("\n".join, zip(times, texts, strict=True))])
    assert phrases(text) == [(1.0, 2.0, "No."), (2.0, 3.0, "No. Never."), (3.0, 4.0, "Never.")]


def test_a_line_of_blanks_does_not_end_a_cue() -> None:
    assert phrases("WEBVTT\n\n00:01.000 --> 00:02.000\n- Hello\n \n- Hi\n\nNOTE no caption\n") == [
        (1.0, 2.0, "- Hello - Hi")
    ]

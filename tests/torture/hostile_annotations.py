"""Hostile annotation files for `prep manifest`.

Rows must be accepted or rejected with a reason, or the complete file must be rejected with an error that names it. No
code in a file is executed, and memory is limited.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.torture import bases
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well, no_litter, nothing_in
from tests.torture.workspace import Workspace

PART = "hostile"
_HEADER = b"video,text,begin_s,end_s,split\n"
_ROW = b"a,one,0,1,train\n"
_EPIC = b"video_id,start_timestamp,stop_timestamp,narration,verb_class,noun_class,all_noun_classes\n"
_DEEP = 100_000


class _Runs:
    """Object whose pickle requests the execution of a command."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return one case per file, in an order determined by `seed`."""
    return {"annotations": partial(_annotations, seed, workspace)}


def _annotations(seed: int, workspace: Workspace) -> Iterator[Case]:
    every = [(kind, name) for kind, files in _FILES.items() for name in files]
    for kind, name in draw(every, seed=f"{seed}/annotations", kinds=[lambda pair: pair[0]]):
        yield Case(f"{PART}/annotations/{kind}/{name}", kind, partial(_refused_or_read, workspace, kind, name))


def _refused_or_read(workspace: Workspace, kind: str, name: str, folder: Path) -> None:
    content, ending = _FILES[kind][name], {"csv": "csv", "jsonl": "jsonl", "kinetics": "csv", "epic": "csv"}
    path = folder / f"train.{ending.get(kind, 'pkl' if kind == 'pickle' else 'json')}"
    path.write_bytes(content.replace(b"MARKER", str(folder / "ran").encode()))
    videos = bases.videos(workspace) / "first"
    arguments: dict[str, tuple[object, ...]] = {
        "vatex": ("vatex", videos, "--annotations", path),
        "ego4d": ("ego4d", videos, "--annotations", path),
        "pickle": ("ego4d", videos, "--annotations", path),
        "epic": ("epic-kitchens", videos, "--annotations", path),
        "kinetics": ("kinetics", path, "--videos", videos),
    }
    given = arguments.get(kind, ("folder", videos, "--captions", path))
    ran = workspace.commands.run("prep", ["manifest", *given, "--data", folder / "data"], scratch=folder / "tmp")
    ended_well(ran, status={0, 1, 2})
    if (folder / "ran").exists():
        raise Broken(f"it was run: {ran.describe()}")
    if ran.status == 2 and (not ran.stderr.startswith("error: ") or len(ran.stderr) > 2000):
        raise Broken(f"refused without a message of two lines: {ran.describe()}")
    if ran.status == 2 and str(path) not in ran.stderr and "no usable video" not in ran.stderr:
        raise Broken(f"the file is not named: {ran.describe()}")
    no_litter(folder / "data")
    nothing_in(folder / "tmp")


def _csv() -> dict[str, bytes]:
    return {
        "empty": b"",
        "header-only": _HEADER,
        "no-columns": b"one,two\n1,2\n",
        "byte-order-mark": b"\xef\xbb\xbf" + _HEADER + _ROW,
        "two-byte-order-marks": b"\xef\xbb\xbf" * 2 + _HEADER + _ROW,
        "utf-16": (_HEADER + _ROW).decode().encode("utf-16"),
        "latin-1": _HEADER + "a,café,0,1,train\n".encode("latin-1"),
        "nul": _HEADER + b"a,o\0ne,0,1,train\n",
        "noise": bytes(range(256)) * 400,
        "open-quote": _HEADER + b'a,"one,0,1,train\n' * 1000,
        "one-long-line": _HEADER + b"a," + b"x" * 20_000_000 + b",0,1,train\n",
        "many-columns": b",".join([b"c"] * 200_000) + b",video,text\n",
        "same-column-twice": b"video,text,text\na,one,two\n",
        "carriage-returns": (_HEADER + _ROW).replace(b"\n", b"\r"),
        "times": _HEADER
        + b"".join(
            b"a,one,%s,%s,train\n" % pair
            for pair in (
                *((b"nan", b"1"), (b"0", b"inf"), (b"-inf", b"0"), (b"1e400", b"2"), (b"-1", b"1"), (b"1", b"0")),
                *((b"9" * 5000, b"1"), (b"0x10", b"1"), (b"1_000", b"2"), ("\u0661".encode(), b"3"), (b"1e-400", b"1")),
            )
        ),
        "splits": _HEADER + b"a,one,0,1,train\na,two,0,1,val\na,three,0,1,../../x\n",
        "paths": _HEADER
        + b"../../etc/passwd,x,0,1,train\n/dev/zero,x,0,1,train\n"
        + b"../" * 5000
        + b"a,x,0,1,train\n",
        "signs": _HEADER + 'a,"\u202e\u0000\ud83c \x1b[31m\u2028"\n'.encode("utf-8", "surrogatepass"),
        "formula": _HEADER + b"a,\"=cmd|' /C calc'!A0\",0,1,train\n",
        "duplicates": _HEADER + _ROW * 50_000,
        "spreadsheet": b"PK\x03\x04" + bytes(2000),
        "gzip": b"\x1f\x8b\x08\x00" + bytes(2000),
    }


def _json_lines() -> dict[str, bytes]:
    nested = b"[" * _DEEP + b"]" * _DEEP
    return {
        "nested": b'{"video": "a", "text": ' + nested + b"}\n",
        "nested-objects": b'{"video":' * _DEEP + b"1" + b"}" * _DEEP + b"\n",
        "numbers": b'{"video": "a", "text": "x", "begin_s": 1e999, "end_s": -1e999}\n'
        + b'{"video": "a", "text": "x", "begin_s": %s}\n' % (b"9" * 10_000),
        "not-a-number": b'{"video": "a", "text": "x", "begin_s": NaN, "end_s": Infinity}\n',
        "kinds": b'{"video": {"a": 1}, "text": 3}\n{"video": ["a"]}\n[]\n3\nnull\n"a"\n{"video": "a", "text": null}\n'
        + b'{"video": "a", "text": "x", "source": {"a": [1]}, "split": 3, "begin_s": true}\n',
        "same-key-twice": b'{"video": "a", "video": "b", "text": "x", "text": "y"}\n',
        "lone-surrogate": b'{"video": "a", "text": "\\ud800"}\n{"video": "\\udfff", "text": "x"}\n',
        "cut": b'{"video": "a", "text": "x"}\n{"video": "a", "te',
        "nul": b'{"video": "a", "text": "\\u0000"}\n',
        "one-line-of-all": json.dumps({"video": "a", "text": "x" * 20_000_000}).encode(),
    }


def _json() -> dict[str, bytes]:
    return {
        "empty": b"",
        "null": b"null",
        "nested": b"[" * _DEEP + b"]" * _DEEP,
        "nested-objects": b'[{"a":' * _DEEP,
        "nested-entry": b'[{"videoID": "a", "enCap": ' + b"[" * _DEEP + b"]" * _DEEP + b"}]",
        "cut": b'[{"videoID": "a", "enCap": ["x"]}, {"vid',
        "kinds": b'[1, "a", null, [], {"videoID": 3, "enCap": "x"}, {"videoID": "a", "enCap": [1, null, {}]}]',
        "lone-surrogate": b'[{"videoID": "a", "enCap": ["\\ud800"]}]',
        "after-the-end": b'[{"videoID": "a", "enCap": ["x"]}] and more',
        "huge-number": b'[{"videoID": "a", "enCap": ["x"], "n": ' + b"9" * 10_000 + b"}]",
        "not-utf-8": b'[{"videoID": "a", "enCap": ["\xff\xfe"]}]',
        "one-long-text": b'[{"videoID": "a", "enCap": ["' + b"x" * 20_000_000 + b'"]}]',
        "open-text": b'[{"videoID": "a", "enCap": ["' + b"x" * 5_000_000,
        "pickle": pickle.dumps([1, 2]),
    }


def _ego4d() -> dict[str, bytes]:
    template = b'{"a": {"narration_pass_1": {"narrations": [%s]}}}'
    return {
        **{name: content for name, content in _json().items() if name in ("empty", "null", "nested", "cut")},
        "videos-as-list": b'{"videos": [1, 2, {"a": 3}]}',
        "kinds": template % b'1, null, {"timestamp_sec": "x"}, {"timestamp_sec": NaN, "narration_text": 3}',
        "huge-times": template
        % b'{"timestamp_sec": 1e308, "narration_text": "x"}, {"timestamp_sec": -1, "narration_text": "y"}',
        "nested-narration": template
        % (b'{"timestamp_sec": 1, "narration_text": ' + b"[" * _DEEP + b"]" * _DEEP + b"}"),
    }


def _pickles() -> dict[str, bytes]:
    harm = pickle.dumps(_Runs("MARKER"), protocol=0)
    billion: object = ["x"] * 10
    for _ in range(8):
        billion = [billion] * 10
    return {
        "runs": harm,
        "runs-inside": pickle.dumps([("a", 0.0, 1.0, "x")], protocol=0)[:-1] + harm,
        "eval": b'c__builtin__\neval\n(S\'open("MARKER", "w")\'\ntR.',
        "getattr": b"cbuiltins\ngetattr\n(cos\n__dict__\nS'system'\ntR.",
        "import": b"cantigravity\nfly\n.",
        "memo-bomb": pickle.dumps(billion),
        "nested": b"(" * _DEEP + b"l" * _DEEP + b".",
        "huge-length": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "huge-text": b"\x80\x04X\xff\xff\xff\x7f.",
        "huge-integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "huge-memo": b"\x80\x04]r\xff\xff\xff\xff.",
        "cut": pickle.dumps([("a", 0.0, 1.0, "x")] * 100)[:500],
        "persistent": b"\x80\x04\x8c\x01aQ.",
        "kinds": pickle.dumps([("a", "b", None, 3), (), None, {"a": 1}, ("a", float("nan"), float("inf"), "x")]),
        "tuple-of-tuples": pickle.dumps((("a", 0.0, 1.0, "x"),) * 10),
        "bytes": pickle.dumps(b"x" * 1000),
        "noise": bytes(range(256)) * 40,
    }


_FILES: dict[str, dict[str, bytes]] = {
    "csv": _csv(),
    "jsonl": _json_lines(),
    "vatex": _json(),
    "ego4d": _ego4d(),
    "pickle": _pickles(),
    "epic": {
        "times": _EPIC
        + b"".join(b"a,%s,00:00:01.00,x,1,2,[2]\n" % time for time in (b"99:99:99", b"-1:00:00", b"nan", b"9" * 400)),
        "classes": _EPIC
        + b"".join(
            b'a,00:00:00.00,00:00:01.00,x,%s,2,"%s"\n' % pair
            for pair in ((b"9" * 4000, b"[2]"), (b"-1", b"[]"), (b"1.5", b"[[1]]"), (b"1", b"__import__('os')"))
        ),
        "nested-nouns": _EPIC + b'a,00:00:00.00,00:00:01.00,x,1,2,"' + b"[" * _DEEP + b'"\n',
        "many-nouns": _EPIC + b'a,00:00:00.00,00:00:01.00,x,1,2,"[' + b"1, " * 40_000 + b'1]"\n',
    },
    "kinetics": {
        "times": b"label,youtube_id,time_start,time_end,split\n"
        + b"".join(b"x,a,%s,1,train\n" % time for time in (b"nan", b"-5", b"1e400", b"9" * 400, b"x")),
        "plain": b"a.mp4 one\n\n   \n" + b"a.mp4 " * 20_000 + b"\n../../etc/passwd 3\n/dev/zero 3\n",
        "binary": bytes(range(256)) * 40,
        "spaces": b" " * 2_000_000 + b"\n",
    },
}

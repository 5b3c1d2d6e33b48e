"""Random server responses to `prep captions`: complete and truncated answers, refusals, errors and dropped connections.

A complete answer is stored exactly as the server sent it and becomes the caption of its chunk; no other text does. The
command never asks about such a chunk again. After every run the data folder is valid. A run against a working server
completes it.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from clipmill.prep.captions.answers import answers_in
from clipmill.shards.reader import Variant
from tests.prep.captions.server import MODEL, Reply, Request, completion, run_server
from tests.torture import bases
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, no_litter
from tests.torture.commands import Ran
from tests.torture.workspace import Workspace, copy

PART = "answers"
_NUM_CASES = 60  # cases per subject
_NUM_RUNS = 3  # runs against the faulty server, before one against a working server
_KEYS = ("", "EMPTY", "x", "stub", "sk-0123456789abcdef")
_TEXTS = (
    "EMPTY street, a man",
    "a fox x2 by the sea",
    'a sign says "stub-vl"',
    "\u201cquoted\u201d caf\u00e9 \U0001f98a",
    "two\nlines\tand a tab",
    "nan",
    "sk-0123456789abcdef on a wall",
    "family: \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "&lt;b&gt; null",
)
_COMPLETE = ("stop", "stop", "stop", "eos", "eos_token", "end_turn", "stop_sequence", "STOP", None)
_INCOMPLETE = ("length", "content_filter", "error", "abort", "tool_calls", "function_call", "recitation", "cancelled")
_USAGES: tuple[Any, ...] = (True, "12", -5, 1e30, None, [], 3.5, 1 << 40, {"a": 1})
_EMPTY = ("", " \n", "\u200b", "\u2800\ufe0f", None)
_STATUSES = {"passing": (429, 500, 502, 503, 408), "all": (402, 403, 401, 404), "single": (400, 422)}


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases for each mixture of responses, which are drawn from `seed`."""
    return {name: partial(_cases, seed, workspace, name) for name in _MIXTURES}


def _cases(seed: int, workspace: Workspace, mixture: str) -> Iterator[Case]:
    for number in range(_NUM_CASES):
        name = f"{PART}/{mixture}/{number:02d}"
        yield Case(name, mixture, partial(_try, workspace, mixture, seed=f"{seed}/{name}"))


@dataclass
class _Script:
    """Server whose responses are drawn at random, with the texts that it has sent about each chunk.

    Attributes:
        kinds: Names of `_KINDS` to draw from.
        texts: Texts of the valid answers, by chunk.
        again: Chunks that were requested although they already had a valid answer.
        doubtful: Texts of answers that the command may accept or reject.
    """

    random: Random
    kinds: tuple[str, ...]
    texts: dict[str, list[str]] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)
    _num_sent: int = 0

    def reply(self, request: Request, _: int) -> Reply:
        """Draw a response."""
        chunk = hashlib.sha256(b"".join(picture.tobytes() for picture in request.pictures)).hexdigest()
        with self._lock:
            self._num_sent += 1
            if chunk in self.texts:
                self.again.append(chunk)
            text = f"{self.random.choice(_TEXTS)} {self._num_sent}"
            is_counting, reply = _KINDS[self.random.choice(self.kinds)](self.random, text, request)
            if is_counting is None:
                self.doubtful.add(text)
            elif is_counting:
                self.texts.setdefault(chunk, []).append(text)
            return reply


_Drawn = tuple[bool | None, Reply]  # whether the answer is valid; None if both readings are allowed


def _complete(random: Random, text: str, request: Request) -> _Drawn:
    return True, completion(text, request, finish_reason=random.choice(_COMPLETE))


def _answer_incompletely(random: Random, text: str, request: Request) -> _Drawn:
    return False, completion(text, request, finish_reason=random.choice(_INCOMPLETE))


def _counts(random: Random, text: str, request: Request) -> _Drawn:
    """Draw a valid answer whose token counts are not numbers."""
    usage = {name: random.choice(_USAGES) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return True, completion(text, request, usage=random.choice((usage, None, [], "many")))


def _no_text(random: Random, _: str, request: Request) -> _Drawn:
    return False, completion(random.choice(_EMPTY), request)


def _surrogate(random: Random, text: str, request: Request) -> _Drawn:
    """Draw an answer with a lone surrogate outside the text. JSON may contain one; a file cannot."""
    if random.random() < 0.5:
        return None, completion(text, request, finish_reason="\ud800")
    return False, completion(text, request, refusal="no \udfff")


def _refusal(random: Random, text: str, request: Request) -> _Drawn:
    return False, completion(random.choice((text, None)), request, refusal="I cannot describe this")


def _cut(random: Random, text: str, request: Request) -> _Drawn:
    content = json.dumps(completion(text, request)).encode()
    return False, content[: random.randrange(len(content) * 3 // 4)]


def _no_answer(random: Random, _: str, request: Request) -> _Drawn:
    wrong: list[Reply] = [b"<html>busy</html>", b"", b"null", b"[]", {"choices": []}, {"choices": [{}]}, {"error": "x"}]
    return False, random.choice([*wrong, completion(None, request, choices=None), completion("a", request, model=7)])


def _silence(*_: object) -> _Drawn:
    return False, None


def _status(kind: str) -> Callable[[Random, str, Request], _Drawn]:
    return lambda random, *_: (False, random.choice(_STATUSES[kind]))


def _other_model(_: Random, text: str, request: Request) -> _Drawn:
    return False, completion(text, request, model="another-model")


def _snapshot(_: Random, text: str, request: Request) -> _Drawn:
    return True, completion(text, request, model=f"{MODEL}-2024-08-06")


_KINDS: dict[str, Callable[[Random, str, Request], _Drawn]] = {
    "complete": _complete,
    "incomplete": _answer_incompletely,
    "counts": _counts,
    "no-text": _no_text,
    "surrogate": _surrogate,
    "refusal": _refusal,
    "cut": _cut,
    "no-answer": _no_answer,
    "silence": _silence,
    "passing": _status("passing"),
    "all": _status("all"),
    "single": _status("single"),
    "other-model": _other_model,
    "snapshot": _snapshot,
}
_MIXTURES: dict[str, tuple[str, ...]] = {
    "reasons": ("complete", "complete", "incomplete", "no-text", "refusal"),
    "forms": ("complete", "counts", "surrogate", "snapshot", "no-answer"),
    "errors": ("complete", "complete", "passing", "all", "single", "silence", "cut"),
    "everything": ("complete", *_KINDS),
}


def _try(workspace: Workspace, mixture: str, folder: Path, *, seed: str) -> None:
    random = Random(seed)
    copy(bases.with_chunks(workspace), folder)
    script = _Script(random, _MIXTURES[mixture])
    key = random.choice(_KEYS)
    environment = {"OPENAI_API_KEY": key} if key else {}
    retries = random.choice((0, 0, 1))
    # Some texts look like API keys that the command would mask, but they are valid captions.
    asked = ("--frames", 1, "--size", 32, "--in-flight", random.choice((1, 3)), "--retries", retries, "--timeout", 20)
    with run_server(script.reply) as server:
        command = ("captions", "--endpoint", server.address, "--model", MODEL, *asked, *bases.ENGINE)
        for number in range(_NUM_RUNS + 1):
            if number == _NUM_RUNS:
                script.kinds = ("complete",)
            ran = _prep(workspace, folder, environment, *_next(random, folder, command, number))
            _require_as_sent(folder, script, ran)
        # `prep retry` asks again about chunks whose answers were refused or truncated in an earlier run.
        ran = _prep(workspace, folder, environment, *command)
        ran = _prep(workspace, folder, environment, "retry", "--column", "captions", *bases.ENGINE)
        _require_as_sent(folder, script, ran)
        captions = _captions(folder)
        num_chunks = Variant.open(folder / "data").num_samples
        if ran.status or len(captions) != num_chunks or len(server.log) < num_chunks:
            raise Broken(f"{len(captions)} of {num_chunks} captions in the end: {ran.describe()}")
        ended_well(_prep(workspace, folder, environment, "verify", "--deep"), status=0)
    no_litter(folder / "data")


def _next(random: Random, folder: Path, command: tuple[object, ...], number: int) -> tuple[object, ...]:
    """Return the next command: the same command again, or a retry of the failures."""
    is_begun = any(folder.glob("data/captions/*/commits/[0-9]*.json"))
    if number and is_begun and random.random() < 0.3:
        return ("retry", "--column", "captions", *bases.ENGINE)
    return command


def _prep(workspace: Workspace, folder: Path, environment: dict[str, str], *arguments: object) -> Ran:
    words = [*arguments, "--data", folder / "data"]
    ran = workspace.commands.run("prep", words, scratch=folder / "tmp", environment=environment)
    return ended_well(ran, status={0, 1})


def _captions(folder: Path) -> dict[str, str]:
    """Return the captions of the column by the key of their chunk, or an empty dict before its first run."""
    if not any(folder.glob("data/captions/*/commits/[0-9]*.json")):
        return {}
    variant = next(path for path in folder.glob("data/captions/*") if path.is_dir())
    samples = Variant(variant).require_complete().iterate()
    return {str(sample["__key__"]): json.loads(sample["caption.json"])["caption_text"] for sample in samples}


def _require_as_sent(folder: Path, script: _Script, ran: Ran) -> None:
    """Check that captions are valid answers, stored exactly as sent, and that no answered chunk was requested again."""
    if script.again:
        raise Broken(f"{len(script.again)} questions were asked although there was an answer: {ran.describe()}")
    sent = {text for texts in script.texts.values() for text in texts}
    stored = {answer.text for journals in folder.glob("data/captions/*/answers") for answer in answers_in(journals)}
    if missing := sorted(sent - stored):
        raise Broken(f"an answer was not stored as sent: {missing[0]!r}: {ran.describe()}")
    lines = {" ".join(text.split()) for text in {*sent, *script.doubtful}}
    captions = _captions(folder)
    if wrong := [text for text in captions.values() if text not in lines]:
        raise Broken(f"not the text of an answer that counts: {wrong[0]!r}: {ran.describe()}")
    if ran.status == 0 and len(captions) < len(script.texts):
        raise Broken(f"{len(script.texts)} chunks have an answer, {len(captions)} a caption: {ran.describe()}")

"""The caption metrics that are Java programs, METEOR and SPICE. Only this module runs Java."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from manifests.errors import UserError

_METEOR_JAR = "meteor/meteor-1.5.jar"
_METEOR_TIMEOUT_S = 2 * 3600.0
_SEPARATOR = " ||| "
_SPICE_JAR = "spice/spice-1.0.jar"
_SPICE_TIMEOUT_S = 4 * 3600.0
_SPICE_CLASS = "edu.anu.spice.SpiceScorer"
_SPICE_NEEDS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")


class MetricUnavailable(Exception):
    """A metric cannot be computed on this machine; the message says why."""


def java() -> str:
    """Path of the java program.

    Raises:
        MetricUnavailable: there is none on the PATH.
    """
    path = shutil.which("java")
    if path is None:
        raise MetricUnavailable("no java program on the PATH")
    return path


def jar_of_pycocoevalcap(name: str) -> Path:
    """A jar of the package pycocoevalcap, by its path in it.

    Raises:
        MetricUnavailable: the package is not installed, or has no such jar.
    """
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise MetricUnavailable("the package pycocoevalcap is not installed (pip install 'clipmill[caption-metrics]')")
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise MetricUnavailable(f"pycocoevalcap has no {name}")
    return path


class Dialogue:
    """A program that answers each line with a line."""

    def __init__(self, command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
        """Start the program.

        Args:
            folder: its working directory.
            timeout_s: time until it is killed.
        """
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed at the end
        self._process = subprocess.Popen(
            [*command],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            errors="replace",
        )
        self._timer = threading.Timer(timeout_s, self._process.kill)
        self._timer.start()

    def send(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return line.strip()

    def __enter__(self) -> "Dialogue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # buffered lines that were not sent
                pass

    def _ended(self) -> MetricUnavailable:
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        return MetricUnavailable(f"java ended with status {status}{last_line(self._errors.read())}")


def run(command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
    """Run a program.

    Raises:
        MetricUnavailable: it failed, or took longer than `timeout_s`.
    """
    try:
        ended = subprocess.run([*command], cwd=folder, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise MetricUnavailable(f"java took longer than {timeout_s:.0f} s") from error
    if ended.returncode:
        raise MetricUnavailable(
            f"java ended with status {ended.returncode}{last_line(ended.stderr.decode(errors='replace'))}"
        )


def last_line(text: str) -> str:
    """The last line that a program printed, after a colon; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The first line of a Java stack trace names the error, the others its location.
    while len(lines) > 1 and lines[-1].startswith(("at ", "... ")):
        lines.pop()
    return f": {lines[-1][:200]}" if lines else ""


class Meteor:
    """METEOR 1.5 (Denkowski and Lavie 2014), with the program and options of pycocoevalcap.

    One program serves a whole `with` block, as it takes seconds to start.
    """

    def __init__(self) -> None:
        self._dialogue: Dialogue | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._dialogue is not None:
            self._dialogue.__exit__(kind, error, trace)
            self._dialogue = None

    def __call__(
        self, candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
    ) -> tuple[float, dict[str, float]]:
        """METEOR of the corpus, and of each video, from tokenized captions.

        Raises:
            MetricUnavailable: Java or the package is missing, or the program failed.
        """
        if self._dialogue is None:
            self._dialogue = _program()
        dialogue, statistics = self._dialogue, []
        for video_id, candidate in candidates.items():
            # The program's separator of captions.
            ours = candidate.replace("|||", "").replace("  ", " ")
            dialogue.send(_SEPARATOR.join(("SCORE", *references[video_id], ours)))
            statistics.append(dialogue.receive())
        dialogue.send(_SEPARATOR.join(("EVAL", *statistics)))
        per_video = {video_id: float(dialogue.receive()) for video_id in candidates}
        return float(dialogue.receive()), per_video


def _program() -> Dialogue:
    program, jar = java(), jar_of_pycocoevalcap(_METEOR_JAR)
    command = [program, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    return Dialogue(command, folder=jar.parent, timeout_s=_METEOR_TIMEOUT_S)


def check_jars(folder: Path) -> None:
    """Raise a UserError if the two jars of SPICE are not in the folder."""
    missing = [name for name in _SPICE_NEEDS if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} has no {' and no '.join(missing)}, which SPICE needs",
            hint="take both from stanford-corenlp-full-2015-12-09.zip (CoreNLP 3.6.0), or leave SPICE out",
        )


def spice(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]], *, jars: Path
) -> tuple[float, dict[str, float]]:
    """SPICE (Anderson et al. 2016), with the program of pycocoevalcap: mean F-score and that of each video.

    Args:
        candidates, references: tokenized captions.
        jars: folder of Stanford CoreNLP 3.6.0 and its models, half a gigabyte that no package index has.

    Raises:
        MetricUnavailable: Java or pycocoevalcap is missing, or the program failed.
    """
    program, jar = java(), jar_of_pycocoevalcap(_SPICE_JAR)
    classes = os.pathsep.join(
        (str(jar), *(str(jars.resolve() / name) for name in _SPICE_NEEDS), str(jar.parent / "lib" / "*"))
    )
    with tempfile.TemporaryDirectory(prefix="train-caption-") as temporary:
        folder = Path(temporary)
        given, scored = folder / "given.json", folder / "scored.json"
        # Ids become file names in the program, so it is given numbers.
        items = [
            {"image_id": number, "test": candidate, "refs": list(references[video_id])}
            for number, (video_id, candidate) in enumerate(candidates.items())
        ]
        given.write_text(json.dumps(items), encoding="utf-8")
        options = [str(given), "-out", str(scored), "-subset", "-silent"]
        run([program, "-Xmx8G", "-cp", classes, _SPICE_CLASS, *options], folder=folder, timeout_s=_SPICE_TIMEOUT_S)
        try:
            answers = {item["image_id"]: item["scores"]["All"]["f"] for item in json.loads(scored.read_bytes())}
            per_video = {video_id: float(answers[number]) for number, video_id in enumerate(candidates)}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise MetricUnavailable(f"SPICE's answer cannot be read: {error}") from error
    return sum(per_video.values()) / len(per_video), per_video

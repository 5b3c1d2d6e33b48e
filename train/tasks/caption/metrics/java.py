"""The one interface to Java: whether it is there, and a program of it that answers line by line."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from manifests.errors import UserError


class Absent(Exception):
    """A metric cannot be computed here; the message says why."""


def java() -> str:
    """The java program.

    Raises:
        Absent: none on the PATH.
    """
    path = shutil.which("java")
    if path is None:
        raise Absent("no java program on the PATH")
    return path


def jar_of_pycocoevalcap(name: str) -> Path:
    """A jar that pycocoevalcap brings, by its path within the package.

    Raises:
        Absent: the package, or the jar in it, is not there.
    """
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise Absent("the package pycocoevalcap is not installed (pip install 'clipmill[caption-metrics]')")
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise Absent(f"pycocoevalcap has no {name}")
    return path


class Dialogue:
    """A program that answers each line with a line."""

    def __init__(self, command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
        """Starts the program.

        Args:
            folder: where it runs.
            timeout_s: when it is killed, whatever it does.
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

    def say(self, line: str) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def hear(self) -> str:
        """The next line of its answers."""
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
            except BrokenPipeError:  # what was not sent yet
                pass

    def _ended(self) -> Absent:
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        return Absent(f"java ended with status {status}{last_line(self._errors.read())}")


def run(command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
    """Runs a program to its end.

    Raises:
        Absent: it failed, or took longer than `timeout_s`.
    """
    try:
        ended = subprocess.run([*command], cwd=folder, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise Absent(f"java took longer than {timeout_s:.0f} s") from error
    if ended.returncode:
        raise Absent(f"java ended with status {ended.returncode}{last_line(ended.stderr.decode(errors='replace'))}")


def last_line(text: str) -> str:
    """What a program said last, after a colon; nothing when it said nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The first line of a Java traceback says what happened, those after it say where.
    while len(lines) > 1 and lines[-1].startswith(("at ", "... ")):
        lines.pop()
    return f": {lines[-1][:200]}" if lines else ""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="train-caption-") as folder:
        yield Path(folder)


# METEOR 1.5 (Denkowski and Lavie 2014), the Java program that pycocoevalcap brings, with its options.


_METEOR_JAR = "meteor/meteor-1.5.jar"
_METEOR_TIMEOUT_S = 2 * 3600.0
_BETWEEN = " ||| "


class Meteor:
    """METEOR as often as it is asked for within a `with` block, by one program: it takes seconds to start."""

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
        """METEOR of the corpus and of each video, of tokenized captions.

        Raises:
            Absent: Java or the package is missing, or the program failed.
        """
        if self._dialogue is None:
            self._dialogue = _program()
        dialogue, statistics = self._dialogue, []
        for video_id, candidate in candidates.items():
            # It would take this for the border between two captions.
            ours = candidate.replace("|||", "").replace("  ", " ")
            dialogue.say(_BETWEEN.join(("SCORE", *references[video_id], ours)))
            statistics.append(dialogue.hear())
        dialogue.say(_BETWEEN.join(("EVAL", *statistics)))
        per_video = {video_id: float(dialogue.hear()) for video_id in candidates}
        return float(dialogue.hear()), per_video


def _program() -> Dialogue:
    program, jar = java(), jar_of_pycocoevalcap(_METEOR_JAR)
    command = [program, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    return Dialogue(command, folder=jar.parent, timeout_s=_METEOR_TIMEOUT_S)


# SPICE (Anderson et al. 2016), the Java program that pycocoevalcap brings, with two jars that it does not.
#
# Stanford's CoreNLP 3.6.0 and its models are half a gigabyte and on no package index, so the user says where they
# lie.


_SPICE_JAR = "spice/spice-1.0.jar"
_WANTED = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
_MAIN = "edu.anu.spice.SpiceScorer"
_SPICE_TIMEOUT_S = 4 * 3600.0


def check_jars(folder: Path) -> None:
    """Raises a UserError when the two jars are not in the folder."""
    missing = [name for name in _WANTED if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} has no {' and no '.join(missing)}, which SPICE needs",
            hint="take both from stanford-corenlp-full-2015-12-09.zip (CoreNLP 3.6.0), or leave SPICE out",
        )


def spice(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]], *, jars: Path
) -> tuple[float, dict[str, float]]:
    """The mean F-score and that of each video, of tokenized captions.

    Raises:
        Absent: Java or pycocoevalcap is missing, or the program failed.
    """
    program, jar = java(), jar_of_pycocoevalcap(_SPICE_JAR)
    classes = os.pathsep.join(
        (str(jar), *(str(jars.resolve() / name) for name in _WANTED), str(jar.parent / "lib" / "*"))
    )
    with scratch_folder() as folder:
        given, scored = folder / "given.json", folder / "scored.json"
        # The program is told numbers, not names: it makes names of files of them.
        asked = [
            {"image_id": number, "test": candidate, "refs": list(references[video_id])}
            for number, (video_id, candidate) in enumerate(candidates.items())
        ]
        given.write_text(json.dumps(asked), encoding="utf-8")
        options = [str(given), "-out", str(scored), "-subset", "-silent"]
        run([program, "-Xmx8G", "-cp", classes, _MAIN, *options], folder=folder, timeout_s=_SPICE_TIMEOUT_S)
        try:
            answers = {item["image_id"]: item["scores"]["All"]["f"] for item in json.loads(scored.read_bytes())}
            per_video = {video_id: float(answers[number]) for number, video_id in enumerate(candidates)}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise Absent(f"SPICE's answer cannot be read: {error}") from error
    return sum(per_video.values()) / len(per_video), per_video

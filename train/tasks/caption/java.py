"""The caption metrics METEOR and SPICE, which are Java programs. Only this module runs Java."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from clipmill.manifests.errors import UserError

_METEOR_JAR = "meteor/meteor-1.5.jar"
_METEOR_TIMEOUT_S = 2 * 3600.0
_SEPARATOR = " ||| "
_SPICE_JAR = "spice/spice-1.0.jar"
_SPICE_TIMEOUT_S = 4 * 3600.0
_SPICE_CLASS = "edu.anu.spice.SpiceScorer"
_SPICE_NEEDS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")


class MetricUnavailable(Exception):
    """Error for a metric that cannot be computed on this machine. The message contains the reason."""


def java() -> str:
    """Return the path of the java program.

    Raises:
        MetricUnavailable: The program is not on the PATH.
    """
    path = shutil.which("java")
    if path is None:
        raise MetricUnavailable("no java program on the PATH")
    return path


def jar_of_pycocoevalcap(name: str) -> Path:
    """Return the path of a jar in the package pycocoevalcap.

    Args:
        name: Path of the jar, relative to the package.

    Raises:
        MetricUnavailable: The package is not installed, or does not contain this jar.
    """
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise MetricUnavailable("the package pycocoevalcap is not installed (pip install 'clipmill[caption-metrics]')")
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.is_file():
        raise MetricUnavailable(f"pycocoevalcap does not contain {name}")
    return path


class Dialogue:
    """Dialogue with a program that reads and writes lines.

    Args:
        folder: Working directory of the program.
        timeout_s: Time in seconds after which the program is killed.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, timeout_s: float) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed at the end
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*command], cwd=folder, stdin=pipe, stdout=pipe, stderr=self._errors, encoding="utf-8", errors="replace"
        )
        self._timer = threading.Timer(timeout_s, self._process.kill)
        self._timer.start()

    def send(self, line: str) -> None:
        """Send a line to the program."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._exit_error() from error

    def receive(self) -> str:
        """Return the next line of the program's output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._exit_error()
        return line.strip()

    def __enter__(self) -> "Dialogue":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # buffered lines cannot be sent to the killed program
                pass

    def _exit_error(self) -> MetricUnavailable:
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(0)
        return _failure(status, self._errors.read())


def _failure(status: int, output: str) -> MetricUnavailable:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The first line of a Java stack trace contains the error, and the other lines contain its location.
    while len(lines) > 1 and lines[-1].startswith(("at ", "... ")):
        lines.pop()
    return MetricUnavailable(f"java ended with status {status}" + (f": {lines[-1][:200]}" if lines else ""))


class Meteor:
    """METEOR 1.5 (Denkowski and Lavie 2014), computed with the program and options of pycocoevalcap.

    The program is started only once per `with` block, because starting it takes seconds.
    """

    _dialogue: "Dialogue | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._dialogue is not None:
            self._dialogue.__exit__()
            self._dialogue = None

    def __call__(
        self, candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
    ) -> tuple[float, dict[str, float]]:
        """Return METEOR for the corpus and for each video.

        Args:
            candidates: Tokenized caption of each video.
            references: Tokenized references of each video.

        Raises:
            MetricUnavailable: Java or the package is missing, or the program failed.
        """
        if self._dialogue is None:
            program, jar = java(), jar_of_pycocoevalcap(_METEOR_JAR)
            command = [program, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
            self._dialogue = Dialogue(command, folder=jar.parent, timeout_s=_METEOR_TIMEOUT_S)
        dialogue, statistics = self._dialogue, []
        for video_id, candidate in candidates.items():
            # The program separates captions with "|||".
            text = candidate.replace("|||", "").replace("  ", " ")
            dialogue.send(_SEPARATOR.join(("SCORE", *references[video_id], text)))
            statistics.append(dialogue.receive())
        dialogue.send(_SEPARATOR.join(("EVAL", *statistics)))
        per_video = {video_id: float(dialogue.receive()) for video_id in candidates}
        return float(dialogue.receive()), per_video


def check_jars(folder: Path) -> None:
    """Raise a UserError if the folder lacks one of SPICE's two jars."""
    missing = [name for name in _SPICE_NEEDS if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} lacks {' and '.join(missing)}, which SPICE needs",
            hint="copy both jars from stanford-corenlp-full-2015-12-09.zip (CoreNLP 3.6.0), or omit SPICE",
        )


def require_java(spice_jars: Path | None = None) -> None:
    """Raise a UserError if Java or METEOR's program is missing, or if `spice_jars` lacks one of SPICE's jars."""
    try:
        java()
        jar_of_pycocoevalcap(_METEOR_JAR)
    except MetricUnavailable as reason:
        raise UserError(
            f"--evaluate.java: {reason}",
            hint="install the missing program or package, or omit --evaluate.java",
            flags=("--evaluate.java",),
        ) from None
    if spice_jars is not None:
        check_jars(spice_jars)


def spice(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]], *, jars: Path
) -> tuple[float, dict[str, float]]:
    """Compute SPICE (Anderson et al. 2016) with pycocoevalcap's program.

    Args:
        candidates: Tokenized caption of each video.
        references: Tokenized references of each video.
        jars: Folder with Stanford CoreNLP 3.6.0 and its models. These jars take half a gigabyte, and are not part of
            any Python package.

    Returns:
        Mean F-score, and the F-score of each video.

    Raises:
        MetricUnavailable: Java or pycocoevalcap is missing, or the program failed.
    """
    program, jar = java(), jar_of_pycocoevalcap(_SPICE_JAR)
    class_path = os.pathsep.join(
        map(str, (jar, *(jars.resolve() / name for name in _SPICE_NEEDS), jar.parent / "lib/*"))
    )
    with tempfile.TemporaryDirectory(prefix="train-caption-") as folder:
        captions_file, scores_file = Path(folder, "given.json"), Path(folder, "scored.json")
        # Pass indices instead of video IDs, because the program uses IDs as file names.
        items = [
            {"image_id": index, "test": candidate, "refs": list(references[video_id])}
            for index, (video_id, candidate) in enumerate(candidates.items())
        ]
        captions_file.write_text(json.dumps(items), encoding="utf-8")
        command = [program, "-Xmx8G", "-cp", class_path, _SPICE_CLASS]
        command += [str(captions_file), "-out", str(scores_file), "-subset", "-silent"]
        try:
            process = subprocess.run(
                command, cwd=folder, capture_output=True, timeout=_SPICE_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise MetricUnavailable(f"java took longer than {_SPICE_TIMEOUT_S:.0f} s") from error
        if process.returncode:
            raise _failure(process.returncode, process.stderr.decode(errors="replace"))
        try:
            scores = {item["image_id"]: item["scores"]["All"]["f"] for item in json.loads(scores_file.read_bytes())}
            per_video = {video_id: float(scores[index]) for index, video_id in enumerate(candidates)}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise MetricUnavailable(f"SPICE's output cannot be read: {error}") from error
    return sum(per_video.values()) / len(per_video), per_video

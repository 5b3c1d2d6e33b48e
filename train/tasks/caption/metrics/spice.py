"""SPICE (Anderson et al. 2016), the Java program that pycocoevalcap brings, with two jars that it does not.

Stanford's CoreNLP 3.6.0 and its models are half a gigabyte and on no package index, so the user says where they lie.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from manifests.errors import UserError
from train.tasks.caption.metrics.java import Absent, jar_of_pycocoevalcap, java, run, scratch_folder

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

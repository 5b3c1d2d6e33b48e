"""Hostile input for `train`: streamed tars, YAML, weights and checkpoints. Each is used exactly or rejected."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.torture import bases
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import EXIT_CODES, ended_well
from tests.torture.commands import Ran
from tests.torture.hostile_run_files import CHECKPOINTS, CONFIGS, WEIGHTS, Damage
from tests.torture.hostile_tars import (
    CANARY_NUMBER,
    CANARY_TEXT,
    FIRST_NUMBERS,
    HostileTar,
    Outside,
    hostile_tars,
    sample,
)
from tests.torture.workspace import Workspace, copy
from tests.train.data.test_hostile_tars import END, Listener
from tests.train.data.test_streams import SIZE_PX
from tests.train.tiny_data import encode_chunk

PART = "hostile"
_TAR_MB = 3000  # address space in MB, including thread stacks
_TAR_ADDED_MB = 400  # memory in MB
_TRAIN_MB = 6000


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each kind of input, in an order determined by `seed`."""

    def order(subject: str, result: list[Case]) -> Iterator[Case]:
        return draw(result, seed=f"{seed}/{subject}", kinds=[lambda case: case.fault])

    def tars() -> Iterator[Case]:
        tars = list(hostile_tars(f"{seed}/tar"))
        return order("tar", [_case("tar", tar.name, tar.fault, partial(_tar, workspace, tar)) for tar in tars])

    def configs() -> Iterator[Case]:
        return order(
            "config", [_case("config", n, "config", partial(_config, workspace, t)) for n, t in CONFIGS.items()]
        )

    def weights() -> Iterator[Case]:
        return order(
            "weights", [_case("weights", n, "weights", partial(_weights, workspace, d)) for n, d in WEIGHTS.items()]
        )

    def checkpoints() -> Iterator[Case]:
        return order(
            "checkpoint",
            [_case("checkpoint", n, "checkpoint", partial(_checkpoint, workspace, d)) for n, d in CHECKPOINTS.items()],
        )

    return {"tar": tars, "config": configs, "weights": weights, "checkpoint": checkpoints}


def _case(subject: str, name: str, fault: str, run: Callable[[Path], None]) -> Case:
    return Case(f"{PART}/{subject}/{name}", fault, run)


def _tar(workspace: Workspace, hostile: HostileTar, folder: Path) -> None:
    """Read a hostile and a valid tar: decoded frames are exact, failures are named, and no other file is read."""
    canary = folder / "outside" / "canary.mp4"
    canary.parent.mkdir()
    canary.write_bytes(encode_chunk(CANARY_NUMBER, 20, size_px=SIZE_PX))
    canary.with_suffix(".txt").write_text(CANARY_TEXT)
    tars = folder / "objects"
    tars.mkdir()
    (tars / "canary.mp4").write_bytes(canary.read_bytes())
    (tars / "1.tar").write_bytes(sample("good") + END)
    listener = Listener()
    try:
        (tars / "0.tar").write_bytes(hostile.content(Outside(canary, listener.port)))
        before = {path for path in folder.rglob("*") if path.is_file()}
        ran = _run_bounded(workspace, folder, _TAR_MB, "streamed", f"{tars}/{{0..1}}.tar")
    finally:
        listener.close()
    ended_well(ran, status=0)
    if listener.num_connections:
        raise Broken(f"{listener.num_connections} connections were made: {ran.describe()}")
    if {path for path in folder.rglob("*") if path.is_file()} != before:
        raise Broken(f"files were made or removed: {ran.describe()}")
    result = json.loads(ran.stdout.splitlines()[-1])
    if "refused" in result:
        raise Broken(f"refused as a whole: {ran.describe()}")
    if result["added_mb"] > _TAR_ADDED_MB:
        raise Broken(f"it took {result['added_mb']} MB: {ran.describe()}")
    problem = _wrong(hostile, result["shown"], result["failed"], str(tars / "0.tar"))
    if problem:
        raise Broken(f"{problem}: {ran.describe()}")


def _wrong(hostile: HostileTar, shown: dict[str, list[int]], failed: dict[str, str], tar: str) -> str:
    """Describe the first violated requirement, or return an empty string."""
    for key, frames in shown.items():
        if key not in FIRST_NUMBERS:
            return f"{key} is shown, and is no sample"
        first = FIRST_NUMBERS[key]
        if any(CANARY_NUMBER <= frame < CANARY_NUMBER + 20 for frame in frames):
            return f"{key} shows a file from outside"
        if frames != [first + 5, first + 15] and not (key == "bad" and hostile.fate == "changed"):
            return f"{key} shows frames {frames}"
    is_broken = tar in failed
    if "good" not in shown:
        return "the tar behind it was not read"
    if not is_broken and not {"a", "z"} <= shown.keys() and hostile.name != "end":
        return "others are neither shown nor named"
    is_there = "bad" in shown, "bad" in failed
    allowed = {
        "shown": is_there == (True, False),
        "named": is_there == (False, True),
        "either": sum(is_there) == 1,
        "changed": sum(is_there) == 1,
        "broken": is_broken,
        "absent": is_there == (False, False),
    }[hostile.fate]
    return "" if allowed and (is_broken == (hostile.fate == "broken")) else f"not {hostile.fate}"


def _config(workspace: Workspace, text: str | bytes, folder: Path) -> None:
    path = folder / "settings.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    data = bases.with_chunks(workspace) / "data"
    arguments = (*bases.TRAIN, "--shards", data, "--out", folder / "run", "--config", path)
    ran = _run_bounded(workspace, folder, _TRAIN_MB, "train", *arguments)
    if str(path) not in ended_well(ran, status=2).stderr:
        raise Broken(f"the file is not named: {ran.describe()}")
    _require_short(ran)
    if (folder / "run").exists():
        raise Broken(f"a refused command left a folder: {ran.describe()}")


def _weights(workspace: Workspace, damage: Damage, folder: Path) -> None:
    path = folder / "weights"
    sprung = folder / "sprung"
    damage(path, sprung)
    data = bases.with_columns(workspace) / "data"
    arguments = (*bases.TRAIN, "--shards", data, "--out", folder / "run", "--init.weights", path)
    ran = ended_well(_run_bounded(workspace, folder, _TRAIN_MB, "train", *arguments), status=2)
    if sprung.exists():
        raise Broken(f"what the file holds was run: {ran.describe()}")
    _require_short(ran)
    if (folder / "run").exists():
        raise Broken(f"a refused command left a folder: {ran.describe()}")


def _checkpoint(workspace: Workspace, damage: Damage, folder: Path) -> None:
    copy(bases.with_run(workspace), folder)
    [checkpoint] = (folder / "run" / "checkpoints").glob("step_*")
    outside = folder / "outside"
    outside.write_text(CANARY_TEXT)
    sprung = folder / "sprung"
    damage(checkpoint, sprung)
    for arguments in (
        ("eval", "retrieval", folder / "run", "--shards", folder / "data", "--device", "cpu"),
        ("dual-encoder", "--resume", "--out", folder / "run"),
    ):
        ran = ended_well(_run_bounded(workspace, folder, _TRAIN_MB, "train", *arguments), status=EXIT_CODES)
        if sprung.exists():
            raise Broken(f"what the file holds was run: {ran.describe()}")
        if ran.status not in (1, 2):
            raise Broken(f"a damaged checkpoint was used: {ran.describe()}")
        _require_short(ran)


def _require_short(ran: Ran) -> None:
    """Check that an error has only a few lines, and shows nothing from unrelated files."""
    if CANARY_TEXT in ran.output:
        raise Broken(f"a file from outside is shown: {ran.describe()}")
    if len(ran.stderr) > 20_000:
        raise Broken(f"an error of {len(ran.stderr):,} characters: {ran.stderr[:500]}")


def _run_bounded(workspace: Workspace, folder: Path, added_mb: int, *arguments: object) -> Ran:
    return workspace.commands.run("tests.torture.bounded", [added_mb, *arguments], scratch=folder / "tmp")

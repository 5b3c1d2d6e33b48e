"""Damage to files of every durable kind, in a data folder and in a checkpoint.

Either `prep verify --deep` detects the damage and training rejects the data, or the data that is read is unchanged. The
command that created a file must restore it with the same bytes.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from clipmill.manifests.store import read_captions, read_rejected_rows, read_videos
from clipmill.prep.core.tables import read_layout
from clipmill.prep.sources.shot_table import read_shots
from clipmill.prep.text.bank import copy_embeddings
from clipmill.prep.text.captions import DIGESTS, from_arrow
from clipmill.prep.text.recipe import BANK_FOLDER
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from clipmill.shards.scores import open_scores
from tests.prep.running import contents
from tests.torture import bases
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well, same_contents
from tests.torture.commands import Ran
from tests.torture.decay import FAULTS, Decay, draw_decay
from tests.torture.subjects import _resume, _run_contents, _stopped_run
from tests.torture.workspace import Workspace, copy

PART = "damage"
_DRAWS = 8  # draws per combination of fault and kind
_TRAIN_ON_LATENTS = (*bases.TRAIN[:5], "--batch", 2, "--input", "latents", "--segment", "0.5s", *bases.TRAIN[9:])


@dataclass(frozen=True)
class Made:
    """Data folder to damage.

    Attributes:
        base: Function that creates the folder.
        manifests: Commands that create its manifest.
        columns: Commands that create its columns, by column name.
    """

    base: Callable[[Workspace], Path]
    manifests: Sequence[Callable[[Workspace], Sequence[object]]]
    columns: Mapping[str, Sequence[object]]


COLUMNS = Made(
    bases.with_columns,
    [bases.manifest_arguments],
    {
        "video": (*bases.CHUNK, *bases.ENGINE),
        "latents": (*bases.LATENTS, *bases.ENGINE),
        "text": (*bases.TEXT, *bases.ENGINE),
    },
)
SCORES = Made(
    bases.with_scores,
    [bases.manifest_arguments, bases.captions_arguments],
    {"video": (*bases.SHOTS, *bases.ENGINE), "scores": ("scores", *bases.ENGINE)},
)


@dataclass(frozen=True)
class Kind:
    """One kind of durable file.

    Attributes:
        pattern: Glob pattern of its files in the folder of a case.
        partners: Glob pattern of the files that it may be exchanged with.
        trained: Columns to train on: chunks, latents, both or neither.
        made: Data folder that contains the files.
        is_cache: True if the loss of a file costs only time.
    """

    pattern: str
    partners: str
    trained: Sequence[str] = ()
    made: Made = COLUMNS
    is_cache: bool = False


KINDS = {
    "manifest": Kind("data/manifest/manifest.json", "data/dataset.json", ["chunks"]),
    "tables": Kind("data/manifest/*.parquet", "data/**/*.parquet", ["chunks"]),
    "mapped-captions": Kind("data/manifest/*.arrow", "data/**/*.arrow", ["chunks", "latents"]),
    "layouts": Kind("data/layout/*.parquet", "data/layout/*.parquet"),
    "probes": Kind("data/probes.parquet", "data/**/*.parquet"),
    "dataset": Kind("data/dataset.json", "data/*/*/contents.json", ["chunks"]),
    "recipes": Kind("data/*/*/recipe.json", "data/*/*/recipe.json", ["latents"]),
    "contents": Kind("data/*/*/contents.json", "data/*/*/contents.json", ["chunks", "latents"]),
    "lists": Kind("data/*/*/shards*.txt", "data/*/*/shards*.txt"),
    "commits": Kind("data/*/*/commits/*.json", "data/*/*/commits/*.json", ["chunks", "latents"]),
    "video-tars": Kind("data/video/*/*.tar", "data/*/*/*.tar", ["chunks"]),
    "latents-tars": Kind("data/latents/*/*.tar", "data/*/*/*.tar", ["latents"]),
    "text-tars": Kind("data/text/*/*.tar", "data/*/*/*.tar", ["chunks", "latents"]),
    "video-indexes": Kind("data/video/*/*.arrow", "data/*/*/*.arrow", ["chunks"]),
    "latents-indexes": Kind("data/latents/*/*.arrow", "data/*/*/*.arrow", ["latents"]),
    "text-indexes": Kind("data/text/*/*.arrow", "data/*/*/*.arrow", ["chunks", "latents"]),
    "energon-indexes": Kind("data/*/*/*.idx", "data/*/*/*.idx"),
    "merged-tables": Kind("data/*/*/chunks.arrow", "data/*/*/chunks.arrow", ["chunks", "latents"]),
    "scores-tars": Kind("data/scores/*/*.tar", "data/*/*/*.tar", made=SCORES),
    "scores-indexes": Kind("data/scores/*/*.index.arrow", "data/*/*/*.index.arrow", made=SCORES),
    "scores-tables": Kind("data/scores/*/chunks.arrow", "data/*/*/chunks.arrow", made=SCORES),
    "shots": Kind("data/shots.parquet", "data/*.parquet", made=SCORES, is_cache=True),
    "further-captions": Kind("data/manifest/*", "data/manifest/*", made=SCORES),
}
TRAININGS = {"chunks": bases.TRAIN, "latents": _TRAIN_ON_LATENTS}


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each kind of file, in an order determined by `seed`."""
    cases_by_subject: dict[str, Callable[[], Iterator[Case]]] = {
        name: partial(_cases, seed, workspace, name, kind.made.base, kind, partial(_in_data, kind=kind))
        for name, kind in KINDS.items()
    }
    bank, checkpoint = Kind("data/text/*/bank/*.arrow", "data/text/*/bank/*.arrow"), "run/checkpoints/*/*"
    cases_by_subject["bank"] = partial(_cases, seed, workspace, "bank", _with_bank, bank, _in_bank)
    of_run = Kind(checkpoint, checkpoint)
    cases_by_subject["checkpoints"] = partial(
        _cases, seed, workspace, "checkpoints", _stopped_run, of_run, _in_checkpoint
    )
    return cases_by_subject


def _cases(
    seed: int,
    workspace: Workspace,
    name: str,
    base: Callable[[Workspace], Path],
    kind: Kind,
    check: Callable[[Workspace, Decay, Path], None],
) -> Iterator[Case]:
    whole, random = base(workspace), Random(f"{seed}/{name}")
    paths, partners = (
        sorted(path.relative_to(whole) for path in whole.glob(pattern) if path.is_file())
        for pattern in (kind.pattern, kind.partners)
    )
    decays = [
        decay
        for fault in FAULTS
        for _ in range(_DRAWS)
        if (decay := draw_decay(random, whole, fault, paths=paths, partners=partners)) is not None
    ]
    different = list({decay.name: decay for decay in decays}.values())

    def damage_copy(decay: Decay, folder: Path) -> None:
        copy(whole, folder)
        decay.do(folder)
        check(workspace, decay, folder)

    for decay in draw(different, seed=f"{seed}/{name}", kinds=[lambda decay: decay.fault]):
        yield Case(f"{PART}/{name}/{decay.name}", decay.fault, partial(damage_copy, decay))


def _in_data(workspace: Workspace, decay: Decay, folder: Path, *, kind: Kind) -> None:
    whole, columns = kind.made.base(workspace), kind.made.columns
    for what in kind.trained:
        _trained_right(workspace, folder, what)
    verified = _prep(workspace, folder, "verify", "--deep")
    is_found = verified.status != 0
    if is_found:
        _names(verified, decay)
    elif kind.is_cache and decay.fault == "lose":
        pass
    elif _meaning(folder / "data", columns) != _meaning(whole / "data", columns):
        raise Broken(f"not found, though other values are read: {verified.describe()}")
    if "manifest" in decay.where or "manifest" in str(decay.path):
        _repair_manifest(workspace, folder, kind.made)
    for command in columns.values():
        ended_well(_prep(workspace, folder, *command), status=0)
    ended_well(_prep(workspace, folder, "verify", "--deep"), status=0)
    # Changes without meaning, such as different whitespace, may remain.
    aside = set() if is_found else {str(Path(name).relative_to("data")) for name in (decay.path,)}
    digests, expected = (
        {name: digest for name, digest in contents(part / "data").items() if name not in aside}
        for part in (folder, whole)
    )
    same_contents(digests, expected)


def _repair_manifest(workspace: Workspace, folder: Path, made: Made) -> None:
    """Run the commands that created the manifest again.

    If the first command is rejected, delete the manifest first, as the hint says.
    """
    first = _prep(workspace, folder, *made.manifests[0](workspace))
    if len(made.manifests) > 1 and first.status == 2:
        if "caption IDs would change" not in first.output:
            raise Broken(f"refused, but not for the IDs of captions: {first.describe()}")
        shutil.rmtree(folder / "data" / "manifest")
    for arguments in made.manifests:
        ended_well(_prep(workspace, folder, *arguments(workspace)), status=0)


def _names(ran: Ran, decay: Decay) -> None:
    """Check that the output names a damaged file or its shard."""
    paths = [decay.path, *([Path(decay.where)] if decay.fault == "exchange" else [])]
    names = {path.name for path in paths} | {path.name.split("-")[0].split(".")[0] for path in paths}
    if not any(name in ran.output for name in names):
        raise Broken(f"found, but not named: {ran.describe()}")
    if "prep " not in ran.output:
        raise Broken(f"found, but no command is named that repairs it: {ran.describe()}")


def _trained_right(workspace: Workspace, folder: Path, what: str) -> None:
    """Check that a training run rejects the data, reports failures, or gives the same result as with intact data."""
    sound = _sound_run(workspace, what)
    ran = _train(workspace, folder, what)
    if ran.status == 0 and not (folder / "run" / "failures.jsonl").read_bytes():
        if _run_contents(folder) != _run_contents(sound):
            raise Broken(f"trained on damage: {ran.describe()}")
    elif not ran.output.strip():
        raise Broken(f"no word of what is wrong: {ran.describe()}")
    shutil.rmtree(folder / "run", ignore_errors=True)


def _train(workspace: Workspace, folder: Path, what: str) -> Ran:
    where = ("--shards", folder / "data", "--out", folder / "run")
    return ended_well(workspace.commands.run("train", [*TRAININGS[what], *where], scratch=folder / "tmp"))


def _sound_run(workspace: Workspace, what: str) -> Path:
    def make(folder: Path) -> None:
        copy(bases.with_columns(workspace), folder)
        ended_well(_train(workspace, folder, what), status=0)

    return workspace.made(f"sound-{what}", make)


def _meaning(data: Path, columns: Collection[str]) -> list[Any]:
    """Return all values read from the records and samples of a data folder."""
    read: list[Any] = [table(data).to_pylist() for table in (read_videos, read_captions, read_rejected_rows)]
    read += [read_layout(path).to_pylist() for path in sorted((data / "layout").iterdir())]
    read += [read_shots(data).to_pylist(), open_scores(data).table.to_pylist()] if "scores" in columns else []
    for column in columns:
        variant = Variant.open(data, column=column).require_complete()
        lists = {path.name: path.read_bytes() for path in variant.directory.glob("shards*.txt")}
        read += [current_variant(data, column), variant.recipe, variant.commits, list(variant.iterate()), lists]
    return read


def _prep(workspace: Workspace, folder: Path, *arguments: object) -> Ran:
    scratch = folder / "tmp"
    return ended_well(workspace.commands.run("prep", [*arguments, "--data", folder / "data"], scratch=scratch))


def _with_bank(workspace: Workspace) -> Path:
    """Create the text column as it is after a kill between encoding and the first shard."""

    def make(folder: Path) -> None:
        copy(bases.with_columns(workspace), folder)
        variant = Variant.open(folder / "data", column="text")
        digests = [from_arrow(shard.index["text_digest"].combine_chunks().values) for shard in variant.shards()]
        width = int(variant.recipe["width"])
        for part in digests:  # one block per shard
            missing = np.unique(part).astype(DIGESTS)
            bank_dir = variant.directory / BANK_FOLDER
            copy_embeddings(variant.directory, missing_digests=missing, bank_dir=bank_dir, width=width)
        for path in variant.directory.iterdir():
            if path.is_file() and path.name != "recipe.json":
                path.unlink()
        shutil.rmtree(variant.directory / "commits")

    return workspace.made("bank", make)


def _in_bank(workspace: Workspace, decay: Decay, folder: Path) -> None:
    ended_well(_prep(workspace, folder, *COLUMNS.columns["text"]), status=0)
    ended_well(_prep(workspace, folder, "verify", "--deep"), status=0)
    same_contents(contents(folder / "data"), contents(bases.with_columns(workspace) / "data"))


def _resumed_run(workspace: Workspace) -> Path:
    def make(folder: Path) -> None:
        copy(_stopped_run(workspace), folder)
        ended_well(_resume_run(workspace, folder), status=0)

    return workspace.made("resumed-run", make)


def _resume_run(workspace: Workspace, folder: Path) -> Ran:
    return ended_well(workspace.commands.run("train", _resume(workspace, folder), scratch=folder / "tmp"))


def _in_checkpoint(workspace: Workspace, decay: Decay, folder: Path) -> None:
    """Check that the run refuses to resume and states the reason, or gives the same result as an undisturbed run."""
    expected = _run_contents(_resumed_run(workspace))
    ran = _resume_run(workspace, folder)
    if ran.status == 0:
        same_contents(_run_contents(folder), expected)
    elif "checkpoint" not in ran.output and "step_" not in ran.output:
        raise Broken(f"refused, but not for its checkpoint: {ran.describe()}")

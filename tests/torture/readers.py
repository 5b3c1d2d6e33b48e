"""Damage that a reader meets before `prep verify`: in packets and arrays, under columns, under pages.

A training run that reads every packet of its chunks names each chunk with a flipped packet. A training run on latents
or stored text names each sample with a flipped array. Latents and scores of damaged chunks equal the ones of intact
chunks, or are not created. Pages and lists of `prep inspect` equal the ones of intact data, or name the damaged files.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from clipmill.shards.reader import CommittedShard, Variant
from tests.torture import bases
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well, same_contents, samples
from tests.torture.commands import Ran
from tests.torture.damage import PART, TRAININGS
from tests.torture.decay import FAULTS, Decay, draw_decay
from tests.torture.workspace import Workspace, copy

# Read as many frames as the span of a caption has, so that every frame is read.
_ALL_FRAMES = (*bases.TRAIN[:3], "--num-frames", 30, *bases.TRAIN[5:7], "--batch", 2)
_READ_ALL = (*_ALL_FRAMES, "--warmup-steps", 0, "--steps", 1, "--workers", 1, "--device", "cpu")
_OF_CHUNKS = (("scores", *bases.ENGINE), (*bases.LATENTS, *bases.ENGINE))
_DRAWS = 8
_WORDS = re.compile(r"damaged|missing|corrupt|cannot be|stale|Not shown")
_INSPECT: dict[str, tuple[str, ...]] = {
    "list": (),
    "page": ("--html", "page.html"),
    "where": ("--html", "where.html", "--where", "brightness >= 0 and frozen <= 1"),
    "scores": ("--column", "scores"),
    "score-page": ("--column", "scores", "--html", "scores.html"),
}


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases for training runs and pages, in an order determined by `seed`."""
    of_pages = partial(_decays, seed, "inspect", bases.with_scores, "data/*/*/**/*", _in_pages)
    of_columns = partial(_decays, seed, "columns", bases.with_chunks, "data/video/*/000*", _under_columns)
    return {
        "packets": partial(_packets, seed, workspace, "packets", bases.with_columns),
        "packets-mjpeg": partial(_packets, seed, workspace, "packets-mjpeg", bases.with_mjpeg),
        "arrays": partial(_arrays, seed, workspace),
        "columns": partial(of_columns, workspace),
        "inspect": partial(of_pages, workspace),
    }


def _decays(
    seed: int,
    name: str,
    base: Callable[[Workspace], Path],
    pattern: str,
    check: Callable[[Workspace, Decay, Path], None],
    workspace: Workspace,
) -> Iterator[Case]:
    whole, random = base(workspace), Random(f"{seed}/{name}")
    paths = sorted(path.relative_to(whole) for path in whole.glob(pattern) if path.is_file())
    decays = [draw_decay(random, whole, fault, paths=paths, partners=paths) for fault in FAULTS for _ in range(_DRAWS)]
    different = list({decay.name: decay for decay in decays if decay is not None}.values())
    for decay in draw(different, seed=f"{seed}/{name}", kinds=[lambda decay: decay.fault]):
        yield Case(f"{PART}/{name}/{decay.name}", decay.fault, partial(check, workspace, decay))


def _packets(seed: int, workspace: Workspace, kind: str, base: Callable[[Workspace], Path]) -> Iterator[Case]:
    """Yield one case per packet of a chunk: a bit of the packet is flipped in one chunk of each caption.

    The captions of the split last one second, which is two chunks. An MJPEG decoder notices few of these flips.
    """
    whole = base(workspace)
    (shard,) = Variant.open(whole / "data").shards("train")
    numbers = [
        (first, packet)
        for first in range(2)
        for packet in range(min(len(shard.packet_tables.packet_table(row).offset) for row in range(shard.num_samples)))
    ]
    for first, packet in draw(numbers, seed=f"{seed}/{kind}", kinds=()):
        rows = range(first, shard.num_samples, 2)
        name = f"{PART}/{kind}/{packet}@{'+'.join(map(str, rows))}"
        yield Case(name, "flip", partial(_in_packets, workspace, f"{seed}/{name}", whole, shard, rows, packet))


def _in_packets(
    workspace: Workspace, seed: str, whole: Path, shard: CommittedShard, rows: range, packet: int, folder: Path
) -> None:
    random = Random(seed)
    copy(whole, folder)
    tar = folder / shard.tar_path.relative_to(whole)
    content = bytearray(tar.read_bytes())
    for row in rows:
        table, (begin, _) = shard.packet_tables.packet_table(row), shard.packet_tables.payload(row)
        at = begin + int(table.offset[packet]) + random.randrange(int(table.size[packet]))
        content[at] ^= 1 << random.randrange(8)
    tar.write_bytes(content)
    damaged = {shard.index["key"][row].as_py() for row in rows}
    _names_all(damaged, _train(workspace, folder, _READ_ALL), folder)


def _arrays(seed: int, workspace: Workspace) -> Iterator[Case]:
    """Yield cases in which one bit of one array is flipped, and all arrays are read."""
    whole = bases.with_columns(workspace)
    for column, extension, what in (("latents", "latents.npy", "latents"), ("text", "text.npy", "chunks")):
        (shard,) = Variant.open(whole / "data", column=column).shards("train")
        for row in range(shard.num_samples):
            begin, size = shard.member_range(row, extension)
            for at in Random(f"{seed}/{column}/{row}").sample(range(size), _DRAWS):
                check = partial(_in_array, workspace, shard, row, begin + at, what)
                yield Case(f"{PART}/arrays/{column}-{row}@{at}", "flip", check)


def _in_array(workspace: Workspace, shard: CommittedShard, row: int, at: int, what: str, folder: Path) -> None:
    whole = bases.with_columns(workspace)
    copy(whole, folder)
    tar = folder / shard.tar_path.relative_to(whole)
    content = bytearray(tar.read_bytes())
    content[at] ^= 1
    tar.write_bytes(content)
    # Embeddings of a video's captions are reported under the keys of the video's clips, which begin with the video's
    # ID.
    _names_all({shard.index["key"][row].as_py()}, _train(workspace, folder, TRAININGS[what]), folder)


def _train(workspace: Workspace, folder: Path, arguments: Sequence[object]) -> Ran:
    where = ("--shards", folder / "data", "--out", folder / "run", "--max-failures", 9)
    return ended_well(workspace.commands.run("train", [*arguments, *where], scratch=folder / "tmp"))


def _names_all(damaged: Collection[str], ran: Ran, folder: Path) -> None:
    """Check that a training run has reported all damaged samples that it read."""
    named = [json.loads(line)["key"] for line in (folder / "run" / "failures.jsonl").read_text().splitlines()]
    if unnoticed := [key for key in sorted(damaged) if not any(text.startswith(key) for text in named)]:
        raise Broken(f"{', '.join(unnoticed)} was read without a word: {ran.describe()}")


def _under_columns(workspace: Workspace, decay: Decay, folder: Path) -> None:
    sound = workspace.made("columns-of-chunks", partial(_with_columns_of_chunks, workspace))
    copy(bases.with_chunks(workspace), folder)
    decay.do(folder)
    for arguments in _OF_CHUNKS:
        scratch, column = folder / "tmp", str(arguments[0])
        ran = ended_well(workspace.commands.run("prep", [*arguments, "--data", folder / "data"], scratch=scratch))
        expected = samples(sound / "data", column=column)
        arrays = samples(folder / "data", column=column) if any(folder.glob(f"data/{column}/*/commits/*.json")) else {}
        if wrong := [name for name, digest in arrays.items() if expected.get(name) != digest]:
            raise Broken(f"made of damaged chunks: {', '.join(wrong[:6])}: {ran.describe()}")
        if ran.status == 0:
            same_contents(arrays, expected)


def _with_columns_of_chunks(workspace: Workspace, folder: Path) -> None:
    copy(bases.with_chunks(workspace), folder)
    for arguments in _OF_CHUNKS:
        bases.prep(workspace, folder, *arguments)


def _in_pages(workspace: Workspace, decay: Decay, folder: Path) -> None:
    sound = workspace.made("inspected", partial(_inspected_whole, workspace))
    copy(bases.with_scores(workspace), folder)
    decay.do(folder)
    (folder / "run").mkdir()
    for name in _INSPECT:
        ran = _inspect(workspace, folder, name)
        served = _text_shown(folder / "run", ran.stdout.replace(str(folder), ""))
        expected = _text_shown(sound / name, (sound / f"{name}.txt").read_text())
        if ran.status == 0 and served != expected and len(_WORDS.findall(served)) <= len(_WORDS.findall(expected)):
            raise Broken(f"not what it shows of intact data, and no word of damage: {ran.describe()}")
        for path in (folder / "run").iterdir():
            path.unlink()


def _text_shown(folder: Path, printed: str) -> str:
    return "\n".join([printed, *(path.read_text("utf-8", "replace") for path in sorted(folder.iterdir()))])


def _inspected_whole(workspace: Workspace, folder: Path) -> None:
    copy(bases.with_scores(workspace), folder)
    (folder / "run").mkdir()
    for name in _INSPECT:
        ran = ended_well(_inspect(workspace, folder, name), status=0)
        (folder / f"{name}.txt").write_text(ran.stdout.replace(str(folder), ""))
        (folder / "run").rename(folder / name)
        (folder / "run").mkdir()


def _inspect(workspace: Workspace, folder: Path, name: str) -> Ran:
    words = [folder / "run" / word if word.endswith(".html") else word for word in _INSPECT[name]]
    arguments = ("inspect", *words, "--data", folder / "data")
    return ended_well(workspace.commands.run("prep", arguments, scratch=folder / "tmp"))

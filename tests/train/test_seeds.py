"""docs/seeds.md has a row for each item of the documents, and the commands of its experiments start."""

import re
import shlex
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from clipmill.prep import cli as prep_cli
from clipmill.train import cli as train_cli
from clipmill.train.commands.training import parse
from tests.conftest import ROOT
from tests.tiers import nightly_beyond
from tests.train.latents.written import Chunk, write_all
from tests.train.running import train
from tests.train.tiny_data import Caption

TEXT = (ROOT / "docs/seeds.md").read_text()
ITEMS = {"A": 77, "S": 53, "V": 23, "F": 55}
ROWS = [line.strip("|").split(" | ") for line in TEXT.splitlines() if re.match(r"\| [ASVF]\d+ \|", line)]
EXPERIMENTS = re.findall(r"^\| (?:AVION|SpaceTimeGPT|VideoDataLoader|FastCLIP), .*? \| `(.+)` \|$", TEXT, re.MULTILINE)


def test_there_is_a_row_for_each_of_the_208_items() -> None:
    names = [row[0].strip() for row in ROWS]
    assert names == [f"{document}{number}" for document, count in ITEMS.items() for number in range(1, count + 1)]
    assert len(names) == 208


def test_every_row_has_a_place_and_is_exact_or_says_what_differs_and_why() -> None:
    for row in ROWS:
        name, item, place, status = (cell.strip() for cell in row)
        assert item and place, name
        assert re.match(r"exact\b|differs: ", status), f"{name}: {status}"
        assert not re.search(r"\b(partly|missing|not available|not implemented|todo)\b", status, re.IGNORECASE), name
        assert status.startswith("exact") or len(status.split()) > 6, f"{name}: the reason is missing"


def test_every_table_and_figure_of_the_documents_is_an_experiment() -> None:
    named = " ".join(re.findall(r"^\| ((?:AVION|FastCLIP), .*?) \|", TEXT, re.MULTILINE))
    for document, tables, figures in (("AVION", 5, 8), ("FastCLIP", 22, 11)):
        text = " ".join(re.findall(rf"{document}, (?:(?!AVION|FastCLIP).)*", named))
        for noun, count, first in (("table", tables, 1), ("figure", figures, 1)):
            # Tables 1, 2 and 7 to 10 of FastCLIP list settings, which the presets contain.
            left_out = {1, 2, 7, 8, 9, 10} if (document, noun) == ("FastCLIP", "table") else set()
            assert set(numbers(text, noun)) >= set(range(first, count + 1)) - left_out, f"{document}: {noun}"


def numbers(text: str, noun: str) -> list[int]:
    """Return the numbers after a noun, as in `table 3`, `tables 12 to 14`, `figures 1 and 2`."""
    documents = []
    for first, word, last in re.findall(rf"{noun}s? (\d+)(?: (to|and) (\d+))?", text):
        documents += [int(first), *(range(int(first), int(last) + 1) if word == "to" else [int(last)] if last else [])]
    return documents


@pytest.mark.parametrize("line", EXPERIMENTS)
def test_the_command_of_an_experiment_is_understood(line: str) -> None:
    program, *words = shlex.split(line)
    understood: dict[str, Callable[[], object]] = {
        "prep": lambda: prep_cli.build_app().parse_args(words, exit_on_error=False, print_error=False),
        "train": lambda: parse(train_cli.app, words),  # including the preset and all rules
        "torchrun": lambda: parse(train_cli.app, words[words.index("train") + 1 :]),
        "python": lambda: find_spec(words[1]) is not None and import_module(words[1]).main,
    }
    assert understood[program]()


def test_every_run_that_a_command_reads_is_made_by_another() -> None:
    made = set(re.findall(r"--out (runs/\S+)", "\n".join(EXPERIMENTS)))
    read = {word for line in EXPERIMENTS for word in re.findall(r"(?<!--out )\b(runs/[\w-]+)(?= |$)", line)}
    assert read <= made | {"runs/v3-2"}  # runs/v3-2 is the command of runs/v3 with a different seed


TINY = "--model tiny --size-px 32 --num-frames 2 --batch 4 --steps 1 --warmup-steps 0 --workers 1 --device cpu"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.vocabulary 280 --decoder.max-tokens 12"
OWN = {
    "dual-encoder": "",
    "classify": "--label class",
    "mae": "",
    "caption": f"{DECODER} --decoding.max-tokens 4 --evaluate.every 0",
}
NAMED = ("--init.weights", "--decoder.weights", "--track.wandb", "--out")  # flags whose values do not exist here


@pytest.mark.parametrize("task", nightly_beyond(["dual-encoder"], OWN))
def test_a_training_run_of_the_table_starts_at_tiny_size(
    task: str, data_dir: Path, moving: Path, tmp_path: Path
) -> None:
    words = shlex.split(next(line for line in EXPERIMENTS if line.startswith(f"train {task} ")))[1:]
    kept = [word for at, word in enumerate(words) if word not in NAMED and words[at - 1] not in NAMED]
    data = moving if task == "classify" else data_dir
    assert train(*kept, *TINY.split(), *OWN[task].split(), "--shards", data, "--out", tmp_path / "run") == 0
    assert (tmp_path / "run" / "index.html").exists()


def test_the_store_of_the_table_is_written_at_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in EXPERIMENTS if line.startswith("prep export "))
    written = write_all(tmp_path / "data", [[Chunk("a", 0, 60)]], [Caption("a", 0.0, 5.0, "a")])
    words = [str(tmp_path / word) if word.endswith(".zarr") else word for word in shlex.split(line)[1:]]
    prep_cli.build_app()([*words, "--data", str(written.data_dir)], exit_on_error=False, result_action="return_value")
    assert "exported  3 segments" in capsys.readouterr().out and (tmp_path / "segments.zarr").is_dir()

"""The breakdown of a step: intervals against a grid of moments, and two gloo processes with each strategy."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from clipmill.manifests.progress import Activity
from clipmill.train.bench.communication import Event, breakdowns
from clipmill.train.cli import main
from tests.conftest import ROOT
from tests.forks import Forks
from tests.train.bench.test_bench import SMALL
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.running import train

STRATEGIES = ("ddp", "zero1", "fsdp")
NAMES = ("total_s", "compute_s", "overlap_s", "exposed_s", "other_s")


def test_parts_of_a_step_are_those_of_sets_of_moments() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        step = (drawn.randrange(10), 20 + drawn.randrange(10))
        spans = [
            [(begin, begin + drawn.randrange(6)) for begin in (drawn.randrange(30) for _ in range(drawn.randrange(8)))]
            for _ in range(2)
        ]
        whole = set(range(*step))
        computing, communicating = ({at for span in kind_spans for at in range(*span)} & whole for kind_spans in spans)
        events = [Event("clipmill::step", *step)]
        events += [
            Event(name, *span)
            for name, kind_spans in zip(("aten::mm", "gloo:all_reduce"), spans, strict=True)
            for span in kind_spans
        ]
        [breakdown] = breakdowns(events)
        both = computing & communicating
        sets = (whole, computing, both, communicating - both, whole - computing - communicating)
        assert asdict(breakdown) == pytest.approx(us(*map(len, sets)), abs=1e-12)


def us(*numbers: float) -> dict[str, float]:
    return {name: number / 1e6 for name, number in zip(NAMES, numbers, strict=True)}


def test_a_step_on_a_cpu_is_broken_down_by_operators_of_the_training_thread() -> None:
    events = [
        Event("clipmill::step", 0, 100, thread=1),
        Event("aten::linear", 10, 50, thread=1),
        Event("aten::addmm", 12, 48, thread=1),  # inside the other event
        Event("aten::copy_", 55, 70, thread=2),  # a gloo thread
        Event("c10d::allreduce_", 50, 52, thread=1),
        Event("gloo:all_reduce", 40, 75, thread=2),
        Event("gloo:all_reduce", 70, 80, thread=3),
        Event("gloo:broadcast", 95, 120, thread=2),  # extends into the next step
        Event("clipmill::step", 110, 130, thread=1),
    ]
    first, second = breakdowns(events)
    assert asdict(first) == pytest.approx(us(100, 40, 10, 35, 25))
    assert asdict(second) == pytest.approx(us(20, 0, 0, 10, 10))


def test_a_recording_on_a_cpu_prints_nothing(forks: Forks) -> None:
    code = "import torch; from clipmill.train.bench.communication import _record_events\n"
    code += "with _record_events(torch.device('cpu')): torch.ones(2) + 1"
    ran = subprocess.run([forks.python(), "-m", "tests.fresh", code], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_step_on_a_gpu_is_broken_down_by_its_kernels() -> None:
    events = [
        Event("clipmill::step", 0, 100, thread=1),
        Event("aten::linear", 0, 90, thread=1),  # host events do not count as computation
        Event("gemm", 20, 60, is_on_device=True),
        Event("Memcpy DtoD (Device -> Device)", 60, 70, is_on_device=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 50, 80, is_on_device=True),
    ]
    [step] = breakdowns(events)
    assert asdict(step) == pytest.approx(us(100, 40, 10, 20, 40))


def bench_rank(words: list[str], out_path: Path) -> None:
    sys.argv = ["train", "bench", *words]
    doing = list[str]()

    def activity(text: str) -> Activity:
        doing.append(text)
        return Activity(text)

    pytest.MonkeyPatch().setattr("clipmill.train.bench.communication.Activity", activity)
    with Path(f"{out_path}.{os.environ['RANK']}").open("w") as sys.stdout, pytest.raises(SystemExit) as left:
        main()
    Path(f"{out_path}.doing.{os.environ['RANK']}").write_text("\n".join(doing))
    sys.exit(left.value.code)


@pytest.mark.nightly
def test_two_processes_break_their_steps_down_under_each_strategy(data_dir: Path, tmp_path: Path) -> None:
    page, out_path = tmp_path / "bench.html", tmp_path / "said"
    words = [*map(str, (word for pair in SMALL.items() for word in pair)), "--shards", str(data_dir), "--json"]
    words += ["--seconds", "0.01", "--strategies", *STRATEGIES, "--page", str(page)]
    words += ["--exchanges", "scalars", "features"]
    end_well(fork_ranks(bench_rank, words, out_path, size=2, folder=tmp_path))
    result = json.loads((tmp_path / "said.0").read_text())
    expected = [(strategy, exchange) for strategy in STRATEGIES for exchange in ("scalars", "features")]
    assert [(entry["strategy"], entry["exchange"]) for entry in result["strategies"]] == expected
    assert (tmp_path / "said.1").read_text() == "", "only one process prints"
    doing = [f"measuring steps with {strategy}, exchange {exchange}" for strategy, exchange in expected]
    assert (tmp_path / "said.doing.0").read_text().splitlines() == doing
    for entry in result["strategies"]:
        assert (entry["num_processes"], entry["num_steps"], len(entry["ranks"])) == (2, 3, 2) and entry[
            "unrecorded_s"
        ] > 0
        for numbers in (entry["mean"], *entry["ranks"]):
            assert set(numbers) == set(NAMES) and numbers["compute_s"] > 0 and numbers["exposed_s"] > 0
            parts = numbers["compute_s"] + numbers["exposed_s"] + numbers["other_s"]
            assert parts == pytest.approx(numbers["total_s"])
            assert 0 <= numbers["overlap_s"] <= numbers["compute_s"] and numbers["other_s"] >= 0
        assert f"<td>{entry['strategy']}, {entry['exchange']}</td>" in page.read_text()
    assert page.read_text().count('class="stack"') == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategies ddp fsdp", "--strategies needs several processes, but there is only one"),
        ("--exchanges features", "--exchanges needs several processes, but there is only one"),
        ("--page bench.html", "--page needs several processes, but there is only one"),
        ("--page nowhere/bench.html", "--page is nowhere/bench.html, but there is no folder nowhere"),
    ],
)
def test_what_a_breakdown_needs_is_said_at_once(
    data_dir: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert train("bench", "--shards", data_dir, *words.split()) == 2
    assert message in capsys.readouterr().err

"""The command line from outside: printed output and exit status."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clipmill.train.config.files import load_settings
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.forks import Forks
from tests.train.running import SMALL, train, two_lines


@pytest.fixture(scope="module")
def finished_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *SMALL, "--steps", 8) == 0
    return out


def test_a_run_leaves_settings_metrics_a_checkpoint_and_a_page(finished_run: Path, data_dir: Path) -> None:
    run = RunFolder(finished_run)
    settings = load_settings(run.settings, DualEncoderSettings)
    assert (settings.shards, settings.out, settings.steps, settings.model) == (str(data_dir), finished_run, 8, "tiny")
    lines = read_lines(run.metrics)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {"loss", "lr", "grad_norm", "temperature", "samples_per_s", "step_s", "data_wait_s"} <= lines[0].keys()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000008"]
    assert "8" in run.page.read_text() and "sdpa" in run.page.read_text()


def test_the_page_of_a_run_carries_what_doctor_says(finished_run: Path) -> None:
    facts, page = RunFolder(finished_run).read_facts(), RunFolder(finished_run).page.read_text()
    assert facts["attention_kernels"] in page and "flash (CPU) of torch" in facts["attention_kernels"]
    assert "<summary>train doctor</summary>" in page and facts["doctor"]["lines"]["decoder"] in page
    assert all(finding["what"] in page for finding in facts["doctor"]["findings"] if finding["level"] != "note")


def test_the_first_lines_say_which_attention_and_why_and_what_a_warm_up_leaves(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = train(
        "dual-encoder", "--shards", data_dir, "--out", tmp_path / "run", *SMALL, "--steps", 1, "--attention", "sdpa"
    )
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0] == "attention: sdpa (requested by --attention sdpa); precision: fp32 (the device is a CPU)"
    assert lines[1].startswith("data: 9 of 9 captions of split 'train'")
    assert lines[2] == "--warmup-steps 2 is not less than --steps 1: the learning rate increases until the end"
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ step 1/1  loss ", lines[3])


def test_a_summary_is_alone_on_standard_output(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*SMALL, "--steps", 2, "--evaluate.every", 1, "--json")
    assert train("dual-encoder", "--shards", data_dir, "--out", tmp_path / "run", *flags) == 0
    printed = capsys.readouterr()
    summary, run = json.loads(printed.out), RunFolder(tmp_path / "run")
    last = read_lines(run.metrics)[-1]
    assert "step 2/2  loss " in printed.err and "done: 2 steps" in printed.err
    assert summary["task"] == "dual-encoder" and summary["checkpoint"] == str(run.checkpoints / "step_000002")
    assert (summary["steps"], summary["samples"], summary["loss"]) == (2, 8, last["loss"])
    assert summary["evaluation"] == {name: value for name, value in last.items() if "/" in name} != {}
    assert summary["next"] == f"train eval retrieval {run.path}" and "--json" not in run.settings.read_text()


def test_an_error_stands_without_remarks_on_settings(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--shards", data_dir, "--out", tmp_path / "run", *SMALL, "--steps", 1, "--batch", 64)
    assert train("dual-encoder", *words) == 2
    printed = capsys.readouterr()
    assert "--batch" in printed.err and "--warmup-steps" not in printed.out + printed.err


def test_retrieval_prints_recalls_chance_and_protocol(
    finished_run: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eval", "retrieval", finished_run, "--shards", data_dir) == 0
    printed = capsys.readouterr().out
    for word in ("R@1", "R@5", "R@10", "median rank", "  chance", "protocol: 3 distinct texts, 3 clips"):
        assert word in printed
    assert train("eval", "retrieval", finished_run, "--split", "train", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    # Three clips have the caption "it begins".
    assert (result["text_to_video"]["num_queries"], result["video_to_text"]["num_queries"]) == (7, 9)
    assert result["step"] == 8 and "examples" not in result
    page = (finished_run / "index.html").read_text()
    assert page.count("<h2>Text-video retrieval") == 2 and "data:image/jpeg;base64," in page


def test_a_run_is_not_begun_over_another(
    finished_run: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("dual-encoder", "--shards", data_dir, "--out", finished_run, *SMALL) == 2
    error, hint = two_lines(capsys)
    assert "exists already" in error and "--resume" in hint and "--out" in hint


def test_a_finished_run_resumes_to_nothing_and_refuses_other_settings(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished_run / "metrics.jsonl").read_bytes()
    assert train("dual-encoder", "--out", finished_run, "--resume") == 0
    assert (finished_run / "metrics.jsonl").read_bytes() == before
    checkpoint = finished_run / "checkpoints" / "step_000008"
    assert f"resuming at step 8 of 8 from {checkpoint}\n" in capsys.readouterr().out
    assert train("dual-encoder", "--out", finished_run, "--resume", "--lr", 0.5) == 2
    error, hint = two_lines(capsys)
    assert "--lr is 0.5" in error and "has 0.001" in error and "--init.weights OLD --out NEW" in hint


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--shards", "nowhere"], "there is no data folder nowhere", "--shards"),
        (
            ["--shards", "{empty}"],
            "is not a data folder: it has no video shards and no manifest",
            "prep manifest folder",
        ),
        (["--shards", "{data}", "--split", "test"], "no videos of split 'test'", "train, val"),
        (["--shards", "{data}", "--batch", "10"], "--batch 10 is larger than the 9 training samples", "use --batch 8"),
        (["--shards", "{data}", "--steps", "0"], "--steps is 0", "from 1 to"),
        (["--shards", "{data}", "--steps", "many"], "steps", "--help"),
        (["--shards", "{data}", "--stepz", "3"], "--stepz", "--help"),
        (["--batch-size", "64"], "unknown option: --batch-size. Did you mean --batch?", "--help"),
        (["--learning_rate=1"], "unknown option: --learning_rate. Did you mean --lr?", "--help"),
        (["--epochs", "3"], "Did you mean --steps?", "the number of optimizer steps: epochs x samples / --batch"),
        (["--resolution", "224"], "unknown option: --resolution. Did you mean --size-px?", "--help"),
        (["--pretrained", "x"], "Did you mean --init.weights?", "--help"),
        (["--config", "{empty}/names.yaml"], "names.yaml; did you mean batch?", "--help"),
        (["--shards", "{data}", "--steps", "3", "--steps", "0"], "--steps is 0", "from 1 to"),
        (["--shards", "{data}", "--preset", "huge"], "there is no preset 'huge'", "tiny"),
        (["--shards", "{data}", "--config", "none.yaml"], "cannot read none.yaml", "YAML"),
        (["--shards", "{data}", "--resume"], "there is no run in", "--out"),
        (
            ["--shards", "{data}", "--attention", "xformers", "--device", "cpu"],
            "xformers does not support a CPU",
            "sdpa",
        ),
    ],
)
def test_mistakes_are_two_lines_and_leave_nothing_behind(
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
    hint: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/names.yaml").write_text("batch_size: 64\n")
    monkeypatch.chdir(tmp_path)
    given = [argument.format(data=data_dir, empty=tmp_path / "empty") for argument in arguments]
    assert train("dual-encoder", *SMALL[:6], *given, "--out", tmp_path / "run") == 2
    printed_error, printed_hint = two_lines(capsys)
    assert error in printed_error and hint in printed_hint
    assert not (tmp_path / "run").exists()


MISTYPED = """
import sys
from clipmill.manifests.errors import UserError
from clipmill.train import cli

for words in (
    "search nowhere text",
    "eval retrieval nowhere",
    "eval retrieval . --shards nowhere",
    "embed nowhere --out embedded",
    "embed . --shards nowhere --out embedded",
    "export nowhere --format hf --out exported",
    "export . --format nowhere --out exported",
    "dual-encoder --shards nowhere",
    "dual-encoder --shards . --init.weights nowhere",
    "bench mae --shards nowhere",
    "caption-chunks . --shards nowhere --out captions.parquet",
    "caption-video nowhere film.mp4",
):
    sys.argv[1:] = words.split()
    try:
        cli._call()
    except UserError as error:
        assert "nowhere" in str(error), error
    else:
        raise AssertionError(words)
print(*sorted({"torch", "open_clip", "transformers"} & sys.modules.keys()))
"""


def test_a_mistyped_place_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    told = subprocess.run(
        [sys.executable, "-P", "-c", MISTYPED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "\n" and not list(tmp_path.iterdir())


def test_a_folder_that_is_no_run_cannot_be_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("eval", "retrieval", tmp_path) == 2
    assert "there is no run in" in two_lines(capsys)[0]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing"])
@pytest.mark.parametrize("file", ["checkpoint.json", "tensors.json", "__0_0.bin"])
def test_a_damaged_checkpoint_is_named(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    path = run / "checkpoints" / "step_000008" / file
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        path.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"cut": content[:middle], "flipped": flipped, "empty": b""}[damage])
    assert train("eval", "retrieval", run) == 2
    error, hint = two_lines(capsys)
    assert "step_000008 cannot be read" in error and "remove this checkpoint" in hint


def test_help_names_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (*(["dual-encoder"], ["classify"], ["doctor"], ["eval", "retrieval"], ["eval", "classification"]),):
        assert train(*command, "--help") == 0
        printed = capsys.readouterr().out
        assert f"train {' '.join(command)} " in printed and "Example" in printed
        assert train(*command, "--help-all") == 0
        # Related flags are grouped, and no group is too long to read at a glance.
        for group in capsys.readouterr().out.split("\n\n"):
            assert len(re.findall(r"^  --", group, re.MULTILINE)) <= 14, group


def test_a_run_goes_on_when_nobody_reads_what_it_says(forks: Forks, data_dir: Path, tmp_path: Path) -> None:
    flags = ["--shards", str(data_dir), "--out", str(tmp_path / "run"), *SMALL, "--steps", "3"]
    process = subprocess.Popen(
        [forks.python(), "-m", "clipmill.train.cli", "dual-encoder", *flags], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert len(read_lines(RunFolder(tmp_path / "run").metrics)) == 3

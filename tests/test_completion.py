"""Completion by real shells, of both programs, from what `--install-completion` writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import Forks

ROOT = Path(__file__).parents[1]
ASKED = [
    ("prep", ["ch"], {"chunk"}),
    ("prep", ["chunk", "--max-f"], {"--max-failures"}),
    ("prep", ["manifest", "ki"], {"kinetics"}),
    ("prep", ["chunk", "--engine", ""], {"ray", "processes"}),
    ("train", ["cap"], {"caption", "caption-video", "caption-chunks"}),
    ("train", ["dual-encoder", "--par"], {"--parallel.strategy"}),
    ("train", ["eval", "prob"], {"probe"}),
]


def require(shell: str) -> str:
    shell_path = shutil.which(shell)
    if shell_path is None:
        pytest.skip(f"{shell} is not installed")
    return shell_path


@pytest.fixture(scope="module", params=["bash", "fish"])
def shell_of_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> tuple[str, Path]:
    """A shell, and the home folder where the completion of both programs is installed for it."""
    shell, home = str(request.param), tmp_path_factory.mktemp("home")
    require(shell)
    for program in ("prep", "train"):
        command = [str(forks.python()), "-m", f"clipmill.{program}.cli", "--install-completion", "--shell", shell]
        ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "HOME": str(home)}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert f"completion for {program}: {home}" in ran.stdout
    return shell, home


def complete(shell: str, home: Path, program: str, words: list[str]) -> set[str]:
    line = [program, *words]
    if shell == "bash":
        array = " ".join(f"'{word}'" for word in line)
        script = f"COMP_WORDS=({array}); COMP_CWORD={len(words)}; _{program}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        command = [require(shell), "--norc", "-c", f". {home}/.bashrc; {script}"]
    else:
        command = [require(shell), "-c", f"complete -C '{' '.join(line)}'"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # fish completes programs that exist
    env = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": f"{home}/.config", "PATH": path}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return {line.split("\t")[0].strip() for line in ran.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize(("program", "words", "expected"), ASKED)
def test_a_shell_completes_commands_flags_and_values(
    shell_of_home: tuple[str, Path], program: str, words: list[str], expected: set[str]
) -> None:
    completions = complete(*shell_of_home, program, words)
    assert expected <= completions
    if shell_of_home[0] == "bash":  # fish also offers what contains the letters
        assert all(word.startswith(words[-1]) for word in completions), "others are not offered"


def test_zsh_accepts_what_is_written_for_it(tmp_path: Path) -> None:
    zsh = require("zsh")
    command = [sys.executable, "-m", "clipmill.prep.cli", "--install-completion", "--shell", "zsh"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)}, check=True, capture_output=True)
    subprocess.run([zsh, "-n", tmp_path / ".zsh/completions/_cyclopts_prep"], check=True)
    # As a user has it who loads completions at all.
    with (tmp_path / ".zshrc").open("a") as rc:
        rc.write("autoload -Uz compinit && compinit -u && whence -w _cyclopts_prep && echo $_comps[prep]\n")
    ran = subprocess.run(
        [zsh, "-ic", "exit"], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert "_cyclopts_prep" in ran.stdout.splitlines()[-1], ran.stdout


@pytest.mark.nightly
def test_a_home_that_cannot_be_written_is_named() -> None:
    command = [sys.executable, "-m", "clipmill.prep.cli", "--install-completion", "--shell", "fish"]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "HOME": "/dev/null"}, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "cannot write /dev/null" in ran.stderr and "Traceback" not in ran.stderr

"""Who may import what from outside, and where. docs/architecture.md says why; this file holds it.

Which of our packages may import which is held by import-linter: the contracts in pyproject.toml, run by `make lint`.
"""

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.forked import forget, run_forked
from tests.imports import circles, imported_names, reaches

PACKAGES = ("manifests", "shards", "prep", "train")

# What a package may import from outside, beside the standard library; prep and train follow pyproject.toml.
OUTSIDE = {
    # botocore, prometheus_client: optional parts
    "manifests": {"botocore", "cyclopts", "numpy", "obstore", "prometheus_client", "pyarrow", "rich"},
    "shards": {"av", "duckdb", "jinja2", "markupsafe", "numpy", "pyarrow"},  # pages: parts of both extras
}
BESIDE = {"prep": ("columns", "endpoint", "zarr"), "train": ("track", "caption-metrics", "lora")}  # further extras
MODULES_OF_DISTRIBUTION = {
    "ffmpeg-python": "ffmpeg",
    "huggingface-hub": "huggingface_hub",
    "imageio-ffmpeg": "imageio_ffmpeg",
    "nvidia-ml-py": "pynvml",
    "open-clip-torch": "open_clip",
    "opencv-python-headless": "cv2",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "scenedetect-headless": "scenedetect",
    "webrtcvad-wheels": "webrtcvad",
}
# Submodules of torch that have one interface each; whole packages are held by import-linter too.
INTERFACES = {"torch.distributed": {"train/distributed/"}, "torch.utils.tensorboard": {"train/run/tracking.py"}}
TORCH_IN_PREP = {
    *("prep/latents/vae.py", "prep/text/tower.py", "prep/text/t5.py", "prep/captions/vlm.py", "prep/engines/choice.py"),
    *(
        f"prep/exports/{name}.py" for name in ("trainers", "finetrainers", "diffusion_pipe")
    ),  # their formats are torch's
}
# Programs are started in one place of each side, which has the time limit and ends the whole process group.
MAY_START_PROGRAMS = {
    *("prep/video/ffmpeg.py", "prep/sources/probe_processes.py", "prep/video/staging.py", "prep/engines/ray.py"),
    *("train/tasks/caption/java.py", "train/doctor/machine.py"),
}
# They accept plain containers, or a plain array, only; elsewhere a pickle from outside would be a program from outside.
MAY_UNPICKLE = {"manifests/adapters/ego4d.py", "train/tasks/dual_encoder/egocentric.py"}


def python_files(repository: Path, package: str) -> list[Path]:
    return sorted((repository / package).rglob("*.py"))


def named_files(repository: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in python_files(repository, package):
        parts = ("clipmill", *path.relative_to(repository).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


def files_that_import(repository: Path, module: str, *, packages: tuple[str, ...] = PACKAGES) -> set[str]:
    return {
        path.relative_to(repository).as_posix()
        for package in packages
        for path in python_files(repository, package)
        if reaches(imported_names(path), module)
    }


def modules_from_outside(repository: Path, package: str) -> set[str]:
    if package in OUTSIDE:
        return OUTSIDE[package]
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = (
        project["dependencies"] + extras[package] + [line for extra in BESIDE[package] for line in extras[extra]]
    )
    distributions = [Requirement(requirement).name for requirement in requirements]
    return {MODULES_OF_DISTRIBUTION.get(name, name) for name in distributions}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_its_machine_has(repository: Path, package: str) -> None:
    allowed = sys.stdlib_module_names | modules_from_outside(repository, package) | {"clipmill"}
    for path in python_files(repository, package):
        roots = {name.partition(".")[0] for name in imported_names(path)}
        assert roots <= allowed, f"{path.relative_to(repository)} imports {sorted(roots - allowed)}"


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks", "scripts"])
def test_a_package_is_imported_by_its_full_name(repository: Path, folder: str) -> None:
    for path in python_files(repository, folder):
        short = {name for name in imported_names(path) if name.partition(".")[0] in PACKAGES}
        assert not short, f"{path.relative_to(repository)}: {sorted(short)[0]} is clipmill.{sorted(short)[0]}"


def test_no_file_imports_itself_through_others(repository: Path) -> None:
    """Imports inside functions and for type checkers count too."""
    files = {name: path for package in PACKAGES for name, path in named_files(repository, package)}
    imports = {
        name: {imported for imported in imported_names(path) if imported in files} for name, path in files.items()
    }
    assert not [sorted(group) for group in circles(imports)]


@pytest.mark.parametrize("module", INTERFACES)
def test_a_part_of_torch_has_one_interface(repository: Path, module: str) -> None:
    allowed = tuple(INTERFACES[module])
    assert [path for path in files_that_import(repository, module) if not path.startswith(allowed)] == []


def test_torch_has_one_interface_for_each_model_of_prep(repository: Path) -> None:
    assert files_that_import(repository, "torch", packages=("manifests", "shards", "prep")) <= TORCH_IN_PREP


def test_only_the_runner_starts_programs(repository: Path) -> None:
    for module in ("subprocess", "os.system", "os.popen", "os.posix_spawn", "asyncio.subprocess", "pty"):
        assert files_that_import(repository, module) <= MAY_START_PROGRAMS, module


def test_one_module_takes_locks(repository: Path) -> None:
    assert files_that_import(repository, "fcntl") == {"manifests/locks.py"}


def test_only_the_plain_unpickler_knows_pickle(repository: Path) -> None:
    for module in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
        assert files_that_import(repository, module) <= MAY_UNPICKLE, module


@pytest.mark.parametrize("program", ["prep", "train"])
def test_help_loads_neither_torch_nor_ray(repository: Path, program: str) -> None:
    script = (
        "import sys\n"
        f"from clipmill.{program}.cli import main\n"
        f"sys.argv = ['{program}', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as exit:\n"
        "    assert not exit.code, exit.code\n"
        "heavy = {'torch', 'ray', 'open_clip', 'diffusers', 'transformers', 'xformers', 'av', 'imageio_ffmpeg',\n"
        "         'duckdb'}\n"
        "heavy &= set(sys.modules)\n"
        "print('heavy:', sorted(heavy), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("heavy: []\n"), ran.stderr


def test_prep_loads_on_a_machine_without_what_training_needs(repository: Path) -> None:
    absent = ("torch", "torchvision", "xformers", "open_clip", "diffusers", "safetensors", "clipmill.train")
    modules = [name for name, _ in named_files(repository, "prep")]
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"  # None in sys.modules: the import fails
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_train_loads_on_a_machine_without_what_prep_needs(repository: Path) -> None:
    absent = ("ray", "ffmpeg", "imageio_ffmpeg", "clipmill.prep")

    def load() -> None:
        forget("clipmill", *absent)
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type] # None: the import fails
        for name, _ in named_files(repository, "train"):
            importlib.import_module(name)

    status, stderr = run_forked(load)
    assert status == 0, stderr

"""The public Python interface: users rely on its names and signatures, so a change of them is made on purpose."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import train.data
from train.data import Batches, Chunk
from train.inference import load_model

SURFACE = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """Names, arguments and defaults, a line each."""
    lines = []
    for public in (train.data.open_clips, train.data.open_latents, train.data.read_chunks, load_model):
        lines.append(f"{public.__name__}:")
        for argument in inspect.signature(public).parameters.values():
            default = "" if argument.default is argument.empty else f" = {argument.default!r}"
            lines.append(f"    {argument.name}{default}")
    lines += ["Batches:", *(f"    {name}" for name in vars(Batches) if not name.startswith("_"))]
    lines += ["Chunk:", *(f"    {field.name}" for field in fields(Chunk))]
    return "\n".join(lines) + "\n"


def test_the_interface_is_as_recorded() -> None:
    assert surface() == SURFACE.read_text(), "if that is intended: python -m tests.train.python.test_surface"


def test_the_package_exports_these_names_and_loads_none_of_them_by_itself() -> None:
    assert {"Batches", "Chunk", "Chunks", "open_clips", "open_latents", "read_chunks"} == set(train.data.__all__)
    script = (
        "import sys, train.data; print('torch' in sys.modules); train.data.open_clips; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


if __name__ == "__main__":
    SURFACE.write_text(surface())

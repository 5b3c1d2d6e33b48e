"""The public Python interface: users rely on its names and signatures, so every change must be intended."""

import inspect
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import clipmill

SURFACE = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """Return names, and arguments, defaults, fields and methods, one per line."""
    lines = []
    for name in clipmill.__all__:
        public = getattr(clipmill, name)
        lines.append(f"{name}:")
        if is_dataclass(public):
            lines += [f"    {field.name}" for field in fields(public)]
        elif inspect.isclass(public):
            lines += [f"    {name}" for name in vars(public) if not name.startswith("_")]
        else:
            for argument in inspect.signature(public).parameters.values():
                default = "" if argument.default is argument.empty else f" = {argument.default!r}"
                lines.append(f"    {argument.name}{default}")
    return "\n".join(lines) + "\n"


def test_the_interface_is_as_recorded() -> None:
    assert surface() == SURFACE.read_text(), "if the change is intended: python -m tests.train.python.test_surface"


def test_importing_clipmill_loads_nothing_else() -> None:
    script = "import sys, clipmill; print(*(name for name in ('numpy', 'torch') if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "\n"


if __name__ == "__main__":
    SURFACE.write_text(surface())

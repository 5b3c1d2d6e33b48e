"""A stored recipe in words: as one line, and as the command that made it."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from prep.recipe import Recipe, recipe_from_dict, resolve


def settings_line(stored: dict[str, Any]) -> str:
    """The settings of a recipe.json that say something, on one line."""
    names = [field.name for field in fields(Recipe)]
    return " ".join(f"{name}={stored[name]}" for name in [*names, "ffmpeg"] if stored.get(name) is not None)


def chunk_command(stored: dict[str, Any], *, data_dir: Path) -> str:
    """The `prep chunk` command line that asks for the recipe of a recipe.json.

    Raises:
        UserError: it was written by another version of the recipe's schema.
    """
    recipe = recipe_from_dict(stored)
    defaults = asdict(resolve(Recipe(codec=recipe.codec), ffmpeg_version="").settings)
    defaults["codec"] = Recipe().codec
    arguments = ["prep", "chunk", "--len", recipe.len]
    for name, value in asdict(recipe).items():
        if name != "len" and value is not None and value != defaults[name]:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    if data_dir.resolve() != Path("data").resolve():
        arguments += ["--data", str(data_dir)]
    return shlex.join(arguments)

"""A stored recipe in words: as one line, and as the command that made its variant."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from prep.core.data_folder import LATENTS, TEXT, VIDEO
from prep.latents.recipe import latents_recipe_from_dict
from prep.latents.settings import LatentsSettings
from prep.text.recipe import text_recipe_from_dict
from prep.video.recipe import NAMED_RECIPES, Recipe, recipe_from_dict
from prep.video.settings import ChunkSettings


def settings_line(stored: dict[str, Any]) -> str:
    """The settings of a recipe.json that say something, on one line."""
    names = [field.name for field in fields(ChunkSettings)]
    return " ".join(f"{name}={stored[name]}" for name in [*names, "ffmpeg"] if stored.get(name) is not None)


def command_of(column: str, stored: dict[str, Any], *, data_dir: Path) -> str:
    """The command line that asks for the recipe in a recipe.json of `column`.

    Raises:
        UserError: it was written by another version of the recipe's schema.
    """
    flags = {VIDEO: _chunk_flags, LATENTS: _latents_flags, TEXT: _text_flags}[column](stored)
    arguments = ["prep", command_for(column), *flags]
    if data_dir.resolve() != Path("data").resolve():
        arguments += ["--data", str(data_dir)]
    return shlex.join(arguments)


def command_for(column: str) -> str:
    """The command that makes `column`."""
    return "chunk" if column == VIDEO else column


def _chunk_flags(stored: dict[str, Any]) -> list[str]:
    settings = recipe_from_dict(stored).settings()
    names = [name for name, values in NAMED_RECIPES.items() if values["codec"] == settings.codec]
    name, codec = (names[0], None) if names else (Recipe().recipe, settings.codec)
    # Which values a layout of the GOP brings along, and which layout comes by itself.
    defaults = asdict(Recipe(recipe=name, codec=codec, gop=settings.gop).settings())
    by_itself = Recipe(recipe=name, codec=codec).settings()
    defaults |= {"len": settings.len, "gop": by_itself.gop, "codec": by_itself.codec if names else None}
    chosen = [] if name == Recipe().recipe else ["--recipe", name]
    return ["--len", settings.len, *chosen, *_flags(asdict(settings), defaults)]


def _latents_flags(stored: dict[str, Any]) -> list[str]:
    settings = latents_recipe_from_dict(stored).settings
    return ["--vae", settings.vae, *_flags(asdict(settings), asdict(LatentsSettings(vae=settings.vae)))]


def _text_flags(stored: dict[str, Any]) -> list[str]:
    return ["--clip", text_recipe_from_dict(stored).clip]


def _flags(values: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]

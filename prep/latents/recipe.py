"""The resolved recipe of the `latents` column: settings, the VAE's weights, and the variant of `video` they show."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from manifests.errors import UserError
from prep.core.data_folder import LATENTS
from prep.latents.settings import LatentsSettings
from prep.latents.weights import Vae, find_vae

LATENTS_SCHEMA = 1  # goes up when the same settings begin to give other bytes
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, kw_only=True)
class LatentsRecipe:
    """Everything that the latents depend on, beside the chunks themselves.

    Attributes:
        video: the variant of `video` whose chunks are encoded.
    """

    settings: LatentsSettings
    vae: Vae
    video: str

    def __post_init__(self) -> None:
        if self.settings.size % self.vae.factor:
            raise UserError(
                f"--size {self.settings.size} is no multiple of {self.vae.factor}, by which this VAE scales down",
                hint=f"use {self.settings.size // self.vae.factor * self.vae.factor or self.vae.factor}",
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical JSON of `as_dict`."""
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def variant(self) -> str:
        """Folder name: the VAE's name, the main settings, and the fingerprint's first 8 digits."""
        settings = self.settings
        vae = _NOT_IN_A_NAME.sub("-", self.vae.name.rpartition("/")[2]).strip("-.") or "vae"
        fps = settings.fps.replace("/", "-")
        return f"{vae}-{settings.size}px-{fps}fps-{settings.crop}-{settings.posterior}-{self.fingerprint[:8]}"

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the latents of one frame."""
        side = self.settings.size // self.vae.factor
        return self.vae.channels, side, side

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. What cannot change the bytes is null: a seed without anything random, for one."""
        settings = asdict(self.settings)
        is_random = settings["crop"] == "random"
        settings["segment"] = self.settings.segment if is_random else None
        settings["seed"] = self.settings.seed if is_random or settings["posterior"] == "sample" else None
        settings["fps"] = str(self.settings.fps_exact)
        return {
            **settings,
            "schema": LATENTS_SCHEMA,
            "column": LATENTS,
            "video": self.video,
            "vae": self.vae.name,
            "vae_sha256": self.vae.sha256,
            "channels": self.vae.channels,
            "factor": self.vae.factor,
            "scaling_factor": self.vae.scaling_factor,
            "shift_factor": self.vae.shift_factor,
        }


def resolve(settings: LatentsSettings, *, video: str) -> LatentsRecipe:
    """Finds the VAE that `settings` name.

    Raises:
        UserError: there is no such VAE, or it does not fit the settings.
    """
    return LatentsRecipe(settings=settings, vae=find_vae(settings.vae), video=video)


def latents_recipe_from_dict(stored: dict[str, Any]) -> LatentsRecipe:
    """The recipe in a variant's recipe.json, as written by `LatentsRecipe.as_dict`; the weights are not looked for.

    Raises:
        UserError: it was written by another version of the recipe's schema.
    """
    if stored.get("schema") != LATENTS_SCHEMA or stored.get("column") != LATENTS:
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r}, this version writes {LATENTS_SCHEMA}",
            hint="run `prep latents` with the settings that you want; it makes a new variant",
        )
    names = {field.name for field in fields(LatentsSettings)}
    settings = {name: value for name, value in stored.items() if name in names and value is not None}
    of_vae = ("channels", "factor", "scaling_factor", "shift_factor")
    try:
        vae = Vae(
            name=stored["vae"],
            source=stored["vae"],
            directory=None,
            sha256=stored["vae_sha256"],
            **{name: stored[name] for name in of_vae},
        )
        return LatentsRecipe(settings=LatentsSettings(**settings), vae=vae, video=stored["video"])
    except KeyError as error:
        raise UserError(f"the recipe has no {error}", hint="run `prep latents` again; it writes it anew") from None

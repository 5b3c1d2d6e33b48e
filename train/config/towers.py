"""The video towers that `--towers.kind` knows: those of clipmill, and those of installed packages (docs/plugins.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clipmill.manifests.plugins import Parts, import_object


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """A video tower, and what the settings need to know of it.

    Attributes:
        name: value of `--towers.kind`.
        build: import path of a function, or of a class, (size, image_px, num_frames, embedding_width, attend, towers)
            -> a module that embeds clips [B, C, T, H, W] as [B, embedding_width], not of unit length: the tower of a
            dual encoder. `size` is a `VideoViTSize`, `towers` are the settings `--towers.*`. None for a tower that a
            dual encoder does not have.
        tubelet: frames of a cube, unless --towers.tubelet says otherwise.
    """

    name: str
    build: str | None
    tubelet: int = 1

    def load(self) -> Callable[..., Any]:
        """The function of `build`."""
        assert self.build is not None
        found: Callable[..., Any] = import_object(self.build)
        return found


_ROWS = (
    TowerSpec(name="clip", build="clipmill.train.models.video_vit:clip_tower"),
    TowerSpec(name="videomae", build=None, tubelet=2),
    TowerSpec(name="timesformer", build=None),
    # Towers of open_clip, timm and transformers, which --towers.image names.
    TowerSpec(name="library", build="clipmill.train.models.library_towers:image_tower"),
)
TOWERS = Parts("tower", group="towers", kind=TowerSpec, builtin={row.name: row for row in _ROWS})

"""Video towers as graphs of torch.export, which a server opens without clipmill, and how to make their input."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.weights.conversion import MEANS, STDS
from clipmill.train.weights.exported import Exported, save_json

GRAPH_FILE, INPUT_FILE = "video.pt2", "preprocessing.json"
_RGB = 3
_EXAMPLES = 2  # a batch of one would be taken for a constant


def exported_graph(
    model: nn.Module, settings: ClipSettings, *, kind: str, output: str, facts: dict[str, float | None]
) -> Exported:
    """A model as a graph with any batch size, on the CPU in float32.

    Args:
        model: takes clips, float32 [B, 3, T, H, W], and attends by what torch can trace.
        kind: of the tower, whose normalisation is the default.
        output: what the model returns.
        facts: further numbers that a user of the output needs, by name.

    Raises:
        UserError: the model takes latents.
    """
    if settings.reads_latents:
        raise UserError(
            "the run was trained on latents, and a graph takes pixels", hint="export a run of --input pixels"
        )
    side_px, num_frames = settings.size_px, settings.num_frames

    def write(folder: Path) -> None:
        clips = torch.zeros(_EXAMPLES, _RGB, num_frames, side_px, side_px)
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        with torch.no_grad():
            program = torch.export.export(model.eval(), (clips,), dynamic_shapes=shapes, strict=False)
        torch.export.save(program, folder / GRAPH_FILE)
        save_json(folder / INPUT_FILE, _preprocessing(settings, kind=kind) | {"output": output, **facts})

    remark = f"{INPUT_FILE} says how clips are made; the graph has no text tower, and training cannot start from it"
    return Exported(write=write, remarks=(remark,), has_weights=False)


def _preprocessing(settings: ClipSettings, *, kind: str) -> dict[str, Any]:
    return {
        "input": "float32 [B, 3, T, H, W]: RGB from 0 to 1, less mean, divided by std",
        "num_frames": settings.num_frames,
        "sampling": settings.sampling,
        "stride": settings.stride if settings.sampling == "stride" else None,
        "resize": "the short side to size_px, then the central square",
        "size_px": settings.size_px,
        "mean": list(settings.init.pixel_mean or MEANS[kind]),
        "std": list(settings.init.pixel_std or STDS[kind]),
    }

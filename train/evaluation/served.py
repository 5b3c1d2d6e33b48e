"""Export a video model as a program that runs without clipmill (torch.export or ONNX).

OUT/model.pt2 or OUT/model.onnx   program that maps normalised clips, float32 [B, C, T, H, W], to float32 [B, N]
OUT/preprocessing.json            number and preprocessing of frames, and the meaning of the output
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.evaluation.identity import normalisation_of
from clipmill.train.spec import ExportRequest
from clipmill.train.weights.exported import Export, save_json

PROGRAM_FORMATS = ("torch", "onnx")
PREPROCESSING_FILE = "preprocessing.json"
_EXAMPLE_CLIPS = 2
_USE = {
    "torch": 'import torch\n\nmodel = torch.export.load("model.pt2").module()\noutput = model(clips)',
    "onnx": 'import onnxruntime\n\nmodel = onnxruntime.InferenceSession("model.onnx")\n'
    '(output,) = model.run(None, {"clips": clips})',
}


def exported_program(request: ExportRequest, model: nn.Module, output: Mapping[str, Any]) -> Export:
    """Prepare the export of a model as a program. The model must be on the CPU.

    Args:
        request: Settings, shape and format of the export.
        model: Module with SDPA attention that maps float32 clips [B, C, T, H, W] to float32 [B, N].
        output: Description of the output, for preprocessing.json.

    Raises:
        UserError: The model cannot be traced.
    """
    settings, channels, side = request.settings, request.shape.size.video.num_channels, request.shape.image_px
    views = (settings.num_views,) if settings.num_views > 1 else ()
    example = torch.zeros(_EXAMPLE_CLIPS, *views, channels, settings.num_frames, side, side)
    model = model.eval().requires_grad_(False)
    try:
        # With strict=True, `len(clips)` is traced as the batch size, not as a constant.
        program = torch.export.export(
            model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), strict=True
        )
        onnx = _as_onnx(program, example) if request.format_name == "onnx" else None
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{request.title} cannot be exported as --format {request.format_name}: {reason}",
            hint="use towers that torch.export can trace, without branches on tensor values and without custom kernels",
            flags=("--format",),
        ) from error
    values = {"input": _input_of(settings, list(example.shape[1:])), "output": dict(output)}

    def write(folder: Path) -> None:
        if onnx is None:
            torch.export.save(program, folder / "model.pt2")
        else:
            onnx.save(folder / "model.onnx")
        save_json(folder / PREPROCESSING_FILE, values)

    rows = [f"| {part} {name} | {value} |" for part, group in values.items() for name, value in group.items()]
    table = "\n".join(["| | |", "|---|---|", *rows])
    usage = f"```python\n{_USE[request.format_name]}\n```\n\nContents of `{PREPROCESSING_FILE}`:\n\n{table}"
    return Export(write=write, usage=usage)


def _as_onnx(program: torch.export.ExportedProgram, example: torch.Tensor) -> Any:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the exporter warns about operators of packages that are not installed
    try:
        return torch.onnx.export(
            program, (example,), dynamo=True, input_names=["clips"], output_names=["output"], verbose=False
        )
    finally:
        logger.setLevel(level)


def _input_of(settings: Any, shape: list[int]) -> dict[str, Any]:
    dims = {"layout": "BCTHW"} if settings.views is None else {"layout": "BVCTHW", "views": settings.view_names}
    layout = {"name": "clips", **dims, "dtype": "float32", "shape": ["batch", *shape]}
    frames = {"num_frames": settings.num_frames, "sampling": settings.sampling}
    if settings.sampling == "stride":
        frames["stride"] = settings.stride
    if settings.reads_latents:
        return {**layout, "kind": "VAE latents, as returned by the data loader of the run", **frames}
    mean, std = normalisation_of(settings)
    return {
        **layout,
        "kind": "RGB frames, scaled to 0..1, minus mean, divided by std",
        **frames,
        "crop": "centre square",
        "size_px": settings.size_px,
        "mean": list(mean),
        "std": list(std),
    }


def logit_facts(log_scale: float | None, bias: float | None) -> dict[str, float | None]:
    """Return the scale and bias that convert cosine similarities to logits: cosine * logit_scale + logit_bias."""
    return {"logit_scale": None if log_scale is None else math.exp(log_scale), "logit_bias": bias}

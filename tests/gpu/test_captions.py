"""Captions that are decoded on the device are those of a CPU, in float32."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from clipmill.train.config.files import load_settings
from clipmill.train.distributed.world import World
from clipmill.train.engine.trained_run import open_trained_run
from clipmill.train.run.folder import open_run
from clipmill.train.tasks.caption.model import read_decoder_parts
from clipmill.train.tasks.caption.spec import CaptionerSettings, DecodingSettings
from clipmill.train.tasks.caption.task import CaptionTask
from clipmill.train.tasks.caption.video_captions import TrainedCaptioner
from tests.gpu.runs import Runs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

VARIANTS = {
    "greedy": DecodingSettings(),
    "greedy, 4 tokens at least": DecodingSettings(min_tokens=4, max_tokens=10),
    "beam": DecodingSettings(method="beam", num_beams=4),
    "beam, long": DecodingSettings(method="beam", num_beams=3, length_penalty=2.0, min_tokens=5),
    "sample": DecodingSettings(method="sample", temperature=0.8, top_k=20, seed=3),
}
SHOWN = "beam"


def open_on(run_path: Path, device: torch.device) -> TrainedCaptioner:
    """The captioner of a run, on a device of our own choice."""
    run = open_run(run_path)
    settings = replace(
        load_settings(run.settings, CaptionerSettings), device="cuda" if device.type == "cuda" else "cpu"
    )
    trained = open_trained_run(run, settings)
    assert trained.device.type == device.type and trained.precision.name == "fp32"
    make = partial(CaptionTask, attention=trained.attention, device=trained.device, decoder=read_decoder_parts(run))
    task = make(settings)
    return TrainedCaptioner(run_path.name, trained, task, trained.fill(task.build_model()))


@pytest.mark.parametrize("name", VARIANTS)
def test_captions_are_those_of_a_cpu(name: str, runs: Runs, device: torch.device, is_dry_run: bool) -> None:
    if is_dry_run and name != SHOWN:
        pytest.skip(f"not in the dry run, which runs {SHOWN} alone")
    path = runs.make("caption", device)
    texts = []
    for place in (device, torch.device("cpu")):
        captioner = open_on(path, place)
        samples = captioner.task.samples("val", World())
        captions = []
        for loaded in samples.evaluation_batches():
            numbers = loaded.batch["clip_id"].tolist()
            decoding = captioner.task.decoding(VARIANTS[name])
            captions += captioner.captions(loaded.batch, decoding, samples=numbers)[0]
        texts.append(captions)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12 and any(texts[0])

"""Evaluations, embeddings, loaders and prep's models on a GPU: results of the CPU, nothing refilled too early."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipmill import load_model, open_clips, open_latents
from clipmill.prep.captions.answers import Answer
from clipmill.prep.captions.recipe import CaptionsSettings
from clipmill.prep.captions.vlm import open_model
from clipmill.prep.text.recipe import TextSettings
from clipmill.train.data.batch import BatchRing, Sample
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.engine.metrics import Throughput
from clipmill.train.evaluation import probe_classifiers
from clipmill.train.evaluation.features import extract
from clipmill.train.evaluation.probe_classifiers import GRID, choose_l2
from clipmill.train.inference import LoadedModel
from clipmill.train.tasks.dual_encoder import evaluation
from clipmill.train.tasks.dual_encoder.protocols import Embeddings, embed_all
from tests.gpu.test_columns import LATENTS, TEXT, column, make_latents, make_text
from tests.prep.latents.video_vaes import save_model
from tests.prep.text.t5_models import saved_t5
from tests.simulated_gpu.inside.steps import LOCAL_RANK, run
from tests.simulated_gpu.journal import Journal
from tests.tiers import nightly_beyond
from tests.train.running import train

EVALUATIONS = {
    "retrieval": ("dual-encoder", "--split val"),
    "probe": ("dual-encoder", "--split val --label class --neighbours 3"),
    "classification": ("classify", "--split val"),
    "reconstruction": ("mae", "--split val"),
    "caption": ("caption", "--split val --decoding.method beam --decoding.num-beams 2 --decoding.max-tokens 4"),
}


def on_device(run: Path, device: str, *, out: Path) -> Path:
    """A copy of a run that is evaluated on another device."""
    shutil.copytree(run, out)
    settings = out / "settings.yaml"
    text = settings.read_text()
    assert "device: cpu\n" in text
    settings.write_text(text.replace("device: cpu\n", f"device: {device}\n"))
    return out


def numbers_of(values: Any) -> list[float]:
    """All numbers of a result, in order."""
    if isinstance(values, dict):
        return [number for name in sorted(values) for number in numbers_of(values[name])]
    if isinstance(values, list):
        return [number for part in values for number in numbers_of(part)]
    return [float(values)] if isinstance(values, int | float) else []


@pytest.fixture(autouse=True)
def _few_regularisations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of those that a probe chooses from, which converge in a few steps; weaker ones take hundreds."""
    monkeypatch.setattr(probe_classifiers, "choose_l2", partial(choose_l2, grid=GRID[-2:]))


@pytest.mark.parametrize("name", nightly_beyond(["retrieval", "caption"], EVALUATIONS))
def test_an_evaluation_has_the_result_of_a_cpu(
    name: str,
    trained_runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embeddings: list[Embeddings] = []

    def embed(*args: Any, **options: Any) -> Embeddings:
        embeddings.append(embed_all(*args, **options))
        return embeddings[-1]

    # Metrics of ranks change only if embeddings of two clips change places.
    monkeypatch.setattr(evaluation, "embed_all", embed)
    task, flags = EVALUATIONS[name]
    results = []
    for device in ("cpu", "cuda"):
        words = ("eval", name, on_device(trained_runs[task], device, out=tmp_path / device), *flags.split(), "--json")
        if device == "cpu":
            assert train(*words) == 0
        else:
            torch.cuda.set_device(LOCAL_RANK)  # the GPU that "cuda" names in this process
            journal = run(*words)
            assert journal.devices == {LOCAL_RANK} and journal.races == [] and journal.pageable == []
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    expected, numbers = map(numbers_of, results)
    assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6) and len(numbers) > 1
    assert len(embeddings) == (2 if name == "retrieval" else 0)
    for on_cpu, on_gpu in zip(embeddings[::2], embeddings[1::2], strict=True):
        np.testing.assert_allclose(on_gpu.video, on_cpu.video, atol=1e-5)
        np.testing.assert_allclose(on_gpu.text, on_cpu.text, atol=1e-5)


def test_clips_are_embedded_as_on_a_cpu(trained_runs: dict[str, Path], clips_dir: Path, tmp_path: Path) -> None:
    words = (
        "embed",
        trained_runs["dual-encoder"],
        "--shards",
        clips_dir,
        "--split",
        "train",
        "--batch",
        "2",
        "--workers",
        "1",
    )
    assert train(*words, "--device", "cpu", "--out", tmp_path / "cpu") == 0
    journal = run(*words, "--device", "cuda", "--out", tmp_path / "gpu")
    assert journal.devices == {LOCAL_RANK} and journal.races == [] and journal.pageable == []
    for path in (tmp_path / "cpu").glob("*.npy"):
        np.testing.assert_allclose(np.load(tmp_path / "gpu" / path.name), np.load(path), atol=1e-5)


def test_a_model_in_python_computes_where_it_was_opened(
    trained_runs: dict[str, Path], clips_dir: Path, journal: Journal
) -> None:
    frames = np.random.default_rng(0).integers(256, size=(3, 2, 40, 32, 3), dtype=np.uint8)
    normalised, texts = torch.randn(3, 3, 2, 32, 32), ["a dog", "a cat that sleeps"]
    torch.cuda.set_device(LOCAL_RANK)
    on_gpu, on_cpu = (load_model(trained_runs["dual-encoder"], device=device) for device in ("cuda", "cpu"))
    with open_clips(clips_dir, batch=3, num_frames=2, size_px=32, rgb=False, workers=1, device="cpu") as batches:
        planes: Any = next(iter(batches))
    encoders: list[Callable[[LoadedModel], torch.Tensor]] = [
        lambda model: model.encode_video(frames),
        lambda model: model.encode_video(normalised),
        lambda model: model.encode_video(planes),
        lambda model: model.encode_video(normalised, tokens=True),
        lambda model: model.encode_text(texts),
    ]
    for encode in encoders:
        encoded = encode(on_gpu)
        assert encoded.device == torch.device("cuda", LOCAL_RANK)
        torch.testing.assert_close(encoded.cpu(), encode(on_cpu), atol=1e-5, rtol=0)
    assert journal.devices == {LOCAL_RANK} and journal.races == [] and journal.pageable == []


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("kind", ["clips", "latents"])
def test_batches_lie_on_the_gpu_of_their_rank(
    kind: str, device: str, clips_dir: Path, latents_dir: Path, journal: Journal
) -> None:
    """The thread that loads ahead begins with GPU 0, whatever the caller's is."""
    torch.cuda.set_device(3)
    number = 3 if device == "cuda" else 1
    given: dict[str, Any] = {"batch": 3, "seed": 1, "rank": 0, "world": 1}
    if kind == "clips":
        given |= {"num_frames": 2, "size_px": 32, "workers": 1, "label": "class"}
        opened = [open_clips(clips_dir, **given, device=place) for place in (device, "cpu")]
    else:
        given |= {"segment": "2s", "captions": "embedding"}
        opened = [open_latents(latents_dir, **given, device=place) for place in (device, "cpu")]
    with opened[0] as batches, opened[1] as expected:
        kept = []
        for batch, right in zip(islice(batches, 4), islice(expected, 4), strict=True):
            for name, value in right.items():
                if isinstance(value, torch.Tensor) and isinstance(batch[name], torch.Tensor):
                    kept.append((name, batch[name], value))
            pictures = batch["video" if kind == "clips" else "latents"]
            assert pictures.device == torch.device("cuda", number)
            pictures.flatten()  # at once, as a model would use it
    # The thread that loads ahead waits for its copies; the caller, who launches a step, waits for nothing.
    assert {note.where.partition(":")[0] for note in journal.waits} == {"train/data/prefetch.py"}
    assert not any(note.is_of_caller for note in journal.waits), journal.waits
    torch.cuda.synchronize()
    # The batches belong to the caller: later ones have overwritten none.
    for name, kept_tensor, other in kept:
        assert torch.equal(kept_tensor.cpu(), other), name
    assert journal.devices == {number} and journal.races == [] and journal.pageable == []


@pytest.mark.parametrize(("name", "tflops"), [("NVIDIA H200", 989.4), ("NVIDIA H200 NVL", 835.5)])
def test_utilisation_is_that_of_the_gpu_by_its_whole_name(
    name: str, tflops: float, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    throughput = Throughput(device=torch.device("cuda", 0), precision="bf16")
    throughput.flops_per_step = 10**12
    assert throughput.metrics(step_s=0.01, waited_s=0.0, num_samples=1)["mfu"] == pytest.approx(100 / tflops)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pictures and CLIP", "videos and T5"])
def test_columns_are_those_of_a_cpu(kind: str, clips_dir: Path, tmp_path: Path, journal: Journal) -> None:
    of_vae: dict[str, Any] = {"size": 32, "batch": 4, "precision": "float32"}
    recipe = TextSettings(clip="tiny")
    if kind == "videos and T5":
        vae = save_model("AutoencoderKLWan", tmp_path / "vae")
        of_vae |= {"vae": str(vae), "fps": "8", "segment": "9f", "posterior": "sample"}
        of_vae["precision"] = "bfloat16"
        recipe = TextSettings(encoder=f"t5:{saved_t5(tmp_path / 't5')}", max_tokens=8, precision="bfloat16")
    for device in ("cpu", "cuda"):
        data_dir = tmp_path / device
        shutil.copytree(clips_dir, data_dir)
        make_latents(data_dir, device=device, **of_vae)  # type: ignore[arg-type]
        make_text(data_dir, device=device, recipe=recipe)  # type: ignore[arg-type]
    assert journal.devices == {0} and journal.races == []
    for name in (LATENTS, TEXT):
        arrays, expected = column(tmp_path / "cuda", name), column(tmp_path / "cpu", name)
        assert arrays.keys() == expected.keys() and arrays
        for key, array in expected.items():
            np.testing.assert_allclose(arrays[key], array, atol=2e-3)


def test_captions_of_a_vision_language_model_are_those_of_a_cpu(models: Path, journal: Journal) -> None:
    pictures = [[*rng] for rng in np.random.default_rng(0).integers(256, size=(3, 2, 64, 48, 3), dtype=np.uint8)]
    settings = CaptionsSettings(model="tiny", precision="bfloat16", frames=2, size=64, max_tokens=12, temperature=1.0)
    models_opened, expected = (
        open_model(models / "vlm", name="tiny", device=device, precision="bfloat16", num_threads=1).captions(
            pictures, settings=settings, seed=0
        )
        for device in ("cuda", "cpu")
    )
    texts = [[answer.text for answer in answers if isinstance(answer, Answer)] for answers in (models_opened, expected)]
    assert texts[0] == texts[1] and len(texts[0]) == 3 and any(texts[0])
    assert journal.devices == {0} and journal.races == []


class _FirstPixel:
    """A tower whose feature is the first pixel of a clip."""

    def features(self, video: torch.Tensor) -> torch.Tensor:
        return video[:, :1].float()


def test_features_are_those_of_their_own_clips_however_far_ahead_the_host_is(journal: Journal) -> None:
    """Nothing waits for the device while features are extracted, so copies of all batches may be pending."""
    ring = BatchRing(4, pin=True)

    def batches() -> Iterator[LoadedBatch]:
        for first in range(0, 24, 4):
            numbers = range(first, first + 4)
            clips = [Sample(position=number, key="a", video=np.full(8, number, np.uint8)) for number in numbers]
            yield LoadedBatch(ring.collate(clips), (), Cursor(0))

    device = torch.device("cuda", 0)
    features = extract([_FirstPixel()], batches(), inputs=lambda batch: batch["video"], device=device)
    journal.finish()
    assert journal.races == [] and journal.pageable == []
    assert features.tower_features[0][:, 0].tolist() == features.sample.tolist() == [*range(24)]

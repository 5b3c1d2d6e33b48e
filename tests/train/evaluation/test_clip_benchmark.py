"""CLIP_benchmark's tars: for the same exported weights and tars, the results equal those of clip_benchmark."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from PIL import Image
from sklearn.metrics import top_k_accuracy_score
from torch.utils.data import DataLoader

from clipmill.manifests.errors import UserError
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.zero_shot import image_classes
from tests.train.evaluation.test_commands import score
from tests.train.running import train

NUM_IMAGES, SIDE_PX = 40, 32
NAMES = ["dog", "sunglasses", "tree", "house", "red hat", "blue car", "boat"]
TEMPLATES = ["a photo of a {c}.", "a drawing of the {c}."]
CAPTIONS = ["a dog runs", "a tree in the wind", "two boats", "a house", "someone sleeps", "blue cars", "a red hat"]


def image(rng: np.random.Generator) -> bytes:
    """Make a PNG of a grey pattern.

    YUV represents its levels exactly; other levels and colours would differ from Pillow's by rounding.
    """
    coarse = rng.choice(np.array([0, 85, 170, 255], np.uint8), (4, 4)).repeat(8, axis=0).repeat(8, axis=1)
    content = io.BytesIO()
    Image.fromarray(coarse).convert("RGB").save(content, "png")
    return content.getvalue()


def write_set(folder: Path, *, kind: str) -> Path:
    """Write a data set in the layout of CLIP_benchmark, in two tars."""
    rng = np.random.default_rng(3)
    (folder / "test").mkdir(parents=True)
    for number in range(2):
        with tarfile.open(folder / "test" / f"{number}.tar", "w") as tar:
            for index in range(NUM_IMAGES // 2):
                texts = [f"{rng.choice(CAPTIONS)} {number} {index} {text}" for text in range(1 + index % 3)]
                text = {"cls": str(rng.integers(len(NAMES))), "txt": "\n".join(texts)}[kind]
                for extension, content in (("png", image(rng)), (kind, text.encode())):
                    member = tarfile.TarInfo(f"s{number}{index:04d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    (folder / "test" / "nshards.txt").write_text("2")
    if kind == "cls":
        (folder / "classnames.txt").write_text("\n".join(NAMES) + "\n")
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    else:
        (folder / "dataset_type.txt").write_text("retrieval")
    return folder


@pytest.fixture(scope="module")
def exported_model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny model, exported for open_clip."""
    folder = tmp_path_factory.mktemp("exported")
    words = (
        f"--model tiny --num-frames 1 --size-px {SIDE_PX} --batch 4 --steps 2 --workers 1 --warmup-steps 0 --lr 0.01"
        # With other weights, two similarities may differ only by rounding, so that either caption may be first.
        " --seed 1"
    )
    assert train("dual-encoder", "--shards", data_dir, "--out", folder / "run", *words.split()) == 0
    assert train("export", folder / "run", "--format", "open_clip", "--out", folder / "model") == 0
    return folder / "model"


def theirs(exported: Path, data: Path, **options: Any) -> tuple[Any, DataLoader[Any], Any]:
    """Return open_clip's model, the images as clip_benchmark loads them, and the tokenizer."""
    # DataComp's tools pass both arguments.
    weights = str(exported / "open_clip_model.safetensors")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{exported}", pretrained=weights)
    dataset = build_wds_dataset("", preprocess, split="test", data_dir=str(data))
    return model.eval(), DataLoader(dataset, batch_size=16, **options), open_clip.get_tokenizer(f"local-dir:{exported}")


def top_k(logits: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
    return [float(top_k_accuracy_score(target, logits, k=k, labels=range(len(NAMES)))) for k in topk]


def test_zero_shot_classification_is_that_of_clip_benchmark(
    exported_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_set(tmp_path / "set", kind="cls")
    model, loader, tokenizer = theirs(exported_model, data)
    # clip_benchmark's own function converts an array to a number, which NumPy 2.4 rejects.
    monkeypatch.setattr(zeroshot_classification, "accuracy", top_k)
    dataset: Any = loader.dataset
    expected = zeroshot_classification.evaluate(
        model, loader, tokenizer, dataset.classes, dataset.templates, "cpu", amp=False
    )
    result: dict[str, Any] = score(capsys, "zero-shot", exported_model, "--shards", data / "test" / "{0..1}.tar")
    assert result["num_clips"] == NUM_IMAGES and result["num_classes"] == len(NAMES)
    assert {"acc1": result["top"]["1"], "acc5": result["top"]["5"], "recall": result["mean_class_accuracy"]} == (
        pytest.approx({"acc1": expected["acc1"], "acc5": expected["acc5"], "recall": expected["mean_per_class_recall"]})
    )


def test_retrieval_with_several_captions_is_that_of_clip_benchmark(
    exported_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_set(tmp_path / "set", kind="txt")
    model, loader, tokenizer = theirs(exported_model, data, collate_fn=image_captions_collate_fn)
    expected = zeroshot_retrieval.evaluate(model, loader, tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10])
    words = ["--shards", data / "test" / "{0..1}.tar", "--protocol", "clip-benchmark"]
    result: dict[str, Any] = score(capsys, "retrieval", exported_model, *words)
    for direction, name in (("text_to_video", "image"), ("video_to_text", "text")):
        recall = {f"{name}_retrieval_recall@{k}": share for k, share in result[direction]["recall"].items()}
        assert recall == pytest.approx({key: expected[key] for key in recall})
    assert result["video_to_text"]["num_queries"] == NUM_IMAGES
    assert result["text_to_video"]["num_queries"] == result["video_to_text"]["gallery_size"] > NUM_IMAGES


def test_the_loop_has_the_figures_of_the_command(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images are evaluated with both protocols during a run on videos."""
    tars = {kind: write_set(tmp_path / kind, kind=kind) / "test" / "{0..1}.tar" for kind in ("cls", "txt")}
    words = f"--model tiny --num-frames 1 --size-px {SIDE_PX} --batch 4 --steps 1 --workers 1 --evaluate.every 1"
    named = (f"zero={tars['cls']}@test:zero-shot", f"pairs={tars['txt']}@test:clip-benchmark")
    out = tmp_path / "run"
    assert train("dual-encoder", "--shards", data_dir, "--out", out, *words.split(), "--evaluate.shards", *named) == 0
    last = read_lines(RunFolder(out).metrics)[-1]
    zero: dict[str, Any] = score(capsys, "zero-shot", out, "--shards", tars["cls"])
    pairs: dict[str, Any] = score(capsys, "retrieval", out, "--shards", tars["txt"], "--protocol", "clip-benchmark")
    assert last["zero/top1"] == pytest.approx(zero["top"]["1"])
    assert last["zero/mean_class_accuracy"] == pytest.approx(zero["mean_class_accuracy"])
    for direction in ("text_to_video", "video_to_text"):
        assert last[f"pairs/{direction}_r5"] == pytest.approx(pairs[direction]["recall"]["5"])
        assert 0 < last[f"pairs/{direction}_r10"] < 1


def test_what_the_tars_lack_is_said(
    exported_model: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_set(tmp_path / "set", kind="cls")
    (data / "classnames.txt").rename(tmp_path / "names.txt")
    shards = ["--shards", data / "test" / "{0..1}.tar"]
    assert train("eval", "zero-shot", exported_model, *shards) == 2
    assert "classnames.txt is neither in the folder of the tars" in capsys.readouterr().err
    assert (
        score(capsys, "zero-shot", exported_model, *shards, "--classes", tmp_path / "names.txt")["num_clips"]
        == NUM_IMAGES
    )
    assert train("eval", "retrieval", exported_model, "--shards", data_dir, "--protocol", "clip-benchmark") == 2
    assert "clip-benchmark scores image tars" in capsys.readouterr().err
    assert (
        train("eval", "zero-shot", exported_model, *shards, "--classes", tmp_path / "names.txt", "--label", "verb") == 2
    )
    assert "images in tars have no label 'verb'" in capsys.readouterr().err
    # ImageNet has two classes with the same name. They tie, which counts against the model.
    (tmp_path / "names.txt").write_text("sunglasses\n" * len(NAMES))
    same = score(capsys, "zero-shot", exported_model, *shards, "--classes", tmp_path / "names.txt")
    assert same["top"] == {"1": 0.0, "5": 0.0}
    few = tmp_path / "few.txt"
    few.write_text("\n".join(NAMES[:2]))
    result = score(capsys, "zero-shot", exported_model, *shards, "--classes", few)
    assert "with none of the classes" in str(result["data"])
    assert json.dumps(result)


def test_class_names_beside_remote_tars_are_not_said_to_be_missing() -> None:
    with pytest.raises(UserError, match=r"classnames\.txt cannot be read from the folder of the remote tars"):
        image_classes("http://127.0.0.1:1/test/{0..1}.tar", None)

"""Every value of every published preset, compared with tables typed from the source documents.

A row is a value and its source: a document with section, table and row, or line. Numbers of steps are computed from the
data size, epochs and batch in the documents. `differs` states what another source by the same authors has; the header
of the preset must then say which source it follows.

    AVION         Zhao and Kraehenbuehl 2023; code: its public scripts
    FastCLIP      Wei et al. 2024; code: the commands of its README
    SpaceTimeGPT  page of the DeepSpeed version; code: src/train.py of the single-GPU model of the same name
    VideoMAE      Tong et al. 2022 (AVION, section 5.5: 'the default setting'); here from public code: its scripts for
                  Kinetics-400 (pretrain.sh, finetune.sh of 800 epochs), and AVION's, which repeat its defaults
    here          no document states the value, so the row gives the reason
"""

from dataclasses import dataclass
from math import isclose
from typing import Any

import pytest
import yaml

from clipmill.train.config.files import PRESETS_FOLDER
from tests.train.fastclip_tables import ALGORITHMS, TABLE_10, losses_of, optimizers_of, published_rows

DOCUMENTS = ("AVION", "FastCLIP", "SpaceTimeGPT", "VideoMAE", "here: ")


@dataclass(frozen=True)
class Row:
    """A value of a preset, its source, and the value of a source that differs."""

    value: Any
    source: str
    differs: str = ""


Table = dict[str, Row]


def steps(samples: float, *, epochs: int, batch: int, source: str, differs: str = "") -> Row:
    return Row(round(epochs * samples / batch), source, differs)


NO_CLIPPING = Row(1e6, "here: as good as none, which the source does not mention")
HOW_OFTEN = Row(..., "here: how often, which changes no weights")

EGO4D: Table = {
    "num_frames": Row(4, "AVION, appendix B.1: 'randomly sample 4 frames'"),
    "size_px": Row(224, "AVION, appendix B.1: 'the input resolution is 224 x 224'"),
    "min_crop_area": Row(0.5, "AVION, appendix B.1: 'RandomResizedCrop (0.5, 1.0)'"),
    "lr": Row(3e-5, "AVION, appendix B.1: 'a fixed learning rate of 3e-5'"),
    "warmup_steps": Row(0, "AVION, appendix B.1: 'a fixed learning rate'; code: --fix-lr"),
    "weight_decay": Row(0.01, "AVION, appendix B.1"),
    "max_grad_norm": NO_CLIPPING,
    "checkpoint_every": HOW_OFTEN,
    "workers": HOW_OFTEN,
    "loss.kind": Row("infonce", "AVION, section 5.3, EK-100 MIR: 'replacing the InfoNCE loss'"),
    "loss.freeze_temperature": Row(True, "AVION, code: --freeze-temperature"),
    "optimizer.schedule": Row("fixed", "AVION, appendix B.1"),
    "optimizer.beta2": Row(0.999, "AVION, appendix B.1"),
    "optimizer.eps": Row(1e-8, "AVION, code: --eps"),
    "towers.embedding_width": Row(256, "AVION, appendix B.1: 'an output dimension of 256'"),
    "towers.activation_checkpointing": Row(True, "AVION, section 5.2: 'gradient checkpointing'"),
}
EGO4D_B: Table = {
    "model": Row("b16", "AVION, section 5.2: 'Vision Transformer Base'"),
    "batch": Row(256 * 8, "AVION, table 1, rows Ours: 256 on 8 A5000"),
}
EGO4D_L: Table = {
    "model": Row("l14", "AVION, code: model zoo, CLIP_VITL14"),
    "batch": Row(112 * 8, "AVION, appendix B.1: 'per-gpu batch size of 112 over 8 GPUs'"),
}
PLAIN = "AVION, table 1, original narratives: 4.0M; appendix B.1: '5 epochs'"
LLM = "AVION, table 1, original narratives: 4.0M spans; appendix B.1: 'the effective number of epochs is doubled to 10'"

EK100: Table = {
    "num_frames": Row(16, "AVION, appendix B.2 and B.3: '16 sampled frames'"),
    "size_px": Row(224, "AVION, appendix B.2 and B.3"),
    "min_crop_area": Row(0.5, "AVION, appendix B.2 and B.3: 'RandomResizedCrop (0.5, 1.0)'"),
    "max_grad_norm": NO_CLIPPING,
    "optimizer.start_lr": Row(
        1e-6, "AVION, appendix B.2 and B.3: 'starts from 1e-6'", "code of CLS: times batch / 128"
    ),
    "optimizer.end_lr": Row(1e-5, "AVION, appendix B.2 and B.3: 'decreases to 1e-5'", "code of CLS: times batch / 128"),
    "towers.drop_path": Row(0.1, "AVION, appendix B.2 and B.3: 'stochastic depth ratio of 0.1'", "code of MIR: 0.0"),
    "towers.drop_path_rule": Row("constant", "AVION, code: the same rate in all blocks"),
    "evaluate.every": HOW_OFTEN,
    "evaluate.max_samples": Row(10_000, "here: all of the 9,668 clips of the test split (AVION, section 5.1)"),
}
# There are 67,217 clips (AVION, section 5.1). In an epoch, each of 8 GPUs takes only complete batches (code:
# drop_last).
NUM_CLIPS, EPOCHS = 67_217, 100
EPOCH_B, EPOCH_L = NUM_CLIPS // (64 * 8), NUM_CLIPS // (24 * 8)
ONE_EPOCH = "AVION, appendix B.2 and B.3: 'a peak ... in the first epoch'"
EK100_B: Table = {
    "model": Row("b16", "AVION, tables 2 and 3, rows ViT-B"),
    "batch": Row(64 * 8, "AVION, appendix B.2 and B.3: 'batch size of 64 over 8 GPUs for ViT-B'"),
    "warmup_steps": Row(EPOCH_B, ONE_EPOCH, "code of CLS: 2 epochs"),
    "steps": Row(EPOCH_B * EPOCHS, "AVION, appendix B.3: 'for 100 epochs'; MIR: code, --epochs"),
}
EK100_L: Table = {
    "model": Row("l14", "AVION, tables 2 and 3, rows ViT-L"),
    "batch": Row(24 * 8, "AVION, appendix B.2 and B.3: '24 over 8 GPUs for ViT-L'"),
    "warmup_steps": Row(EPOCH_L, ONE_EPOCH, "code of CLS: 2 epochs"),
    "steps": Row(EPOCH_L * EPOCHS, "AVION, appendix B.3: 'for 100 epochs'; MIR: code, --epochs"),
    "towers.activation_checkpointing": Row(True, "AVION, code: --grad-checkpointing in all commands"),
}
MIR: Table = {
    "lr": Row(3e-5, "AVION, appendix B.2: 'a peak of 3e-5'"),
    "weight_decay": Row(0.01, "AVION, appendix B.2"),
    "checkpoint_every": HOW_OFTEN,
    "best": Row("test/average_mean_ap", "AVION, code: best by avg_map"),
    "workers": HOW_OFTEN,
    "captions.min_relevancy": Row(0.1, "AVION, code: clip_dataset.py, self.relevancy"),
    "loss.kind": Row("max-margin", "AVION, appendix B.2"),
    "loss.margin": Row(0.2, "AVION, appendix B.2: 'a margin value of 0.2'"),
    "optimizer.beta2": Row(0.999, "AVION, appendix B.2"),
    "optimizer.eps": Row(1e-8, "AVION, code: --eps"),
    "towers.embedding_width": Row(256, "AVION, appendix B.1"),
    "towers.activation_checkpointing": Row(True, "AVION, code: --grad-checkpointing in all commands"),
    "evaluate.split": Row("test", "AVION, section 5.1: 67,217/9,668 pairs in the training/testing split"),
    "evaluate.protocol": Row("mir", "AVION, section 5.1"),
}
CLS: Table = {
    "label": Row("action", "AVION, section 5.1: 'the action-level accuracy is emphasized'"),
    "weight_decay": Row(5e-4, "AVION, appendix B.3", "code: 4e-5"),
    "dropout": Row(0.5, "AVION, appendix B.3"),
    "label_smoothing": Row(0.1, "AVION, appendix B.3"),
    "mixup": Row(0.8, "AVION, appendix B.3"),
    "cutmix": Row(1.0, "AVION, code: --cutmix", "paper: not mentioned"),
    "optimizer.name": Row("sgd", "AVION, appendix B.3"),
    "optimizer.momentum": Row(0.9, "AVION, appendix B.3"),
    "augment.flip": Row(0.5, "AVION, appendix B.3: 'HorizontalFlip (0.5)'", "code: never reaches the decoder"),
}
FASTCLIP: Table = {
    "num_frames": Row(4, "here: images there"),
    "size_px": Row(224, "FastCLIP, code: ViT-B-32, ViT-B-16 and RN50 for pictures of 224 px"),
    "min_crop_area": Row(0.5, "here: AVION's, for clips"),
    "max_grad_norm": NO_CLIPPING,
    "checkpoint_every": HOW_OFTEN,
    "workers": HOW_OFTEN,
    "loss.kind": Row("fastclip-v3", "FastCLIP, section 5"),
    "loss.convention": Row("paper", "FastCLIP, procedure 5", "code: other gradients (docs/losses.md)"),
    "optimizer.name": Row("adamw", "FastCLIP, appendix B: 'Unless otherwise specified, ... we use AdamW'"),
    "optimizer.end_lr": Row(0.0, "FastCLIP, table 7, min_lr, all rows", "code of xlarge: 4e-5"),
}


def fastclip(size: str, table: Table) -> Table:
    """Return the table of a FastCLIP preset, with its rows by loss and by optimizer."""
    rows = {
        f"by.loss.kind.{name}.loss.{key}": value
        for name, loss in losses_of(size).items()
        for key, value in loss.items()
    }
    for name, optimizer in optimizers_of(size).items():
        rows |= {f"by.optimizer.name.{name}.{key}": value for key, value in optimizer.items()}
    result = {name: Row(value, "FastCLIP, tables 7 to 10, appendix B") for name, value in rows.items()}
    for choice, names in (("loss.kind", ALGORITHMS[size]), ("optimizer.name", TABLE_10[size])):
        for name in names:
            result[f"by.{choice}.{name}.source"] = Row(..., f"FastCLIP: the row of {name}")
    return FASTCLIP | table | result


VIDEOMAE: Table = {
    "model": Row("b16", "AVION, section 5.5: 'a standard ViT-Base model'"),
    "num_frames": Row(16, "AVION, section 5.5: '16 frames with a sample stride of 4'"),
    "sampling": Row("stride", "AVION, section 5.5"),
    "stride": Row(4, "AVION, section 5.5: 'a sample stride of 4'"),
    "size_px": Row(224, "AVION, section 5.5: 8 x 14 x 14 cubes of 2 x 16 x 16"),
    "max_grad_norm": NO_CLIPPING,
    "weight_decay": Row(0.05, "VideoMAE, finetune.sh; AVION, code: main_videomae_pretrain.py, --wd"),
}
MAE_TRAINING: Table = {
    "mask_ratio": Row(0.9, "AVION, section 5.5: 'visible tokens at the encoder side is only 10%'"),
    "decoder_depth": Row(4, "AVION, section 5.5: '4 additional Transformer Encoder layers'"),
    "steps": steps(241_258, epochs=800, batch=2048, source="AVION, section 5.5: 241,258 videos; table 5: 800 epochs"),
    "batch": Row(32 * 64, "VideoMAE, pretrain.sh: 32 on 64 GPUs"),
    "lr": Row(1.5e-4, "AVION, code: main_videomae_pretrain.py, --lr"),
    "warmup_steps": steps(241_258, epochs=40, batch=2048, source="VideoMAE, pretrain.sh: 40 epochs"),
    "checkpoint_every": HOW_OFTEN,
    "optimizer.beta2": Row(0.95, "VideoMAE, pretrain.sh"),
    "optimizer.end_lr": Row(1e-5, "AVION, code: main_videomae_pretrain.py, --lr-end"),
    "optimizer.lr_batch": Row(256, "VideoMAE, FINETUNE.md: 'actual lr = lr * total batch size / 256'"),
}

FASTCLIP_MEDIUM: Table = {
    "steps": steps(2.7e6, epochs=37, batch=1024, source="FastCLIP, table 2, row Medium: 2.7M/37 epochs"),
    "batch": Row(1024, "FastCLIP, table 2, row Medium: 128 (1024)"),
    "warmup_steps": Row(10_000, "FastCLIP, table 7, row Medium"),
    "loss.epsilon": Row(1e-14, "FastCLIP, section 5, experiment settings"),
    "optimizer.lr_batch": Row(1024, "FastCLIP, appendix B: 'linearly in proportion to global batch size'"),
}

PRESETS: dict[str, Table] = {
    "b16-ego4d": EGO4D | EGO4D_B | {"steps": steps(4.0e6, epochs=5, batch=256 * 8, source=PLAIN)},
    "b16-ego4d-llm": EGO4D | EGO4D_B | {"steps": steps(4.0e6, epochs=10, batch=256 * 8, source=LLM)},
    "l14-ego4d": EGO4D | EGO4D_L | {"steps": steps(4.0e6, epochs=5, batch=112 * 8, source=PLAIN)},
    "l14-ego4d-llm": EGO4D | EGO4D_L | {"steps": steps(4.0e6, epochs=10, batch=112 * 8, source=LLM)},
    "b16-ek100-mir": EK100 | EK100_B | MIR,
    "l14-ek100-mir": EK100 | EK100_L | MIR,
    "b16-ek100-cls": EK100 | EK100_B | CLS | {"lr": Row(0.012, "AVION, appendix B.3: 'a peak of 0.012'")},
    "l14-ek100-cls": EK100
    | EK100_L
    | CLS
    | {
        "lr": Row(3e-3 * 24 * 8 / 128, "AVION, code: --lr 3e-3 x batch / 128", "paper: 0.012, of 512 clips in the code")
    },
    "fastclip-medium": fastclip(
        "medium",
        {
            **FASTCLIP_MEDIUM,
            "model": Row("s16", "here: a tower for clips", "FastCLIP, table 2, row Medium: ResNet50"),
        },
    ),
    "fastclip-medium-images": fastclip(
        "medium",
        {
            **FASTCLIP_MEDIUM,
            "towers.image": Row("open_clip:RN50", "FastCLIP, table 2, row Medium: ResNet50; code: --model RN50"),
            "towers.text": Row("open_clip:RN50", "FastCLIP, code: --model RN50"),
            "num_frames": Row(1, "FastCLIP: images"),
        },
    ),
    "fastclip-large": fastclip(
        "large",
        {
            "model": Row("b32", "FastCLIP, table 2, row Large: ViT-B/32"),
            "steps": steps(9.1e6, epochs=33, batch=2048, source="FastCLIP, table 2, row Large: 9.1M/33 epochs"),
            "batch": Row(2048, "FastCLIP, table 2, row Large: 256 (2048)"),
            "warmup_steps": Row(10_000, "FastCLIP, table 7, row Large"),
            "loss.epsilon": Row(1e-14, "FastCLIP, section 5, experiment settings"),
            "optimizer.lr_batch": Row(2048, "FastCLIP, appendix B: 'linearly in proportion to global batch size'"),
        },
    ),
    "fastclip-xlarge": fastclip(
        "xlarge",
        {
            "model": Row("b16", "FastCLIP, table 2, row xLarge: ViT-B/16"),
            "steps": steps(
                315e6, epochs=42, batch=5120, source="FastCLIP, table 2, row xLarge", differs="code: 30 epochs"
            ),
            "batch": Row(5120, "FastCLIP, table 2, row xLarge: 640 (5120)"),
            "warmup_steps": Row(13_000, "FastCLIP, table 7, row xLarge: 13k", "code: 13200"),
            "loss.epsilon": Row(1e-6, "FastCLIP, section 5, experiment settings, and appendix D"),
        },
    ),
    "mae-b16-k400": VIDEOMAE
    | MAE_TRAINING
    | {"crop": Row("multi-scale", "AVION, code: transforms.py, GroupMultiScaleCrop"), "workers": HOW_OFTEN},
    "mae-latents": MAE_TRAINING
    | {
        "model": VIDEOMAE["model"],
        "input": Row("latents", "here: no document trains on latents"),
        "segment": Row("5s", "here: VideoDataLoader, section 1: '5-second segments'"),
        "num_frames": Row(20, "here: VideoDataLoader, section 1: '4 FPS (20 frames per segment)'"),
        "weight_decay": VIDEOMAE["weight_decay"],
        "max_grad_norm": NO_CLIPPING,
    },
    "k400-videomae": VIDEOMAE
    | {
        "label": Row("class", "VideoMAE: Kinetics-400"),
        "crop": Row("random", "VideoMAE, code: RandomResizedCrop"),
        "min_crop_area": Row(0.08, "VideoMAE, code: scale (0.08, 1.0)"),
        "repeats": Row(
            2, "VideoMAE: repeated augmentation", "finetune.sh: --num_sample 1 (800 epochs), 2 (1600 epochs)"
        ),
        "steps": Row(469 * 100, "VideoMAE, finetune.sh: 100 epochs of 240k / 512 clips"),
        "batch": Row(512 * 2, "VideoMAE, finetune.sh: 8 on 64 GPUs, each twice"),
        "lr": Row(1e-3, "VideoMAE, finetune.sh", "of 1600 epochs: 5e-4, for 75 epochs"),
        "warmup_steps": Row(469 * 5, "AVION, code: main_videomae_finetune.py, --warmup-epochs 5"),
        "label_smoothing": Row(0.1, "AVION, code: main_videomae_finetune.py"),
        "mixup": Row(0.8, "AVION, code: main_videomae_finetune.py"),
        "cutmix": Row(1.0, "AVION, code: main_videomae_finetune.py"),
        "optimizer.beta2": Row(0.999, "VideoMAE, finetune.sh"),
        "optimizer.end_lr": Row(1e-6, "AVION, code: main_videomae_finetune.py, --lr-end"),
        "optimizer.lr_batch": Row(256 * 2, "VideoMAE, code: lr x batch / 256, each clip twice"),
        "optimizer.layer_decay": Row(0.75, "AVION, code: main_videomae_finetune.py"),
        "towers.kind": Row("videomae", "VideoMAE"),
        "towers.drop_path": Row(0.1, "AVION, code: main_videomae_finetune.py"),
        "augment.flip": Row(0.5, "VideoMAE, code: flip with probability 1/2"),
        "augment.rand_ops": Row(4, "VideoMAE, code: rand-m7-n4-mstd0.5-inc1"),
        "augment.rand_magnitude": Row(7, "VideoMAE, code: rand-m7-n4-mstd0.5-inc1"),
        "augment.rand_std": Row(0.5, "VideoMAE, code: rand-m7-n4-mstd0.5-inc1"),
        "augment.erase": Row(0.25, "AVION, code: main_videomae_finetune.py, --reprob"),
        "evaluate.every": HOW_OFTEN,
        "evaluate.max_samples": Row(10_000, "here: a half of the 20,000 clips, in the loop"),
    },
    "vatex-timesformer-gpt2": {
        "model": Row("b16", "SpaceTimeGPT, encoder, default depth and patches: 12 layers, 768, 16x16"),
        "num_frames": Row(8, "SpaceTimeGPT, encoder: '8 frames of 224x224'; run name: nf8"),
        "size_px": Row(224, "SpaceTimeGPT, encoder"),
        "crop": Row("centre", "SpaceTimeGPT, code: the image processor of videomae-base"),
        "captions_per_visit": Row(1, "SpaceTimeGPT, code: a pair of clip and caption is a sample"),
        "decoder.name": Row("gpt2", "SpaceTimeGPT, decoder: openai-community/gpt2"),
        "decoder.max_tokens": Row(64, "here: no caption of VATEX is longer", "SpaceTimeGPT, decoder: 1024 positions"),
        "decoding.method": Row("beam", "SpaceTimeGPT, code: README, 'beam search with 8 beams'"),
        "decoding.num_beams": Row(8, "SpaceTimeGPT, code: README, 'beam search with 8 beams'"),
        "decoding.max_tokens": Row(40, "here: captions end earlier", "code: 60 at most, 30 at least"),
        "steps": Row(25_991 * 10 // 16 * 100, "SpaceTimeGPT, dataset: 10 captions a video; code: EPOCHS = 100"),
        "batch": Row(16, "SpaceTimeGPT, W&B configuration: run name, bs16", "code: 6"),
        "lr": Row(5e-7, "SpaceTimeGPT, W&B configuration: run name, lr5e-07"),
        "warmup_steps": Row(0, "SpaceTimeGPT, code: num_warmup_steps=0", "training loop: 'with warmup', of no length"),
        "weight_decay": Row(0.01, "SpaceTimeGPT, code: AdamW of torch"),
        "max_grad_norm": Row(1.0, "here: the mean over tokens has larger gradients", "code: no clipping"),
        "optimizer.beta2": Row(0.999, "SpaceTimeGPT, code: AdamW of torch"),
        "optimizer.schedule": Row("linear", "SpaceTimeGPT, training loop, 5: 'A linear learning rate scheduler'"),
        "seed": Row(42, "SpaceTimeGPT, W&B configuration: run name, rs42"),
        "precision": Row("fp16", "SpaceTimeGPT, tech stack: 'FP16 mixed-precision training'"),
        "checkpoint_every": Row("1ep", "SpaceTimeGPT, training loop: 'Checkpoints are saved at every epoch'"),
        "evaluate.every": Row("1ep", "SpaceTimeGPT, evaluation: 'logged to W&B at the end of each epoch'"),
    },
}


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a preset by flag name."""
    values_found: dict[str, Any] = {}
    for name, value in values.items():
        values_found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values_found


def is_same(value: Any, expected: Any) -> bool:
    """Return True if two values are equal; computed numbers may be rounded."""
    return isclose(value, expected, rel_tol=1e-12) if isinstance(expected, float) else bool(value == expected)


def published_presets() -> set[str]:
    return {path.stem for path in PRESETS_FOLDER.glob("*.yaml") if not path.stem.startswith("tiny")}


def test_every_published_preset_has_a_table() -> None:
    assert set(PRESETS) == published_presets()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_has_the_values_of_its_documents_and_no_others(preset: str) -> None:
    table = PRESETS[preset]
    values = leaves(yaml.safe_load((PRESETS_FOLDER / f"{preset}.yaml").read_text())) | published_rows(preset)
    assert sorted(set(values) - set(table)) == [], "values of the preset without a source"
    assert sorted(set(table) - set(values)) == [], "values of the documents that are missing in the preset"
    rows = {name: row for name, row in table.items() if row.value is not ...}
    assert {name: (values[name], row) for name, row in rows.items() if not is_same(values[name], row.value)} == {}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_source_is_named_and_the_header_says_where_sources_differ(preset: str) -> None:
    header = (PRESETS_FOLDER / f"{preset}.yaml").read_text().partition("\nmodel:")[0]
    for name, row in PRESETS[preset].items():
        assert row.source.startswith(DOCUMENTS), name
    if any(row.differs for row in PRESETS[preset].values()):
        assert "code" in header

"""Clips in training loops of Lightning and Accelerate, with a checkpoint in the middle of an epoch."""

from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from clipmill import Batches, open_clips


def open_batches(data_dir: Path, **changes: Any) -> Batches:
    return open_clips(data_dir, **{"batch": 2, "num_frames": 2, "size_px": 32, "workers": 1, **changes})


class Clips(pl.LightningDataModule):
    """Data module from docs/python.md."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__()
        self._data_dir = data_dir

    def setup(self, stage: str) -> None:
        self.clips = open_batches(self._data_dir)
        self.held_out = open_batches(self._data_dir, split="val", shuffle=False)

    def train_dataloader(self) -> Batches:
        return self.clips

    def val_dataloader(self) -> Batches:
        return self.held_out

    def state_dict(self) -> dict[str, Any]:
        return self.clips.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clips.load_state_dict(state)


class Brightness(pl.LightningModule):
    """Model that predicts the brightness of a clip from one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.line = nn.Linear(1, 1)
        nn.init.constant_(self.line.weight, 0.5)
        nn.init.zeros_(self.line.bias)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        video = batch["video"].float() / 255
        return (self.line(video[:, 0, 0, 0, :1])[:, 0] - video.mean((1, 2, 3, 4))).square().mean()

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        self.seen.append(batch["position"].tolist())
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch["video"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data_dir: Path, folder: Path, *, resumes: Path | None = None, **changes: Any) -> Brightness:
    settings = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    settings |= {"enable_model_summary": False, "default_root_dir": folder}
    model = Brightness()
    pl.Trainer(**{**settings, **changes}).fit(model, datamodule=Clips(data_dir), ckpt_path=resumes, weights_only=False)
    return model


def test_lightning_trains_and_resumes_to_the_same_weights(data_dir: Path, tmp_path: Path) -> None:
    # Step 6 is in the middle of the second epoch of four batches, and step 8 is at its end.
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    whole = fit(data_dir, tmp_path, callbacks=[saving])
    assert whole.seen == [[2 * step, 2 * step + 1] for step in range(12)]
    for step in (6, 8):
        rest = fit(data_dir, tmp_path, resumes=tmp_path / f"step={step}.ckpt", enable_checkpointing=False)
        assert rest.seen == whole.seen[step:]
        for name, value in whole.state_dict().items():
            assert torch.equal(value, rest.state_dict()[name])


def test_accelerate_prepares_a_model_and_leaves_batches_as_they_are(data_dir: Path, tmp_path: Path) -> None:
    def opened_for(accelerator: Any) -> Batches:
        return open_batches(
            data_dir,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            device=accelerator.device,
        )

    accelerator = accelerate.Accelerator(cpu=True)
    clips = opened_for(accelerator)
    model, optimizer, prepared = accelerator.prepare(
        line := nn.Linear(1, 1), torch.optim.SGD(line.parameters(), lr=0.1), clips
    )
    assert prepared is clips
    accelerator.register_for_checkpointing(clips)
    seen: list[int] = []
    saved_after = 2
    for epoch in range(2):
        for batch in clips:
            video = batch["video"].float() / 255
            loss = (model(video[:, 0, 0, 0, :1])[:, 0] - video.mean((1, 2, 3, 4))).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += batch["position"].tolist()
            if len(seen) == 2 * saved_after and not epoch:
                accelerator.save_state(tmp_path / "saved")
    assert seen == list(range(16))
    clips.close()

    again = opened_for(accelerator)
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(tmp_path / "saved")
    assert [number for batch in again for number in batch["position"].tolist()] == seen[4:8]
    again.close()

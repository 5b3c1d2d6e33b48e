"""Embeddings of every clip and caption of a split, for evaluations that compare them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.batch import Batch, to_device
from train.data.failures import FailedSample
from train.data.filling import LoadedBatch
from train.models.dual_encoder import DualEncoder
from train.tasks.dual_encoder import DualEncoderTask

_NONE: NDArray[np.float32] = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Embeddings:
    """One row for each sample that could be had, in order.

    Attributes:
        video: float32 [N, E], unit length.
        text: float32 [N, E], unit length.
        text_input: [N, X], the tokens, or the stored embeddings, that the text embeddings are made of.
        samples: int64 [N], numbers of the samples.
    """

    video: NDArray[np.float32]
    text: NDArray[np.float32]
    text_input: NDArray[np.generic]
    samples: NDArray[np.int64]
    failed: tuple[FailedSample, ...]


@torch.inference_mode()
def embed_all(
    task: DualEncoderTask, model: DualEncoder, batches: Iterator[LoadedBatch], *, device: torch.device
) -> Embeddings:
    """Runs the model over all batches."""
    model.eval()
    video, text, text_input, samples = [], [], [], []
    failed: list[FailedSample] = []
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch: Batch = to_device(loaded.batch, device)
        clips, captions = task.inputs(batch, is_training=False)
        video_BE, text_BE = model(clips, captions)
        video.append(video_BE.float().cpu().numpy())
        text.append(text_BE.float().cpu().numpy())
        # Copied: the buffers of a batch are used again for a later one.
        text_input.append(captions.cpu().clone().numpy())
        samples.append(batch["position"].cpu().clone().numpy())
    if not video:
        return Embeddings(_NONE, _NONE, _NONE, np.empty(0, np.int64), tuple(failed))
    return Embeddings(
        np.concatenate(video), np.concatenate(text), np.concatenate(text_input), np.concatenate(samples), tuple(failed)
    )

"""What a captioner says of clips, and how likely it thinks what people said.

Shape suffixes: B batch, K captions of a clip, L tokens.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from manifests.errors import FailedWork, UserError
from train.data.batch import Batch, to_device
from train.data.outcomes import FailedSample, LoadedBatch
from train.tasks.caption.decoding import write_captions
from train.tasks.caption.metrics.scores import score_captions, without_words
from train.tasks.caption.objective import shifted, summed_loss, without_padding
from train.tasks.caption.settings import DecodingSettings
from train.tasks.caption.tokenizer import NO_TOKEN, CaptionTokenizer


@dataclass
class Said:
    """Of this rank's clips.

    Attributes:
        captions: by the number of the clip.
        summed_loss: cross-entropy of the first captions of each clip, summed over `num_tokens` tokens.
    """

    captions: dict[int, str] = field(default_factory=dict)
    summed_loss: float = 0.0
    num_tokens: int = 0
    failed: list[FailedSample] = field(default_factory=list)


@torch.no_grad()  # not inference_mode: what a model keeps of a pass must serve training too
def captions_of(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch], torch.Tensor],
    tokenizer: CaptionTokenizer,
    decoding: DecodingSettings,
    device: torch.device,
) -> Said:
    """Has a captioner, which is in evaluation mode, say one caption of each clip.

    Args:
        inputs: clips [B, C, T, H, W] of a batch.
        decoding: how captions are found.
    """
    said = Said()
    for loaded in batches:
        said.failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        clips_BCTHW = inputs(batch)
        targets_BKL = without_padding(batch["targets"])
        logits = model(clips_BCTHW, shifted(targets_BKL, end_id=tokenizer.end_id))
        said.summed_loss += summed_loss(logits, targets_BKL).item()
        said.num_tokens += int((targets_BKL != NO_TOKEN).sum())
        numbers = batch["clip_id"].tolist()
        written = write_captions(model, clips_BCTHW, decoding, end_id=tokenizer.end_id, samples=numbers)  # type: ignore[arg-type]
        texts = (tokenizer.text(row) for row in written.tokens_VL.tolist())
        said.captions |= dict(zip(numbers, texts, strict=True))
    return said


def loss_of(parts: Sequence[Said]) -> float:
    """Cross-entropy of a token, mean over those of all parts.

    Raises:
        FailedWork: nothing could be decoded, or predictions are no numbers.
    """
    num_tokens = sum(part.num_tokens for part in parts)
    if not num_tokens:
        raise FailedWork(f"none of the {sum(len(part.failed) for part in parts)} clips could be decoded")
    loss = sum(part.summed_loss for part in parts) / num_tokens
    if not math.isfinite(loss):
        raise FailedWork("predictions are not finite: the weights have diverged")
    return loss


def numbers_of(parts: Sequence[Said], *, references: Callable[[int], Sequence[str]]) -> dict[str, float]:
    """What all ranks' captions are worth: loss, metrics without Java, exact matches; how many clips failed, how many
    captions are empty, and how many clips are left out because no reference has words.

    Args:
        references: all captions of a clip.

    Raises:
        FailedWork: as `loss_of`.
        UserError: no clip has references with words.
    """
    loss = loss_of(parts)
    captions = {str(number): text for part in parts for number, text in part.captions.items()}
    captions, its_references, left_out = comparable(captions, {one: references(int(one)) for one in captions})
    scores = score_captions(captions, its_references, with_java=False)
    counts = {
        "num_failed": sum(len(part.failed) for part in parts),
        "num_empty": len(scores.empty),
        "num_without_words": len(left_out),
    }
    return {"loss": loss, **scores.means, **{name: float(count) for name, count in counts.items() if count}}


def comparable(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], dict[str, Sequence[str]], list[str]]:
    """Captions and references of the clips that can be scored, and the clips whose references have no words.

    Raises:
        UserError: no clip has references with words.
    """
    left_out = without_words(references)
    kept = {one: its for one, its in references.items() if one not in set(left_out)}
    if left_out and not kept:
        raise UserError(
            f"clips whose references have words: 0 of {len(left_out)}; there is nothing to compare captions with",
            hint="check the captions of this split: they are empty or punctuation alone",
        )
    return {one: captions[one] for one in kept}, kept, left_out

"""Generate captions of the clips of a split, and compute loss and metrics in the training loop.

Shape suffixes: B batch, K captions of a clip, L tokens.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.metrics.scores import score_captions, without_words
from clipmill.train.tasks.caption.objective import shift_targets, summed_loss, without_padding
from clipmill.train.tasks.caption.settings import METRIC_LABELS, DecodingSettings
from clipmill.train.tasks.caption.tokenizer import NO_TOKEN, CaptionTokenizer


@dataclass
class GeneratedCaptions:
    """Captions of this rank's clips.

    Attributes:
        captions: by the index of the clip.
        summed_loss: cross-entropy of the first reference captions of each clip, summed over `num_tokens` tokens.
        batch_losses: its mean over the tokens of each batch.
    """

    captions: dict[int, str] = field(default_factory=dict)
    summed_loss: float = 0.0
    num_tokens: int = 0
    batch_losses: list[float] = field(default_factory=list)
    failed: list[FailedSample] = field(default_factory=list)


@torch.no_grad()  # not inference_mode: tensors that a model caches are used in training too
def captions_of(
    model: nn.Module,
    batches: Iterable[LoadedBatch],
    *,
    inputs: Callable[[Batch], torch.Tensor],
    tokenizer: CaptionTokenizer,
    decoding: DecodingSettings,
    device: torch.device,
) -> GeneratedCaptions:
    """Generate one caption per clip with a captioner in evaluation mode.

    Args:
        inputs: from a batch to clips [B, C, T, H, W].
    """
    found = GeneratedCaptions()
    for loaded in batches:
        found.failed += loaded.failed
        if not loaded.batch:
            continue
        batch = to_device(loaded.batch, device)
        clips_BCTHW = inputs(batch)
        targets_BKL = without_padding(batch["targets"])
        logits = model(clips_BCTHW, shift_targets(targets_BKL, end_id=tokenizer.end_id))
        loss, num_tokens = summed_loss(logits, targets_BKL).item(), int((targets_BKL != NO_TOKEN).sum())
        found.summed_loss, found.num_tokens = found.summed_loss + loss, found.num_tokens + num_tokens
        found.batch_losses += [loss / num_tokens] if num_tokens else []
        indices = batch["clip_id"].tolist()
        generated = generate_captions(model, clips_BCTHW, decoding, end_id=tokenizer.end_id, samples=indices)  # type: ignore[arg-type]
        texts = (tokenizer.text(row) for row in generated.tokens_VL.tolist())
        found.captions |= dict(zip(indices, texts, strict=True))
    return found


def loss_of(parts: Sequence[GeneratedCaptions]) -> float:
    """Mean cross-entropy per token over all parts.

    Raises:
        FailedWork: nothing could be decoded, or predictions are not finite.
    """
    num_tokens = sum(part.num_tokens for part in parts)
    if not num_tokens:
        raise FailedWork(f"none of {count_noun(sum(len(part.failed) for part in parts), 'clip')} could be decoded")
    loss = sum(part.summed_loss for part in parts) / num_tokens
    if not math.isfinite(loss):
        raise FailedWork("predictions are not finite: the weights have diverged")
    return loss


def metrics_of(
    parts: Sequence[GeneratedCaptions],
    *,
    references: Callable[[int], Sequence[str]],
    with_java: bool = False,
    spice_jars: Path | None = None,
) -> dict[str, float]:
    """Metrics of the captions of all ranks: loss, metrics of n-grams, exact matches, and those of Java's programs.

    The numbers of failed clips, of empty captions and of clips whose references have no words are added if they are
    not 0.

    Args:
        references: all captions of a clip, by its index.
        with_java, spice_jars: see `score_captions`.

    Raises:
        FailedWork: see `loss_of`; or a program of Java failed.
        UserError: no clip has references with words.
    """
    loss = loss_of(parts)
    captions = {str(number): text for part in parts for number, text in part.captions.items()}
    captions, its_references, left_out = comparable_captions(captions, {one: references(int(one)) for one in captions})
    scores = score_captions(captions, its_references, with_java=with_java, spice_jars=spice_jars)
    if with_java and (missing := scores.absent.keys() - ({"spice"} if spice_jars is None else set())):
        raise FailedWork(f"no {METRIC_LABELS[min(missing)]}: {scores.absent[min(missing)]}")
    counts = {
        "num_failed": sum(len(part.failed) for part in parts),
        "num_empty": len(scores.empty),
        "num_without_words": len(left_out),
    }
    return {"loss": loss, **scores.means, **{name: float(count) for name, count in counts.items() if count}}


def comparable_captions(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], dict[str, Sequence[str]], list[str]]:
    """Captions and references of clips that can be scored, and names of clips whose references have no words.

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

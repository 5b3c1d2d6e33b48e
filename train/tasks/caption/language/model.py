"""A captioner of a video tower and a causal language model of transformers, which reads the video as a prefix.

As in LLaVA (Liu et al. 2023, section 4.1): the tower's tokens, reduced to a number, are projected to the width of the
language model by an MLP, and stand in the prompt where words would be:

    [prompt before the video] [visual tokens] [prompt after it] [caption] [end]

The language model is the library's module as it is. All rows of a batch have the same prefix, and captions are padded
behind their ends, where a causal model never looks: no attention mask is needed, and positions count from 0.

Shape suffixes: V videos, R rows of text (V * n, grouped by video), N tokens of a video, P tokens of the prefix, L
tokens of a caption, E width of the tower, D width of the language model, W words of the vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d

from clipmill.manifests.errors import UserError
from clipmill.train.config.tuning import Lora
from clipmill.train.models.captioner import tower_of
from clipmill.train.models.transformer import LayerNorm, peft_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STD = 0.02
# Tokens with which a model is tried, and the largest error of its logits in float32, relative to the largest logit.
_PROBE, _PROBE_ERROR = 4, 1e-4


class VisualProjector(nn.Module):
    """Reduces a tower's tokens [V, N, E] to visual tokens [V, num_tokens, D].

    Args:
        tower_width, width: E, D.
        num_heads: of learned queries that attend to all tokens (as CoCa's pooler, Yu et al. 2022); None for means of
            consecutive tokens.
    """

    def __init__(self, tower_width: int, width: int, *, num_tokens: int, num_heads: int | None) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.attention: nn.MultiheadAttention | None = None
        if num_heads is not None:
            self.query_embedding = nn.Parameter(_STD * torch.randn(num_tokens, tower_width))
            self.ln_video = LayerNorm(tower_width)
            self.attention = nn.MultiheadAttention(tower_width, num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(tower_width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, video_VNE: Tensor) -> Tensor:
        """The visual tokens."""
        if self.attention is None:
            reduced = adaptive_avg_pool1d(video_VNE.transpose(1, 2), self.num_tokens).transpose(1, 2)
        else:
            queries, video_VNE = self.query_embedding.expand(len(video_VNE), -1, -1), self.ln_video(video_VNE)
            reduced, _ = self.attention(queries, video_VNE, video_VNE, need_weights=False)
        visual: Tensor = self.mlp(reduced)
        return visual


def prefix_of(model: nn.Module, video_VCTHW: Tensor, before_bD: Tensor, after_aD: Tensor) -> Tensor:
    """What a language model reads before a caption of each clip, [V, P, D].

    Args:
        model: has `video` and `projection` of a captioner.
        before_bD, after_aD: embeddings of the prompt around the visual tokens.
    """
    visual_VnD: Tensor = model.projection(tower_of(model).tokens(video_VCTHW))  # type: ignore[operator]
    before, after = (one.expand(len(visual_VnD), -1, -1) for one in (before_bD, after_aD))
    # In bf16 or fp16, projections are rounded by autocast, and embeddings are not.
    return torch.cat([before, visual_VnD.to(before.dtype), after], dim=1)


@dataclass
class PrefixCache:
    """Keys and values of texts that are being generated, and the logits of their first tokens until they are read."""

    keys_values: Any
    first_RW: Tensor | None

    def keep(self, rows_r: Tensor, videos_v: Tensor | None = None) -> None:
        """Reorder or drop rows; see `clipmill.train.tasks.caption.decoding.Cache`."""
        self.keys_values.reorder_cache(rows_r)


class LanguageCaptioner(nn.Module):
    """Predicts the next tokens of captions of clips; `Captioner` with another decoder.

    Args:
        decoder: a causal language model of transformers.
        before, after: token ids of the prompt around the visual tokens.
    """

    prompt_before: Tensor
    prompt_after: Tensor

    def __init__(
        self,
        video: nn.Module,
        projection: VisualProjector,
        decoder: "PreTrainedModel",
        *,
        before: Sequence[int],
        after: Sequence[int],
    ) -> None:
        super().__init__()
        self.video, self.projection, self.decoder = video, projection, decoder
        self._can_skip_logits = "logits_to_keep" in inspect.signature(decoder.forward).parameters
        for name, ids in (("before", before), ("after", after)):
            self.register_buffer(f"prompt_{name}", torch.tensor(ids, dtype=torch.int64), persistent=False)

    def forward(self, video_VCTHW: Tensor, tokens: Tensor) -> Tensor:
        """Logits [R, L, W] of the token after each of `tokens`, int64 [V, L] or [V, n, L] for n captions per video.

        The first token of a row stands for the whole prefix.
        """
        tokens_RL = tokens.flatten(0, -2)
        prefix_VPD = self.encode(video_VCTHW)
        prefix_RPD = prefix_VPD.repeat_interleave(len(tokens_RL) // len(prefix_VPD), 0)
        embedded = torch.cat([prefix_RPD, self._embed(tokens_RL[:, 1:])], dim=1)
        # Without a cache, the library looks for packed texts in the positions, for which the host waits for the device.
        return self._run(tokens_RL.shape[1], inputs_embeds=embedded, use_cache=True).logits

    def encode(self, video_VCTHW: Tensor) -> Tensor:
        """The prefix of a caption of each clip, [V, P, D]."""
        return prefix_of(self, video_VCTHW, *self.prompt())

    def prompt(self) -> tuple[Tensor, Tensor]:
        """Embeddings of the prompt before the visual tokens and after them, [b, D] and [a, D]."""
        return self._embed(self.prompt_before), self._embed(self.prompt_after)

    def start(self, video_VCTHW: Tensor, *, num_tokens: int, rows_per_video: int = 1) -> PrefixCache:
        """Encode clips, and read the prefix once per clip; see `clipmill.train.tasks.caption.decoding.Generator`."""
        found = self._run(1, inputs_embeds=self.encode(video_VCTHW), use_cache=True)
        rows_R = torch.arange(len(video_VCTHW), device=video_VCTHW.device).repeat_interleave(rows_per_video)
        cache = PrefixCache(found.past_key_values, found.logits[:, -1][rows_R])
        if rows_per_video > 1:
            cache.keep(rows_R)
        return cache

    def step(self, tokens_RL: Tensor, cache: PrefixCache) -> Tensor:
        """Logits [R, W] of the next tokens; the first token of the first step stands for the whole prefix."""
        if cache.first_RW is not None:
            logits_RW, cache.first_RW = cache.first_RW, None
            if tokens_RL.shape[1] == 1:
                return logits_RW
            tokens_RL = tokens_RL[:, 1:]
        found = self._run(1, input_ids=tokens_RL, past_key_values=cache.keys_values, use_cache=True)
        return found.logits[:, -1]  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.get_input_embeddings()(tokens)
        return embedded

    def _run(self, num_logits: int, **given: Any) -> Any:
        """What the language model returns, with the logits of the last tokens."""
        if self._can_skip_logits:
            return self.decoder(**given, logits_to_keep=num_logits)
        found = self.decoder(**given)
        found.logits = found.logits[:, -num_logits:]
        return found


@torch.no_grad()
def decodes(decoder: "PreTrainedModel") -> bool:
    """Whether tokens that a language model reads one by one, with its cache, give what they give all at once.

    Encoders fail because a token depends on later ones there, and state-space models because they have no keys and
    values. Rows of the cache are exchanged, as beams are.
    """
    was_training, decoder = decoder.training, decoder.eval()
    ids_RL = torch.arange(2 * _PROBE).reshape(2, _PROBE) % decoder.get_input_embeddings().num_embeddings
    embedded_RLD = decoder.get_input_embeddings()(ids_RL)
    try:
        all_RLW = decoder(inputs_embeds=embedded_RLD, use_cache=False).logits
        start = decoder(inputs_embeds=embedded_RLD[:, :-1], use_cache=True)
        cache = PrefixCache(start.past_key_values, None)
        cache.keep(torch.tensor([1, 0]))
        last = decoder(input_ids=ids_RL.flip(0)[:, -1:], past_key_values=cache.keys_values, use_cache=True)
    except (AttributeError, KeyError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        decoder.train(was_training)
    read_RLW = torch.cat([start.logits, last.logits[:, -1:].flip(0)], dim=1)
    return bool((read_RLW - all_RLW).abs().max() <= _PROBE_ERROR * all_RLW.abs().max())


def language_blocks(decoder: nn.Module) -> list[nn.Module]:
    """The blocks of a language model of transformers, which the library does not split over devices."""
    names = set(getattr(decoder, "_no_split_modules", None) or ())
    return [module for module in decoder.modules() if type(module).__name__ in names]


def checkpoint_language_blocks(decoder: "PreTrainedModel") -> None:
    """Enable activation checkpointing in the blocks of a language model.

    Raises:
        UserError: the library has none for it.
    """
    # The second is its name in older versions of transformers.
    enable = getattr(decoder, "activation_checkpointing_enable", None) or decoder.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(
            f"--towers.activation-checkpointing: {error}",
            hint="leave it out, or use a smaller --microbatch",
            flags=("--towers.activation-checkpointing",),
        ) from error


def add_language_adapters(decoder: "PreTrainedModel", lora: Lora) -> None:
    """Add peft's LoRA to the linear layers of a language model's blocks, and freeze everything else.

    Raises:
        UserError: as `peft_config`.
    """
    from transformers.pytorch_utils import Conv1D

    blocks = language_blocks(decoder)
    decoder.add_adapter(peft_config(decoder, lora, blocks=blocks, transposed=(Conv1D,), task_type="CAUSAL_LM"))

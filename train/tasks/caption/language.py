"""Captioner whose causal language model reads the video as a prefix.

As in LLaVA (Liu et al. 2023, section 4.1), the tokens of the video tower are reduced to a fixed number, projected to
the width of the language model by an MLP, and inserted into the prompt:

    [prompt before the video] [visual tokens] [prompt after the video] [caption] [end]

The language model is an unmodified module from transformers. The prefix has the same length in all rows of a batch, and
captions are padded at the end. A causal model does not attend to later tokens, so no attention mask is needed, and
positions count from 0.

A run stores the configuration and the tokenizer in RUN/language_model, in the format of transformers. Therefore the
checkpoints, which contain the weights, can be used without the folder of `--decoder.lm`.

Shape suffixes: V videos, R rows of text (grouped by video), N tokens of the tower per video, n visual tokens per video,
P tokens of the prefix, b and a prompt tokens before and after the visual tokens, L tokens per caption, E width of the
tower, D width of the language model, W size of the vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d

from clipmill.manifests.errors import UserError, first_line
from clipmill.train.config.model import Lora
from clipmill.train.models.captioner import tower_of
from clipmill.train.models.transformer import LayerNorm, peft_config
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.caption.spec import VIDEO_MARK, DecoderSettings, Reducer
from clipmill.train.tasks.caption.tokenizer import CaptionTokenizer
from clipmill.train.weights.files import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_STD = 0.02
# Number of tokens for the test in `can_decode`, and maximum error of the logits relative to the largest logit.
_NUM_PROBE_TOKENS, _MAX_PROBE_ERROR = 4, 1e-4


class VisualProjector(nn.Module):
    """Projector from a tower's tokens [V, N, E] to visual tokens [V, num_tokens, D].

    Args:
        tower_width: Width of the tower, E.
        width: Width of the language model, D.
        num_heads: Number of attention heads for learned queries that attend to all tokens (as in the pooler of CoCa, Yu
            et al. 2022); None to average consecutive tokens.
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
        """Return the visual tokens."""
        if self.attention is None:
            tokens_VnE = adaptive_avg_pool1d(video_VNE.transpose(1, 2), self.num_tokens).transpose(1, 2)
        else:
            queries, video_VNE = self.query_embedding.expand(len(video_VNE), -1, -1), self.ln_video(video_VNE)
            tokens_VnE, _ = self.attention(queries, video_VNE, video_VNE, need_weights=False)
        visual_VnD: Tensor = self.mlp(tokens_VnE)
        return visual_VnD


def prefix_of(model: nn.Module, video_VCTHW: Tensor, before_bD: Tensor, after_aD: Tensor) -> Tensor:
    """Return the prefix that the language model reads before the caption of each clip, [V, P, D].

    Args:
        model: Module with the submodules `video` and `projection` of a captioner.
        before_bD, after_aD: Embeddings of the prompt before and after the visual tokens.
    """
    visual_VnD: Tensor = model.projection(tower_of(model).tokens(video_VCTHW))  # type: ignore[operator]
    before, after = (part.expand(len(visual_VnD), -1, -1) for part in (before_bD, after_aD))
    # Under autocast, projections are bf16 or fp16, but embeddings are not.
    return torch.cat([before, visual_VnD.to(before.dtype), after], dim=1)


@dataclass
class PrefixCache:
    """Cache of texts that are being generated.

    Attributes:
        keys_values: Cache of the language model.
        first_RW: Logits for the first tokens, computed from the prefix; None after the first step.
    """

    keys_values: Any
    first_RW: Tensor | None

    def keep(self, rows_r: Tensor, videos_v: Tensor | None = None) -> None:
        """Select rows for the next step (`clipmill.train.tasks.caption.decoding.Cache`)."""
        self.keys_values.reorder_cache(rows_r)


class LanguageCaptioner(nn.Module):
    """Captioner with a language model as decoder, with the interface of `Captioner`.

    Args:
        video: Video tower.
        projection: Projector from the tower's tokens to visual tokens.
        decoder: Causal language model from transformers.
        before, after: Token IDs of the prompt before and after the visual tokens.
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
        """Return the logits [R, L, W] for the token after each token.

        Args:
            tokens: Tokens, int64 [V, L] or, with several captions per clip, [V, captions per clip, L]. The first token
                of each row stands for the complete prefix.
        """
        tokens_RL = tokens.flatten(0, -2)
        prefix_VPD = self.encode(video_VCTHW)
        prefix_RPD = prefix_VPD.repeat_interleave(len(tokens_RL) // len(prefix_VPD), 0)
        embeddings = torch.cat([prefix_RPD, self._embed(tokens_RL[:, 1:])], dim=1)
        # Without a cache, transformers checks the positions for packed sequences, which makes the CPU wait for the
        # device.
        return self._run(tokens_RL.shape[1], inputs_embeds=embeddings, use_cache=True).logits

    def encode(self, video_VCTHW: Tensor) -> Tensor:
        """Return the prefix for each clip, [V, P, D]."""
        return prefix_of(self, video_VCTHW, *self.prompt())

    def prompt(self) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the prompt before and after the visual tokens, [b, D] and [a, D]."""
        return self._embed(self.prompt_before), self._embed(self.prompt_after)

    def start(self, video_VCTHW: Tensor, *, num_tokens: int, rows_per_video: int = 1) -> PrefixCache:
        """Encode clips, and cache each prefix (`clipmill.train.tasks.caption.decoding.Generator`)."""
        outputs = self._run(1, inputs_embeds=self.encode(video_VCTHW), use_cache=True)
        rows_R = torch.arange(len(video_VCTHW), device=video_VCTHW.device).repeat_interleave(rows_per_video)
        cache = PrefixCache(outputs.past_key_values, outputs.logits[:, -1][rows_R])
        if rows_per_video > 1:
            cache.keep(rows_R)
        return cache

    def step(self, tokens_RL: Tensor, cache: PrefixCache) -> Tensor:
        """Return the logits [R, W] for the next tokens.

        In the first step, the first token of each row stands for the complete prefix.
        """
        if cache.first_RW is not None:
            logits_RW, cache.first_RW = cache.first_RW, None
            if tokens_RL.shape[1] == 1:
                return logits_RW
            tokens_RL = tokens_RL[:, 1:]
        outputs = self._run(1, input_ids=tokens_RL, past_key_values=cache.keys_values, use_cache=True)
        return outputs.logits[:, -1]  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor) -> Tensor:
        embeddings: Tensor = self.decoder.get_input_embeddings()(tokens)
        return embeddings

    def _run(self, num_logits: int, **arguments: Any) -> Any:
        """Return the output of the language model, with the logits of only the last `num_logits` tokens."""
        if self._can_skip_logits:
            return self.decoder(**arguments, logits_to_keep=num_logits)
        outputs = self.decoder(**arguments)
        outputs.logits = outputs.logits[:, -num_logits:]
        return outputs


@torch.no_grad()
def can_decode(decoder: "PreTrainedModel") -> bool:
    """Return True if a language model computes the same logits token by token with a cache as for all tokens together.

    Encoders fail this test, because their outputs depend on later tokens. State-space models fail, because they lack
    keys and values. The test also reorders the rows of the cache, as beam search does.
    """
    was_training, decoder = decoder.training, decoder.eval()
    ids_RL = (
        torch.arange(2 * _NUM_PROBE_TOKENS).reshape(2, _NUM_PROBE_TOKENS)
        % decoder.get_input_embeddings().num_embeddings
    )
    embeddings_RLD = decoder.get_input_embeddings()(ids_RL)
    try:
        joint_RLW = decoder(inputs_embeds=embeddings_RLD, use_cache=False).logits
        prefix_output = decoder(inputs_embeds=embeddings_RLD[:, :-1], use_cache=True)
        cache = PrefixCache(prefix_output.past_key_values, None)
        cache.keep(torch.tensor([1, 0]))
        last_output = decoder(input_ids=ids_RL.flip(0)[:, -1:], past_key_values=cache.keys_values, use_cache=True)
    except (AttributeError, KeyError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        decoder.train(was_training)
    stepwise_RLW = torch.cat([prefix_output.logits, last_output.logits[:, -1:].flip(0)], dim=1)
    return bool((stepwise_RLW - joint_RLW).abs().max() <= _MAX_PROBE_ERROR * joint_RLW.abs().max())


def language_blocks(decoder: nn.Module) -> list[nn.Module]:
    """Return the blocks of a language model: the modules that transformers does not split between devices."""
    names = set(getattr(decoder, "_no_split_modules", None) or ())
    return [module for module in decoder.modules() if type(module).__name__ in names]


def checkpoint_language_blocks(decoder: "PreTrainedModel") -> None:
    """Enable activation checkpointing in the blocks of a language model.

    Raises:
        UserError: transformers does not support activation checkpointing for this model.
    """
    # Older versions of transformers use the second name.
    enable = getattr(decoder, "activation_checkpointing_enable", None) or decoder.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(
            f"--towers.activation-checkpointing: {error}",
            hint="omit it, or use a smaller --microbatch",
            flags=("--towers.activation-checkpointing",),
        ) from error


def add_language_adapters(decoder: "PreTrainedModel", lora: Lora) -> None:
    """Add peft's LoRA to the linear layers of a language model's blocks, and freeze everything else.

    Raises:
        UserError: See `peft_config`.
    """
    from transformers.pytorch_utils import Conv1D

    blocks = language_blocks(decoder)
    decoder.add_adapter(peft_config(decoder, lora, blocks=blocks, transposed_classes=(Conv1D,), task_type="CAUSAL_LM"))


LANGUAGE_FOLDER = "language_model"
# Files to download. They contain neither code nor pickled weights.
LANGUAGE_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "special_tokens_map.json", "added_tokens.json"),
    "chat_template*",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SUPPORTED = "use a causal language model with a cache of keys and values, such as a Qwen3, Llama, SmolLM2 or GPT-2"
_UNLIMITED = 1 << 20  # assumed context length of a model whose configuration does not limit positions


@dataclass(frozen=True, kw_only=True)
class LanguageDecoder:
    """A causal language model as decoder, the counterpart of `clipmill.train.tasks.caption.model.DecoderParts`.

    Attributes:
        context_length: Number of caption tokens, including the end token, that fit into the context after the prefix.
        before, after: Token IDs of the prompt before and after the visual tokens.
        num_visual: Number of visual tokens per clip.
        reducer: Reduction of the tower's tokens to visual tokens.
        prompt: Prompt, as the user wrote it.
        files: Configuration and tokenizer files by name.
        source: Name of the model, as the user wrote it.
        folder: Folder with the weights; None if the weights are in a checkpoint.
        loaded_models: List that contains the loaded model until the first captioner is built with this model.
    """

    config: "PreTrainedConfig"
    tokenizer: CaptionTokenizer
    context_length: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    num_visual: int
    reducer: Reducer
    prompt: str
    files: dict[str, bytes]
    source: str
    folder: Path | None = None
    loaded_models: "list[PreTrainedModel]" = field(default_factory=list, repr=False)

    @property
    def prefix_length(self) -> int:
        """Number of tokens before a caption."""
        return len(self.before) + self.num_visual + len(self.after)

    def facts(self) -> dict[str, Any]:
        """Return the values in run.json from which, with `files`, the decoder can be rebuilt."""
        return {
            "lm": self.source,
            "class": type(self.config).__name__.removesuffix("Config"),
            "visual_tokens": self.num_visual,
            "reducer": self.reducer,
            "prompt": self.prompt,
            "context": self.context_length,
        }

    def new_model(self) -> "PreTrainedModel":
        """Build the model in float32, with the weights in `folder`.

        The weights are random if `folder` is None, and are not read on the meta device.

        Raises:
            UserError: The weights cannot be read, or the model cannot generate text token by token.
        """
        from transformers import AutoModelForCausalLM

        if self.folder is None or torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)  # type: ignore[no-any-return]
        return self.loaded_models.pop() if self.loaded_models else _read_weights(self.folder, self.config)


def _read_weights(folder: Path, config: "PreTrainedConfig") -> "PreTrainedModel":
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # missing and unexpected tensors are reported below
    hint = "download the folder of --decoder.lm again"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(
            f"cannot read the weights of {folder} (--decoder.lm): {first_line(error)}",
            hint=f"use weights in safetensors files, or {hint}",
            flags=("--decoder.lm",),
        ) from error
    if misfits := sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}):
        raise UserError(f"the weights of {folder} do not fit its config.json: {', '.join(misfits[:3])}", hint=hint)
    if not can_decode(model):
        raise _undecodable_error(folder, config.model_type)
    return model  # type: ignore[no-any-return]


def open_language(folder: Path, settings: DecoderSettings, *, tokenizer_folder: Path) -> LanguageDecoder:
    """Open the language model in a folder, without its weights.

    Raises:
        UserError: The folder is damaged, or lacks a causal language model or a tokenizer; the tokenizer has no end
            token, or does not belong to the model; or prompt and captions exceed the context of the model.
    """
    config = _config_of(folder)
    library_tokenizer = _tokenizer_of(tokenizer_folder)
    tokenizer = CaptionTokenizer(
        library_tokenizer.backend_tokenizer, where=str(tokenizer_folder), end=library_tokenizer.eos_token
    )
    text = config.get_text_config()
    if tokenizer.vocabulary_size > text.vocab_size:
        raise UserError(
            f"the tokenizer of {tokenizer_folder} has {tokenizer.vocabulary_size:,} tokens, but the language model of "
            f"{folder} has {text.vocab_size:,}: they do not belong together",
            hint="use the tokenizer that the language model was trained with",
        )
    start = list(library_tokenizer("")["input_ids"])[:1]
    parts = settings.prompt.split(VIDEO_MARK)
    before, after = (tuple(tokenizer.prompt_ids(part)) for part in parts)
    before = (*(start if start == [library_tokenizer.bos_token_id] else ()), *before)
    context = getattr(text, "max_position_embeddings", None) or _UNLIMITED
    room = context - len(before) - settings.visual_tokens - len(after)
    if room < settings.max_tokens:
        raise UserError(
            f"the context of {folder} has {context:,} tokens, but a captioner needs "
            f"{context - room + settings.max_tokens:,}: prompt {len(before) + len(after)}, visual tokens "
            f"{settings.visual_tokens}, caption {settings.max_tokens} (--decoder.max-tokens)",
            hint="use fewer --decoder.visual-tokens, a smaller --decoder.max-tokens, or a shorter --decoder.prompt",
            flags=("--decoder.max-tokens",),
        )
    return LanguageDecoder(
        config=config,
        tokenizer=tokenizer,
        context_length=room,
        before=before,
        after=after,
        num_visual=settings.visual_tokens,
        reducer=settings.reducer,
        prompt=settings.prompt,
        files={"config.json": config.to_json_string().encode(), **_files_of(library_tokenizer)},
        source=settings.lm or str(folder),
        folder=folder,
    )


def read_language(run: RunFolder, facts: dict[str, Any]) -> LanguageDecoder:
    """Open the language model of a run, without its weights, from its files and `LanguageDecoder.facts`.

    Raises:
        UserError: A file is missing or damaged.
    """
    folder = run.path / LANGUAGE_FOLDER
    settings = DecoderSettings(
        lm=facts["lm"],
        visual_tokens=facts["visual_tokens"],
        reducer=facts["reducer"],
        prompt=facts["prompt"],
        max_tokens=2,
    )
    return replace(open_language(folder, settings, tokenizer_folder=folder), folder=None)


def _config_of(folder: Path) -> "PreTrainedConfig":
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    raw = read_config(folder / "config.json")
    if raw is None:
        raise UserError(
            f"{folder} has no config.json (--decoder.lm)",
            hint="use the folder of a causal language model",
            flags=("--decoder.lm",),
        )
    kind = raw.get("model_type")
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    architectures = raw.get("architectures") or [class_name]
    if raw.get("is_encoder_decoder") or class_name is None or class_name not in architectures:
        description = "an encoder and a decoder of " if raw.get("is_encoder_decoder") else ""
        raise UserError(
            f"{folder} does not contain a causal language model from transformers (--decoder.lm), but "
            f"{architectures[0]} ({description}type {kind})",
            hint=_SUPPORTED,
            flags=("--decoder.lm",),
        )
    if (
        not {"past_key_values", "inputs_embeds"}
        <= inspect.signature(getattr(transformers, class_name).forward).parameters.keys()
    ):
        raise _undecodable_error(folder, kind)
    if "quantization_config" in raw:
        raise UserError(
            f"the weights of {folder} are quantized (--decoder.lm)",
            hint="use the model in bfloat16 or float32",
            flags=("--decoder.lm",),
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        # The first line of a StrictDataclassError contains the validator, and the second line contains the value.
        text = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else first_line(error)
        raise UserError(
            f"cannot read {folder / 'config.json'}: {text}", hint="download the folder of --decoder.lm again"
        ) from error


def _undecodable_error(folder: Path, kind: Any) -> UserError:
    return UserError(
        f"the language model of {folder} is a {kind}, which does not generate text token by token with a cache of keys "
        "and values (--decoder.lm)",
        hint=_SUPPORTED,
        flags=("--decoder.lm",),
    )


def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    hint = "add tokenizer.json and tokenizer_config.json, or pass the tokenizer's folder to --decoder.tokenizer"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"there is no tokenizer in {folder}", hint=hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file may raise any exception in transformers
        raise UserError(f"cannot read the tokenizer of {folder}: {first_line(error)}", hint=hint) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(
            f"the tokenizer of {folder} is a {type(tokenizer).__name__}, which the tokenizers library cannot read",
            hint=hint,
        )
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer of {folder} has no end token (eos_token)",
            hint="set eos_token in tokenizer_config.json to the end token of the language model",
        )
    return tokenizer


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

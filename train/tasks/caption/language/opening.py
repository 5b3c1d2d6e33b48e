"""A causal language model of transformers as the decoder of a captioner: opened, checked, and kept with a run.

A run keeps configuration and tokenizer in RUN/language_model, as transformers write them, so that its checkpoints can
be used without the folder that `--decoder.lm` named. The weights are in the checkpoints.
"""

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from clipmill.manifests.errors import UserError, first_line
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.caption.language.model import decodes
from clipmill.train.tasks.caption.settings import VIDEO_MARK, DecoderSettings, Reducer
from clipmill.train.tasks.caption.tokenizer import CaptionTokenizer
from clipmill.train.weights.files import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LANGUAGE_FOLDER = "language_model"
# What a download fetches: no code, and no weights in pickles.
LANGUAGE_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "special_tokens_map.json", "added_tokens.json"),
    "chat_template*",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SUPPORTED = "name a causal language model with a cache of keys and values, such as a Qwen3, Llama, SmolLM2 or GPT-2"
_UNLIMITED = 1 << 20  # context of a model without learned or scaled positions


@dataclass(frozen=True, kw_only=True)
class LanguageDecoder:
    """A causal language model as a decoder; `clipmill.train.tasks.caption.decoder.DecoderParts` of another kind.

    Attributes:
        context_length: tokens of a caption, including the end, that fit behind the prompt.
        before, after: token ids of the prompt around the visual tokens.
        num_visual: visual tokens of a clip; `reducer` says how they are made.
        prompt: as the user wrote it.
        files: configuration and tokenizer by name.
        source: as the user named it.
        folder: with the weights; None if a checkpoint has them.
        loaded: the model with these weights, until the first captioner is built with it.
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
    loaded: "list[PreTrainedModel]" = field(default_factory=list, repr=False)

    @property
    def prefix_length(self) -> int:
        """Number of tokens before a caption."""
        return len(self.before) + self.num_visual + len(self.after)

    def facts(self) -> dict[str, Any]:
        """Entry of run.json: what the files in the run's folder do not say."""
        return {
            "lm": self.source,
            "class": type(self.config).__name__.removesuffix("Config"),
            "visual_tokens": self.num_visual,
            "reducer": self.reducer,
            "prompt": self.prompt,
            "context": self.context_length,
        }

    def new_model(self) -> "PreTrainedModel":
        """The library's model in float32, with the weights of `folder` if there is one; without any on meta."""
        from transformers import AutoModelForCausalLM

        if self.folder is None or torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)  # type: ignore[no-any-return]
        return self.loaded.pop() if self.loaded else _read_weights(self.folder, self.config)

    def with_weights(self) -> "LanguageDecoder":
        """The decoder with its weights in memory, so that a mistake in them ends a command before a run begins.

        Raises:
            UserError: they are missing, damaged, do not fit the configuration, or the model cannot be decoded.
        """
        return replace(self, loaded=[self.new_model()])


def _read_weights(folder: Path, config: "PreTrainedConfig") -> "PreTrainedModel":
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # what does not fit is reported below
    again = "get the folder of --decoder.lm again"
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
            hint=f"weights are read from safetensors files alone; {again}",
            flags=("--decoder.lm",),
        ) from error
    if lacks := sorted({*report["missing_keys"], *(one[0] for one in report["mismatched_keys"])}):
        raise UserError(f"the weights of {folder} do not fit its config.json: {', '.join(lacks[:3])}", hint=again)
    if not decodes(model):
        raise _undecodable_error(folder, config.model_type)
    return model  # type: ignore[no-any-return]


def open_language(folder: Path, settings: DecoderSettings, *, tokenizer_folder: Path) -> LanguageDecoder:
    """Open the language model in a folder, without its weights.

    Raises:
        UserError: the folder is damaged, has no causal language model or no tokenizer, or the tokenizer no end token;
            tokenizer and model do not belong together; or prompt and captions are longer than its context.
    """
    config = _config_of(folder)
    theirs = _tokenizer_of(tokenizer_folder)
    tokenizer = CaptionTokenizer(theirs.backend_tokenizer, where=str(tokenizer_folder), end=theirs.eos_token)
    text = config.get_text_config()
    if tokenizer.vocabulary_size > text.vocab_size:
        raise UserError(
            f"the tokenizer of {tokenizer_folder} has {tokenizer.vocabulary_size:,} tokens, and the language model of "
            f"{folder} {text.vocab_size:,}: they do not belong together",
            hint="use the tokenizer that the language model was trained with",
        )
    first = list(theirs("")["input_ids"])[:1]
    parts = settings.prompt.split(VIDEO_MARK)
    before, after = (tuple(tokenizer.prompt_ids(part)) for part in parts)
    before = (*(first if first == [theirs.bos_token_id] else ()), *before)
    context = getattr(text, "max_position_embeddings", None) or _UNLIMITED
    room = context - len(before) - settings.visual_tokens - len(after)
    if room < settings.max_tokens:
        raise UserError(
            f"the context of {folder} has {context:,} tokens, and a captioner needs "
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
        files={"config.json": config.to_json_string().encode(), **_files_of(theirs)},
        source=settings.lm or str(folder),
        folder=folder,
    )


def read_language(run: RunFolder, facts: dict[str, Any]) -> LanguageDecoder:
    """The language model of a run, from its folder and its entry of run.json, without its weights.

    Raises:
        UserError: a file is missing or damaged.
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
            hint="name the folder of a causal language model",
            flags=("--decoder.lm",),
        )
    kind = raw.get("model_type")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    saved = raw.get("architectures") or [known]
    if raw.get("is_encoder_decoder") or known is None or known not in saved:
        kinds = "an encoder and a decoder " if raw.get("is_encoder_decoder") else ""
        raise UserError(
            f"{folder} has no causal language model of transformers (--decoder.lm), but {saved[0]}, "
            f"{kinds}of type {kind}",
            hint=_SUPPORTED,
            flags=("--decoder.lm",),
        )
    if (
        not {"past_key_values", "inputs_embeds"}
        <= inspect.signature(getattr(transformers, known).forward).parameters.keys()
    ):
        raise _undecodable_error(folder, kind)
    if "quantization_config" in raw:
        raise UserError(
            f"the weights of {folder} are quantized (--decoder.lm)",
            hint="name the model in bfloat16 or float32",
            flags=("--decoder.lm",),
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        # The first line of the library's own error names a validator, and the second one the value.
        said = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else first_line(error)
        raise UserError(
            f"cannot read {folder / 'config.json'}: {said}", hint="get the folder of --decoder.lm again"
        ) from error


def _undecodable_error(folder: Path, kind: Any) -> UserError:
    return UserError(
        f"the language model of {folder} is a {kind}, which does not write texts token by token with a cache of keys "
        "and values (--decoder.lm)",
        hint=_SUPPORTED,
        flags=("--decoder.lm",),
    )


def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    again = "put tokenizer.json and tokenizer_config.json there, or name their folder with --decoder.tokenizer"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"there is no tokenizer in {folder}", hint=again)
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever a damaged file leads to
        raise UserError(f"cannot read the tokenizer of {folder}: {first_line(error)}", hint=again) from error
    if getattr(found, "backend_tokenizer", None) is None:
        raise UserError(
            f"the tokenizer of {folder} is a {type(found).__name__}, which tokenizers does not read", hint=again
        )
    if found.eos_token is None:
        raise UserError(
            f"the tokenizer of {folder} has no token for the end of a text (eos_token)",
            hint="name the token that the language model ends with as eos_token in tokenizer_config.json",
        )
    return found


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

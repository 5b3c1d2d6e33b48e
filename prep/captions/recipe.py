"""Settings of `prep captions`, their recipe, and a function that finds a local model and hashes its files.

The command line loads this module, so it does not import torch.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Checked, Needs, Range, errors_of
from clipmill.prep.core.recipe import NOT_STORED, Recipe
from clipmill.prep.core.request import model_folder
from clipmill.shards.where_flag import check_where

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_SUGGESTION = (
    "use a folder with a model and its processor, written by save_pretrained, or a name such as "
    "Qwen/Qwen3-VL-2B-Instruct"
)
CAPTIONS_SCHEMA = 2  # increment it when the same settings start to send different images or text
MODEL = Parameter(group=Group("Captions", sort_key=1))
PROMPT = "Describe this video clip in one sentence."
_MAX_PROMPT_CHARS = 100_000
_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNSAFE_CHARS = re.compile(r"[^A-Za-z0-9.]+")
# With temperature 0, decoding is greedy, and the settings marked with this rule have no effect.
_NEEDS_SAMPLING = Needs("temperature", use="1")


@dataclass(frozen=True)
class Model:
    """Image-text-to-text model for transformers, stored on this machine.

    Attributes:
        name: Name on the Hugging Face Hub, or name of the folder without its parents.
        source: Name on the Hub or absolute path of the folder. Other machines use it to open the model.
        directory: Folder that contains the files.
        sha256: SHA-256 (hex) of configuration, processor, tokenizer and weights.
    """

    name: str
    source: str
    directory: Path
    sha256: str


@lru_cache(maxsize=1)
def find_model(name: str) -> Model:
    """Find a model on this machine or download it, and hash its files. The result is cached.

    Raises:
        UserError: The model does not exist, lacks weights or a processor, or cannot be read.
    """
    directory = model_folder(name, files=_MODEL_FILES, what="model", flag="--model", hint=_SUGGESTION)
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} lacks config.json or *.safetensors", hint=_SUGGESTION)
    if not any((directory / file).is_file() for file in _PROCESSOR_FILES):
        raise UserError(f"{directory} lacks a processor ({' or '.join(_PROCESSOR_FILES)})", hint=_SUGGESTION)
    digest = hashlib.sha256()
    try:
        for path in sorted({path for pattern in _MODEL_FILES for path in directory.glob(pattern)}):
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}", hint=_SUGGESTION) from None
    is_local = Path(name).expanduser().is_dir()
    return Model(
        directory.name if is_local else name, str(directory) if is_local else name, directory, digest.hexdigest()
    )


@dataclass(frozen=True, kw_only=True)
class CaptionsSettings(Checked):
    """Settings of `prep captions`. All of them are part of the recipe, unless they are marked `NOT_STORED`.

    With `endpoint`, `precision` has no effect.
    """

    model: Annotated[str, MODEL, FIRST_RUN]
    """Image-text-to-text model for transformers: a folder, or a name on the Hugging Face Hub. With --endpoint: the name
    of the model on the server."""

    endpoint: Annotated[str | None, MODEL, FIRST_RUN, NOT_STORED] = None
    """Base URL of a server with OpenAI's API (vLLM, SGLang, llama.cpp, OpenAI, ...), such as http://localhost:8000/v1.
    The API key is read from OPENAI_API_KEY. The URL is not part of the recipe. Default: run the model locally."""

    prompt: Annotated[str, MODEL, FIRST_RUN] = PROMPT
    """Prompt for the model, placed after the frames."""

    prompt_file: Annotated[Path | None, MODEL, NOT_STORED] = None
    """UTF-8 text file with the prompt, used instead of --prompt."""

    frames: Annotated[int, MODEL, FIRST_RUN, Range(1, 256)] = 8
    """Number of evenly spaced frames of each chunk that the model receives, 1 to 256."""

    size: Annotated[int, MODEL, FIRST_RUN, Range(16, 4096)] = 448
    """Maximum length of the longer side of a frame in pixels, 16 to 4096. Smaller frames are not enlarged."""

    max_tokens: Annotated[int, MODEL, Range(1, 100_000)] = 256
    """Maximum number of tokens per answer, 1 to 100000. An answer that is cut off at the limit fails with
    the code answer_truncated."""

    temperature: Annotated[float, MODEL, Range(0, 2)] = 0.0
    """Sampling temperature, 0 to 2. With 0, the most likely token is chosen at each step."""

    top_p: Annotated[float | None, MODEL, Range(above=0, most=1), _NEEDS_SAMPLING] = None
    """Nucleus sampling: total probability of the most likely tokens to sample from, above 0 and up to 1.
    Default: off."""

    seed: Annotated[int | None, MODEL, Range(0, (1 << 31) - 1), _NEEDS_SAMPLING] = None
    """Random seed for sampling, 0 to 2147483647. Default: 0; with --endpoint, the server chooses the seed."""

    precision: Annotated[Literal["float32", "float16", "bfloat16"], MODEL] = "bfloat16"
    """Data type of a local model's weights."""

    where: Annotated[str | None, MODEL, NOT_STORED] = None
    """Condition on scores and videos that selects the chunks to caption, such as 'num_captions = 0'. The condition is
    not part of the recipe. Default: all chunks."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error for each invalid name, prompt, URL or condition."""
        if not self.model or self.model != self.model.strip() or _CONTROL_CHARS.search(self.model):
            yield UserError(
                f"--model {self.model!r} is not a valid name",
                hint="use the folder or the name of a model",
                flags=("--model",),
            )
        if self.prompt_file is not None and self.prompt != PROMPT:
            yield UserError(
                "--prompt and --prompt-file cannot be used together",
                hint="pass only one of them",
                flags=("--prompt", "--prompt-file"),
            )
        yield from errors_of(_require_prompt, self.prompt, flag="--prompt")
        if self.endpoint is not None:
            flags = ("--endpoint",)
            try:
                parts = urlsplit(self.endpoint)
                is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                is_url = False
            # The messages omit the URL, because it may contain a password.
            if not is_url or _CONTROL_CHARS.search(self.endpoint) or " " in self.endpoint:
                yield UserError(
                    "--endpoint is not a valid URL",
                    hint="use a URL such as http://localhost:8000/v1",
                    flags=flags,
                )
            elif parts.username is not None or parts.password is not None or parts.query or parts.fragment:
                yield UserError(
                    "--endpoint contains a user name, a password, a query or a fragment, which would be stored",
                    hint="set the environment variable OPENAI_API_KEY to the API key, and omit these parts of the URL",
                    flags=flags,
                )
        yield from errors_of(check_where, self.where)

    def with_prompt(self) -> "CaptionsSettings":
        """Return the settings with the content of `prompt_file`, if it is set, as the prompt.

        Raises:
            UserError: The file cannot be read, or its content is not a valid prompt.
        """
        if self.prompt_file is None:
            return self
        try:
            text = self.prompt_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UserError(
                f"--prompt-file {self.prompt_file} cannot be read: {reason}", hint="use a text file in UTF-8"
            ) from None
        _require_prompt(text, flag="--prompt-file", value=f" {self.prompt_file}")
        return replace(self, prompt=text, prompt_file=None)


def _require_prompt(text: str, *, flag: str, value: str = "") -> None:
    """Raise a UserError about the flag unless `text` is a valid prompt; `value` follows the flag in the message."""
    if not text.strip():
        raise UserError(f"{flag}{value} is empty", hint="describe the caption that you want", flags=(flag,))
    if len(text) > _MAX_PROMPT_CHARS:
        raise UserError(
            f"{flag}{value} is too long: {len(text):,} characters",
            hint=f"use at most {_MAX_PROMPT_CHARS:,} characters",
            flags=(flag,),
        )
    if match := _CONTROL_CHARS.search(text):
        raise UserError(
            f"{flag}{value} contains a control character: character {match.start() + 1} is U+{ord(match[0]):04X}",
            hint="use only printable characters, spaces, tabs and line feeds",
            flags=(flag,),
        )


def resolve(settings: CaptionsSettings) -> tuple[CaptionsSettings, dict[str, Any]]:
    """Read the prompt and find the model; return the settings with both, and additional values for the recipe.

    Raises:
        UserError: The prompt file or the model does not exist, or is invalid.
    """
    settings = settings.with_prompt()
    if settings.endpoint is not None:
        return settings, {"model_sha256": None, "precision": None}
    model = find_model(settings.model)
    sampling_values = {"seed": settings.seed or 0} if settings.temperature else {}
    return replace(settings, model=model.source), {"model": model.name, "model_sha256": model.sha256, **sampling_values}


def local_weights(recipe: Recipe[CaptionsSettings]) -> str | None:
    """Return the absolute path of a model in a local folder; None for a model from the Hub or on a server."""
    model = recipe.settings.model
    return model if model != recipe.values["model"] else None


def variant_name(recipe: Recipe[CaptionsSettings]) -> str:
    """Return the readable part of the variant's name: the model, and the number and size of the frames."""
    model = _UNSAFE_CHARS.sub("-", recipe.values["model"].rpartition("/")[2]).strip("-.")[:60] or "model"
    return f"{model}-{recipe.settings.frames}x{recipe.settings.size}px"

"""Captions from a local image-text-to-text model. In this package, only this module imports torch and transformers."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.prep.captions.answers import Answer, CaptionTask, Picture
from clipmill.prep.captions.recipe import CaptionsSettings
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import Stop

Device = Literal["cpu", "cuda"]
_DECODE_THREADS = 2


class LocalModel:
    """Image-text-to-text model with its processor.

    Args:
        model: Model from transformers, already on the device.
        processor: Processor of the model.
        name: Name to record with the answers.
        device: Device of the model.
    """

    def __init__(self, model: Any, processor: Any, *, name: str, device: Device) -> None:
        self._model, self._processor = model, processor
        self._name, self._device = name, device
        text = model.config.get_text_config()
        self._context = int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
        end_ids = model.generation_config.eos_token_id
        self._end_ids = frozenset(end_ids if isinstance(end_ids, list) else [end_ids])

    def captions(
        self, pictures: Sequence[Sequence[Picture]], *, settings: CaptionsSettings, seed: int
    ) -> list[Answer | SourceFailure]:
        """Caption a batch of chunks.

        Args:
            pictures: Pictures of each chunk.
            settings: Prompt and generation settings.
            seed: Random seed of the batch.

        Returns:
            An answer for each chunk, or a failure if pictures, prompt and `max_tokens` for the answer exceed the
            context of the model.

        Raises:
            MemoryError: The batch does not fit in GPU memory.
        """
        import torch

        start_s = time.monotonic()
        inputs = self._inputs(pictures, prompt=settings.prompt)
        lengths = inputs["attention_mask"].sum(1).tolist()
        fits = [length + settings.max_tokens <= self._context for length in lengths]
        if not all(fits):
            # Caption only the chunks that fit, as a smaller batch.
            fitting_chunks = [chunk for chunk, does_fit in zip(pictures, fits, strict=True) if does_fit]
            results = iter(self.captions(fitting_chunks, settings=settings, seed=seed) if fitting_chunks else [])
            return [
                next(results)
                if does_fit
                else SourceFailure(
                    FailureCode.PROMPT_TOO_LONG,
                    f"{length} tokens of pictures and prompt plus {settings.max_tokens} tokens for the answer exceed "
                    f"the context of {self._context} tokens",
                )
                for does_fit, length in zip(fits, lengths, strict=True)
            ]
        torch.manual_seed(seed)
        try:
            with torch.inference_mode():
                tokens = self._model.generate(
                    **inputs,
                    max_new_tokens=settings.max_tokens,
                    do_sample=settings.temperature > 0,
                    temperature=settings.temperature or None,
                    top_p=settings.top_p,
                    top_k=0 if settings.temperature else None,
                )
        except torch.OutOfMemoryError:
            raise MemoryError(
                f"a batch of {count_noun(len(pictures), 'chunk')} does not fit in GPU memory: use a smaller --batch, or"
                " fewer --frames"
            ) from None
        seconds = (time.monotonic() - start_s) / len(pictures)
        answers = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            self._answer(answer, tokens_in=length, seconds=seconds)
            for answer, length in zip(answers, lengths, strict=True)
        ]

    def _inputs(self, pictures: Sequence[Sequence[Picture]], *, prompt: str) -> Any:
        conversations = [
            [
                {
                    "role": "user",
                    "content": [
                        *({"type": "image", "image": picture} for picture in chunk_pictures),
                        {"type": "text", "text": prompt},
                    ],
                }
            ]
            for chunk_pictures in pictures
        ]
        inputs = self._processor.apply_chat_template(
            conversations,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        return inputs.to(self._device, dtype=self._model.dtype)

    def _answer(self, tokens: list[int], *, tokens_in: int, seconds: float) -> Answer:
        end = next((position for position, token in enumerate(tokens) if token in self._end_ids), None)
        return Answer(
            text=self._processor.decode(tokens if end is None else tokens[:end], skip_special_tokens=True),
            finish_reason="length" if end is None else "stop",
            tokens_in=tokens_in,
            tokens_out=len(tokens) if end is None else end + 1,
            seconds=round(seconds, 3),
            model=self._name,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalCaptioner:
    """Captioner that runs a model in this process.

    Row r belongs to batch r // `batch`, no matter which rows already have a caption. A rerun after a kill therefore
    uses the same batch boundaries.

    Attributes:
        batch: Maximum number of chunks in a batch.
    """

    model: LocalModel
    settings: CaptionsSettings
    batch: int

    def caption(self, task: CaptionTask) -> Stop | None:
        """Caption all rows (see `Captioner` in `answers.py`)."""
        with ThreadPoolExecutor(_DECODE_THREADS) as pool:
            decode = partial(_pictures_or_failure, task)
            for rows, futures in _run_ahead(
                self._batches(task.rows), lambda rows: [pool.submit(decode, row) for row in rows]
            ):
                if (stop := task.stop()) is not None:
                    return stop
                results = [(row, future.result()) for row, future in zip(rows, futures, strict=True)]
                usable_rows = [(row, pictures) for row, pictures in results if not isinstance(pictures, SourceFailure)]
                for row, result in results:
                    if isinstance(result, SourceFailure):
                        task.keep(row, result)
                if usable_rows:
                    seed = task.seed(usable_rows[0][0])
                    pictures_of_rows = [pictures for _, pictures in usable_rows]
                    answers = self.model.captions(pictures_of_rows, settings=self.settings, seed=seed)
                    for (row, _), answer in zip(usable_rows, answers, strict=True):
                        task.keep(row, answer)
        return None

    def _batches(self, rows: Iterator[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for row in rows:
            if batch and row // self.batch != batch[0] // self.batch:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


def _run_ahead(batches: Iterator[list[int]], start: Callable[[list[int]], Any]) -> Iterator[tuple[list[int], Any]]:
    """Yield each batch with the result of `start(batch)`, after also calling `start` for the next batch."""
    queue = [(batch, start(batch)) for batch in islice(batches, 1)]
    while queue:
        queue += [(batch, start(batch)) for batch in islice(batches, 1)]
        yield queue.pop(0)


def _pictures_or_failure(task: CaptionTask, row: int) -> Sequence[Picture] | SourceFailure:
    try:
        return task.pictures(task.read(row))
    except SourceFailure as failure:
        return failure


@lru_cache(maxsize=1)
def open_model(directory: Path, *, name: str, device: Device, precision: str, num_threads: int) -> LocalModel:
    """Load a model and its processor. The result is cached.

    Raises:
        UserError: torch or transformers is not installed, or transformers cannot load a model and a processor from the
            folder.
    """
    try:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor
        from transformers.utils import logging
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", hint="install clipmill[columns]") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    try:
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
        model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=getattr(torch, precision), local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(
            f"the model in {directory} cannot be loaded: {on_one_line(str(error).strip() or type(error).__name__)}",
            hint="use a folder with an image-text-to-text model and its processor, written by save_pretrained",
        ) from None
    if getattr(processor, "chat_template", None) is None:
        raise UserError(
            f"the processor in {directory} has no chat template",
            hint="use an instruction-tuned model; its folder contains chat_template.jinja",
        )
    return LocalModel(model.to(device).eval(), processor, name=name, device=device)

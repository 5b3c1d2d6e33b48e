"""Out-of-memory errors that say which batch would fit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.train.config.training import TrainingSettings
from clipmill.train.distributed.world import World

# Reserved for cuBLAS, NCCL and fragmentation.
_SPARE = 0.1


@contextmanager
def explain_out_of_memory(settings: TrainingSettings, world: World, *, device: torch.device) -> Iterator[None]:
    """Turn out-of-memory errors within the block into a UserError that says which batch would probably fit.

    Raises:
        UserError: instead of torch.OutOfMemoryError, or the RuntimeError of the CPU allocator.
    """
    if device.type != "cuda":
        try:
            yield
        except RuntimeError as error:
            if "DefaultCPUAllocator" not in str(error):
                raise
            raise UserError(
                f"out of memory: a step of {count_noun(settings.batch, 'sample')} does not fit",
                hint="use a smaller --microbatch or --batch, or smaller clips",
            ) from error
        return
    before_bytes = torch.cuda.memory_allocated(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        share = settings.batch // world.size
        raise too_large(
            batch=settings.batch,
            share=share,
            at_once=min(settings.microbatch or share, share),
            before_bytes=before_bytes,
            peak_bytes=torch.cuda.max_memory_allocated(device),
            total_bytes=available_bytes(device),
        ) from error


def available_bytes(device: torch.device) -> int:
    """GPU memory that this process can use: what other processes leave, at most its memory fraction."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    limit_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    return min(limit_bytes, free_bytes + torch.cuda.memory_reserved(device))


def too_large(
    *, batch: int, share: int, at_once: int, before_bytes: int, peak_bytes: int, total_bytes: int
) -> UserError:
    """The error for a step that needs more than `total_bytes`, the memory that this process can use.

    Args:
        batch: samples of a step on all ranks; `share` on this rank; `at_once` of them in a microbatch.
        before_bytes: allocated when the step began: weights, optimizer state, buffers.
        peak_bytes: allocated when memory ran out, a lower bound of what the step needs.
    """
    fits = fitting(at_once, before_bytes=before_bytes, peak_bytes=peak_bytes, total_bytes=total_bytes)
    message = (
        f"out of GPU memory: a pass of {count_noun(at_once, 'sample')} needs more than "
        f"{size_text(total_bytes)}, of which "
        f"{size_text(before_bytes)} were taken before the step and {size_text(peak_bytes)} at its peak"
    )
    if fits is None:
        return UserError(
            message,
            hint="a single sample does not fit: use a smaller --model, or --parallel.strategy fsdp on more GPUs",
        )
    return UserError(
        message,
        hint=f"--microbatch {fits} would probably fit and trains on the same --batch {batch}; "
        f"else --batch {batch // share * fits}, or --towers.activation-checkpointing",
    )


def fitting(at_once: int, *, before_bytes: int, peak_bytes: int, total_bytes: int) -> int | None:
    """The largest power of two of samples that probably fits, given that `at_once` did not; None if not even one does.

    A sample needs at least (peak - before) / at_once: the peak is where memory ran out, and not what the whole step
    would have needed. The result is therefore never more than half of `at_once`.
    """
    if at_once < 2:
        return None
    room_bytes = (1 - _SPARE) * total_bytes - before_bytes
    sample_bytes = max(peak_bytes - before_bytes, 1) / at_once
    most = min(at_once // 2, int(room_bytes / sample_bytes))
    return 1 << (most.bit_length() - 1) if most >= 1 else None

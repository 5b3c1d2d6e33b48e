"""Buffers that forward passes in training mode change: running statistics of batch norms, vectors of spectral norms.

Each microbatch of a step changes them once, in its forward pass with gradients. Passes besides that one (GradCache's
first pass, the measurement of a pipeline's borders, recomputed activations) leave them as they were.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


def changing_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that training may change, by name: those of modules in training mode that checkpoints hold."""
    return {
        name: buffer
        for path, module in model.named_modules()
        if module.training
        for name, buffer in module.named_buffers(path, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Context for additional forward passes: the buffers of `model` have their former values at its end."""
    kept = {name: buffer.clone() for name, buffer in changing_buffers(model).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            # Looked up again: a module may replace its buffer instead of changing it in place.
            for name, buffer in changing_buffers(model).items() if kept else ():
                buffer.copy_(kept[name])


def keep_buffers_in_recomputation(model: nn.Module) -> None:
    """Make the modules of `model` keep their buffers while activation checkpointing runs them again."""
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            _keep_in_recomputation(module)


def _keep_in_recomputation(module: nn.Module) -> None:
    contexts = ExitStack()

    def begin(module: nn.Module, _: Any) -> None:
        # The backward pass runs forward passes only to recompute activations. A compiled block recomputes them in its
        # own graph, which changes buffers once.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            contexts.enter_context(buffers_kept(module))

    def end(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            contexts.close()

    module.register_forward_pre_hook(begin)
    # Called after errors too: torch ends a recomputation by one, as soon as it has what it needs.
    module.register_forward_hook(end, always_call=True)

"""What a run of `train caption` keeps beside its weights."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from manifests.errors import UserError
from train.models.gpt2 import Gpt2Size
from train.models.transformer import NORM_EPS, TransformerSize
from train.run.folder import RunFolder
from train.tasks.caption.building import DecoderParts
from train.tasks.caption.tokenizer import read_tokenizer
from train.weights.fitting import Change


def decoder_facts(size: Gpt2Size) -> dict[str, Any]:
    """For run.json: the size of the decoder, which its weights' own folder is not needed for again."""
    trunk = size.trunk
    return {
        "width": trunk.width,
        "depth": trunk.depth,
        "heads": trunk.num_heads,
        "norm_eps": trunk.norm_eps,
        "vocabulary": size.vocabulary_size,
        "context": size.context_length,
    }


def start_facts(model: nn.Module, parts: DecoderParts, *, frozen: Iterable[str]) -> dict[str, Any]:
    """For run.json: which weights of a decoder a captioner begins with, as of other weights, and what is trained.

    Args:
        model: the captioner, which may be on the meta device, with what is frozen.
        frozen: which parts these are.
    """
    sizes = [(one.numel(), one.requires_grad) for one in model.parameters()]
    total, num_frozen = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if not is_trained)
    which = f"{num_frozen:,} of them frozen ({', '.join(frozen)})" if num_frozen else "none of them frozen"
    facts: dict[str, Any] = {"parameters": f"{total:,}, {which}"}
    if parts.tensors:
        wanted = {name: one for name, one in model.state_dict().items() if name.startswith("decoder.")}
        changes = [
            Change(kind="created", name=name, new=tuple(one.shape), why="what has only read has no cross-attention")
            for name, one in wanted.items()
            if name not in parts.tensors
        ]
        facts["decoder_weights"] = {
            "source": parts.source,
            "num_copied": len(wanted) - len(changes),
            "changes": [change.as_json() for change in changes],
        }
    return facts


def start_lines(facts: Mapping[str, Any]) -> list[str]:
    """What `start_facts` found, for the console; nothing for runs of other tasks."""
    lines = []
    if (start := facts.get("decoder_weights")) is not None:
        num_copied, num_new = start["num_copied"], len(start["changes"])
        copied = f"{num_copied} of {num_copied + num_new} tensors copied as they are"
        new = f", {num_new} are new (cross-attention)" if num_new else ""
        lines.append(f"decoder: {start['source']}: {copied}{new}")
    if "parameters" in facts:
        lines.append(f"parameters: {facts['parameters']}")
    return lines


def read_decoder_parts(run: RunFolder) -> DecoderParts:
    """Tokenizer and size of the decoder of a run.

    Raises:
        UserError: it is no run of `train caption`.
    """
    return DecoderParts(
        tokenizer=read_tokenizer(run.path, hint="put back what the run wrote"), size=decoder_size_of(run)
    )


def decoder_size_of(run: RunFolder) -> Gpt2Size:
    """The size of the decoder of a run.

    Raises:
        UserError: it is no run of `train caption`.
    """
    try:
        facts = run.require_facts()["decoder"]
        trunk = TransformerSize(
            width=facts["width"],
            depth=facts["depth"],
            num_heads=facts["heads"],
            norm_eps=facts.get("norm_eps", NORM_EPS),
        )
        return Gpt2Size(trunk=trunk, vocabulary_size=facts["vocabulary"], context_length=facts["context"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} names no decoder: {run.path} is no run of train caption",
            hint="other runs are scored by other commands: train eval --help",
        ) from error

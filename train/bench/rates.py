"""What the rates of the links say: which side holds up the other, by which link, and what would help."""

from dataclasses import dataclass
from typing import Literal

COMPUTE_LINKS = ("augment", "model")


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    slowest: of all links, each by itself.
    bound: "data" where the loader is slower than what uses its batches.
    cause: the slowest link of that side.
    compute_items_per_s: of augment and model, one after the other.
    expected_wait_share: of a step, where loader and model overlap and do not share the processor.
    """

    slowest: str
    bound: Literal["data", "compute"]
    cause: str
    compute_items_per_s: float
    expected_wait_share: float


def judge(links: dict[str, float], *, loader_items_per_s: float) -> Verdict:
    """The verdict on items per second, by link."""
    compute = 1 / sum(1 / links[name] for name in COMPUTE_LINKS)
    is_data_bound = loader_items_per_s < compute
    of_side = [name for name in links if (name in COMPUTE_LINKS) != is_data_bound]
    return Verdict(
        slowest=min(links, key=links.__getitem__),
        bound="data" if is_data_bound else "compute",
        cause=min(of_side, key=links.__getitem__),
        compute_items_per_s=compute,
        expected_wait_share=max(0.0, 1 - loader_items_per_s / compute),
    )


def advice(verdict: Verdict, *, workers: int, cores: int, decode: str, samples_per_chunk: int) -> list[str]:
    """What to change, the most promising first."""
    if verdict.bound == "compute":
        return {
            "augment": ["lower --augment.blur: blur is what costs most there"],
            "model": ["the data keeps up; to go faster, use a faster device, a smaller --model or fewer --num-frames"],
        }[verdict.cause]
    found = []
    if verdict.cause == "decode" and decode != "packets":
        found.append("--decode packets")
    if verdict.cause in ("decode", "crop", "tokens") and workers < cores:
        found.append(f"more --workers: {workers} of {cores} cores are used")
    if verdict.cause in ("read", "decode") and samples_per_chunk == 1:
        found.append("--samples-per-chunk 2 or more: chunks are read and decoded once for several samples")
    found += {
        "read": [
            "a faster disk, or chunks of a lower bitrate",
            "more --workers: they wait for the disk, not for cores",
        ],
        "decode": ["chunks that are cheaper to decode: a smaller short side, or every frame a key frame"],
        "crop": ["chunks of a smaller short side, or a smaller --size-px"],
        "tokens": ["shorter captions"],
        "collate": ["a smaller --size-px or fewer --num-frames"],
        "transfer": ["a smaller --size-px or fewer --num-frames"],
    }[verdict.cause]
    return found

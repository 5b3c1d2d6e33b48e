"""What a run of `prep text` did, for people and for scripts."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shards.commits import Failure


@dataclass(frozen=True)
class TextSummary:
    """What a run did.

    Attributes:
        num_videos: in committed shards.
        num_captions: of the manifest.
        num_texts: distinct texts of the shards that had work.
        num_encoded: of these, those that went through the tower now.
        num_cut: of the encoded, those longer than the tower's context, whose beginning stands for them.
        failures: those of earlier runs that were not tried again are counted too.
    """

    variant: str
    num_videos: int
    num_captions: int
    num_shards: int
    num_shards_made: int
    num_texts: int
    num_encoded: int
    num_cut: int
    num_bytes_written: int
    wall_s: float
    failures: list[Failure] = field(default_factory=list)

    @property
    def num_taken_over(self) -> int:
        """Texts whose embedding stood in a shard, or in the bank of a killed run."""
        return self.num_texts - self.num_encoded

    @property
    def num_failed_videos(self) -> int:
        """Videos that are absent, or that failed to be made anew."""
        return len({failure.video_id for failure in self.failures})

    def failures_by_code(self) -> dict[str, int]:
        """Code -> failures, the most frequent first."""
        return dict(Counter(failure.code for failure in self.failures).most_common())


def text_summary_values(summary: TextSummary) -> dict[str, Any]:
    """A run's summary as plain values for JSON."""
    return {
        "variant": summary.variant,
        "num_videos": summary.num_videos,
        "num_captions": summary.num_captions,
        "num_shards": summary.num_shards,
        "num_shards_made": summary.num_shards_made,
        "num_texts": summary.num_texts,
        "num_encoded": summary.num_encoded,
        "num_taken_over": summary.num_taken_over,
        "num_cut": summary.num_cut,
        "num_bytes_written": summary.num_bytes_written,
        "wall_s": round(summary.wall_s, 3),
        "num_failed_videos": summary.num_failed_videos,
        "failures": summary.failures_by_code(),
    }


def text_summary_text(summary: TextSummary) -> str:
    """A run's summary for people."""
    lines = [
        f"variant  {summary.variant}",
        f"shards   {summary.num_shards} with {summary.num_videos} videos, of {summary.num_captions} captions in all",
    ]
    if summary.num_shards_made or summary.num_encoded:
        lines.append(
            f"made     {summary.num_shards_made} shards: {summary.num_texts} distinct texts,"
            f" {summary.num_encoded} encoded, {summary.num_taken_over} taken over,"
            f" {summary.num_bytes_written / 1e6:.1f} MB in {summary.wall_s:.1f} s"
        )
        if summary.num_cut:
            lines.append(f"cut      {summary.num_cut} of the encoded texts are longer than the tower reads")
    else:
        lines.append("nothing was encoded" + ("" if summary.failures else ": everything is as planned"))
    lines += [f"failed   {count} x {code}" for code, count in summary.failures_by_code().items()]
    return "\n".join(lines)

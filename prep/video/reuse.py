"""Chunks of an old shard that can be taken over: intact bytes of an encoder pass that the new plan wants as well."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.keys import split_key
from prep.core.failures import SourceFailure
from prep.video.plan import SpanPlan
from prep.video.recipe import ResolvedRecipe
from prep.video.sample import start_ms
from prep.video.span_task import ReadyChunk, checked_chunk
from shards.commits import Commit
from shards.salvage import readable_rows


@dataclass(frozen=True)
class SpanChunks:
    """Chunks of one span: all that it has, or what is left of them.

    Attributes:
        chunks: by their number in the span, ascending.
        num_chunks: that the span has when it is whole.
    """

    chunks: dict[int, ReadyChunk]
    num_chunks: int

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == self.num_chunks


class OldChunks:
    """The intact chunks of a shard's last commit, unpacked into scratch space."""

    def __init__(self, variant_dir: Path, commit: Commit | None, *, plans: Iterable[SpanPlan], folder: Path) -> None:
        """Unpacks the chunks of those spans of `plans` whose fingerprint has not changed into `folder`."""
        wanted = {(plan.video_id, plan.fingerprint) for plan in plans}
        self._found: dict[tuple[str, str], dict[int, tuple[Path, dict[str, Any]]]] = {}
        for sample in readable_rows(variant_dir, commit) if commit is not None else ():
            description = json.loads(sample.members["json"])
            video_id, begin_ms = split_key(sample.key)
            span = (video_id, description["span_fingerprint"])
            if span in wanted:
                path = folder / f"{sample.key}.mp4"
                path.write_bytes(sample.members["mp4"])
                self._found.setdefault(span, {})[begin_ms] = path, description

    def span(self, plan: SpanPlan, *, recipe: ResolvedRecipe) -> SpanChunks:
        """What is left of one span; each chunk of it was read back and compared with the plan."""
        found = self._found.get((plan.video_id, plan.fingerprint), {})
        chunks, num_chunks = {}, len(plan.span.chunk_frames)
        for number, first_frame in enumerate(plan.span.chunk_starts()):
            path, description = found.get(start_ms(first_frame, fps=recipe.settings.fps_exact), (None, {}))
            if path is None:
                continue
            num_chunks = description["span_chunks"]
            try:
                chunks[number] = checked_chunk(
                    path,
                    num_frames=description["num_frames"],
                    num_source_frames=description["num_source_frames"],
                    plan=plan,
                    recipe=recipe,
                )
            except SourceFailure:  # made by something else than this recipe: not ours to take over
                continue
        return SpanChunks(chunks, num_chunks)

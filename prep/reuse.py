"""Chunks of an old shard that can be taken over: intact bytes of an encoder pass that the new plan wants as well."""

import json
from pathlib import Path

from manifests.keys import split_key
from prep.failures import SourceFailure
from prep.plan import SpanPlan
from prep.recipe import ResolvedRecipe
from prep.span_task import ReadyChunk, checked_chunk
from shards.commits import Commit
from shards.salvage import readable_rows


class OldChunks:
    """The reusable spans of a shard's last commit, unpacked into scratch space.

    A span is reusable when all its chunks are intact; one damaged chunk means that its whole span is encoded again.
    """

    def __init__(self, variant_dir: Path, commit: Commit | None, *, wanted: set[str], folder: Path) -> None:
        """Unpacks the chunks whose span's fingerprint is in `wanted` into `folder`."""
        self._spans: dict[str, list[tuple[int, Path, dict[str, int]]]] = {}
        if commit is None:
            return
        for sample in readable_rows(variant_dir, commit):
            description = json.loads(sample.members["json"])
            fingerprint = description["span_fingerprint"]
            if fingerprint in wanted:
                path = folder / f"{sample.key}.mp4"
                path.write_bytes(sample.members["mp4"])
                self._spans.setdefault(fingerprint, []).append((split_key(sample.key)[1], path, description))

    def span(self, plan: SpanPlan, *, recipe: ResolvedRecipe) -> list[ReadyChunk] | None:
        """The chunks of a span, or None when it has to be encoded."""
        found = sorted(self._spans.get(plan.fingerprint, []), key=lambda entry: entry[0])
        if not found or len(found) != found[0][2]["span_chunks"]:
            return None
        try:
            return [
                checked_chunk(
                    path,
                    num_frames=description["num_frames"],
                    num_source_frames=description["num_source_frames"],
                    plan=plan,
                    recipe=recipe,
                )
                for _, path, description in found
            ]
        except SourceFailure:
            return None

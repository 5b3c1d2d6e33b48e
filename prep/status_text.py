"""What `prep status` says to people, and what to do next."""

from collections import Counter

from manifests.errors import UserError
from prep.data_folder import VIDEO
from prep.recipe_text import chunk_command
from prep.status import Status, VariantStatus, VideosStatus
from shards.dataset import variant_dir
from shards.reader import Variant

_MAX_LISTED = 20


def status_text(status: Status) -> str:
    """All of the status, one fact a line."""
    lines = [f"data      {status.data_dir}"]
    lines += ["manifest  none"] if status.videos is None else _videos_lines(status.videos)
    for variant in status.variants:
        lines += _variant_lines(variant)
    if status.current is None and status.variants:
        lines.append("current   none of the variants")
    lines += _failure_lines(status)
    lines += [f"{state:<10}shard {shard_id:06d}: {why}" for shard_id, state, why in status.problems[:_MAX_LISTED]]
    if len(status.problems) > _MAX_LISTED:
        lines.append(f"          ... and {len(status.problems) - _MAX_LISTED} shards more")
    if (hint := _next_step(status)) is not None:
        lines.append(f"next      {hint}")
    return "\n".join(lines)


def repair_command(status: Status) -> str:
    """The command that makes the current variant's missing and damaged shards again."""
    if status.current is None:
        return "prep chunk"
    try:
        stored = Variant(variant_dir(status.data_dir, VIDEO, status.current.name)).recipe
        return chunk_command(stored, data_dir=status.data_dir)
    except UserError:
        return "prep chunk"


def size_text(size_bytes: int) -> str:
    """Bytes in a unit that suits them: 12.3 MB."""
    size, units = float(size_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def _videos_lines(videos: VideosStatus) -> list[str]:
    parts = [f"{videos.num_usable} usable"]
    if videos.unusable:
        parts.append(f"{sum(videos.unusable.values())} unusable")
    if videos.num_not_probed:
        parts.append(f"{videos.num_not_probed} not looked at yet")
    lines = [f"videos    {videos.num_videos}: {', '.join(parts)}", f"captions  {videos.num_captions}"]
    for code, count in videos.lost.items():
        lines.append(f"lost      {count} sources cannot be read any more ({code}); what was made of them stays")
    return lines


def _variant_lines(variant: VariantStatus) -> list[str]:
    label = "current" if variant.is_current else "variant"
    lines = [
        f"{label:<10}{variant.name}",
        f"          {variant.num_chunks} chunks in {variant.num_shards} shards, {variant.hours:.2f} h of video,"
        f" {size_text(variant.size_bytes)} on disk",
    ]
    if variant.running_chunks is not None:
        done = variant.num_chunks + variant.running_chunks
        if variant.num_wanted_chunks:
            share = min(done / variant.num_wanted_chunks, 1)
            lines.append(f"          being made now: {done} of {variant.num_wanted_chunks} chunks ({share:.0%})")
        else:
            lines.append(f"          being made now: {done} chunks so far")
    return lines


def _failure_lines(status: Status) -> list[str]:
    failures = Counter(status.videos.unusable if status.videos is not None else {})
    failures.update(status.current.failures if status.current is not None else {})
    lines = [f"failed    {count} x {code}" for code, count in failures.most_common()]
    if status.failures_file is not None:
        lines.append(f"          listed in {status.failures_file}")
    return lines


def _next_step(status: Status) -> str | None:
    if any(variant.running_chunks is not None for variant in status.variants):
        return None
    if status.videos is None and not status.variants:
        return f"prep manifest folder VIDEOS --data {status.data_dir}"
    if status.current is None or not status.current.num_chunks:
        return f"prep chunk --len 15s --data {status.data_dir}"
    return repair_command(status) if status.problems else None

"""Lines of `latents` in the reports of plans and runs: segments, what is in none of them, and an estimate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, size_text
from clipmill.prep.core.chunk_columns import ChunksPlan
from clipmill.prep.core.chunk_shards import ChunkShard
from clipmill.prep.core.column import Addition
from clipmill.prep.core.disk_use import disk_use
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary
from clipmill.prep.latents.frames import segments_of
from clipmill.prep.latents.recipe import LATENTS, Encoding, LatentsSettings
from clipmill.prep.latents.trial import run_trial, time_lines, time_values
from clipmill.shards.columns import VIDEO, command_for

_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class Content:
    """What is encoded of chunks, and of a VAE of videos, what is in no segment.

    Attributes:
        num_frames: Number of frames to encode at most; unchanged chunks of a changed shard are copied.
        num_units: Number of frames, or of segments of a VAE of videos.
        num_without: Number of chunks without a segment, which have no sample.
        left_out_s: Seconds of video at the ends of chunks, those of these chunks included.
    """

    num_frames: int
    num_units: int
    num_without: int
    left_out_s: Fraction


def content_of(shards: Iterable[ChunkShard], encoding: Encoding) -> Content:
    """Return what is encoded of the wanted chunks of shards."""
    num_frames = num_units = num_without = 0
    left_out_s = Fraction(0)
    for length, count in (item for shard in shards for item in shard.lengths.items()):
        segments = segments_of(length, encoding)
        if not encoding.is_video:
            num_frames += count * len(segments.frames)
            continue
        num_units += count * len(segments.lengths)
        num_without += 0 if segments.lengths else count
        encoded_s = len(segments.lengths) * encoding.segment_step / encoding.settings.fps_exact
        left_out_s += count * max(Fraction(0), length.seconds - encoded_s)
    if not encoding.is_video:
        return Content(num_frames, num_frames, 0, left_out_s)
    return Content(num_units * encoding.segment_frames, num_units, num_without, left_out_s)


def require_segments(plan: ChunksPlan, request: Request) -> None:
    """Check that a VAE of videos finds a segment in a chunk.

    Raises:
        UserError: all chunks are shorter than a segment.
    """
    encoding, lengths = Encoding.of(plan.recipe), [*_lengths(plan)]
    if not encoding.is_video or not lengths or any(shard.num_chunks for shard in plan.chunk_shards.values()):
        return
    settings = encoding.settings
    (longest_s, has_next), fps, step = max(lengths), settings.fps_exact, encoding.vae.frames_step
    # Without a next chunk, there is no frame at the end of the last segment.
    most = (int(longest_s * fps) - (not has_next)) // step * step + 1
    longer = f"make longer chunks: prep {command_for(VIDEO)} --len"
    raise UserError(
        f"--segment {settings.segment} at {settings.fps} fps has {count_noun(encoding.segment_frames, 'frame')} in"
        f" {float(encoding.segment_step / fps):g} s and the frame after it, and the longest chunk has"
        f" {float(longest_s):g} s{'' if has_next else ', at the end of its video'}: no chunk holds a segment",
        hint=f"use --segment {most}f or less, or {longer}" if most > step else f"use a higher --fps, or {longer}",
    )


def _lengths(plan: ChunksPlan) -> Iterable[tuple[Fraction, bool]]:
    return ((length.seconds, length.has_next) for shard in plan.chunk_shards.values() for length in shard.lengths)


def estimate(plan: ChunksPlan) -> Addition:
    """Return what the latents of a plan cost, and how chunks are divided into segments."""
    encoding = Encoding.of(plan.recipe)
    content = content_of((plan.chunk_shards[shard.shard_id] for shard in plan.shards if shard.has_work), encoding)
    in_all = content_of(plan.chunk_shards.values(), encoding)
    num_frames = content.num_frames
    size_bytes = content.num_units * prod(encoding.unit_shape) * _BYTES_PER_NUMBER
    trial = run_trial(plan) if num_frames else None
    added_bytes = (float(size_bytes), float(size_bytes))
    disk = disk_use(plan.data_dir, column=LATENTS, variant=plan.recipe.variant, added_bytes=added_bytes)
    lines: list[str] = []
    if num_frames:
        # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
        lines.append(f"estimate at most {count_noun(num_frames, 'frame')} to encode, {size_text(size_bytes)}")
        lines += [*time_lines(trial, num_frames=num_frames), *disk.lines()]
    segments = {"num_segments": content.num_units, "left_out_s": float(in_all.left_out_s)}
    values = {
        "segments": segments if encoding.is_video else None,
        "estimate": {"num_frames": num_frames, "size_bytes": size_bytes, **time_values(trial, num_frames=num_frames)},
        "disk": disk.values(),
    }
    return Addition(lines, values, _segment_lines(plan, encoding, in_all) if encoding.is_video else ())


def _segment_lines(plan: ChunksPlan, encoding: Encoding, content: Content) -> list[str]:
    """Return how the chunks are divided into segments, and what is in none of them."""
    num_frames, settings = encoding.segment_frames, encoding.settings
    length = next(iter(plan.chunk_shards.values())).longest_s if plan.chunk_shards else Fraction(0)
    seconds = encoding.segment_step / settings.fps_exact
    lines = [
        f"segments {num_frames} frames at {settings.fps} fps, {float(seconds):g} s, become {encoding.latent_frames}"
        f" latent frames; a chunk of {float(length):g} s holds {length // seconds}"
    ]
    return [*lines, *(f"         {text}" for text in _left_out_texts(content, settings))]


def left_out_lines(plan: ChunksPlan) -> list[str]:
    """Return what a plan leaves out, in words; nothing if every frame is in a segment."""
    encoding = Encoding.of(plan.recipe)
    return _left_out_texts(content_of(plan.chunk_shards.values(), encoding), encoding.settings)


def _left_out_texts(content: Content, settings: LatentsSettings) -> list[str]:
    """Return what is in no segment, in words; nothing if everything is."""
    texts = []
    if content.left_out_s:
        texts.append(f"{duration_text(float(content.left_out_s))} at the ends of chunks and videos are in no segment")
    if content.num_without:
        tail = ", which --tail repeat completes" if settings.tail == "drop" else ""
        texts.append(f"{count_noun(content.num_without, 'chunk')} without a segment: too short{tail}")
    return texts


def summary(plan: ChunksPlan, result: Summary, written: Sequence[str]) -> Addition:
    """Return the VAE of a run, and what is in no segment of the whole plan."""
    encoding = Encoding.of(plan.recipe)
    content = content_of(plan.chunk_shards.values(), encoding)
    left_out = {"num_chunks": content.num_without, "seconds": float(content.left_out_s)}
    lines = [f"left out {text}" for text in _left_out_texts(content, encoding.settings)]
    return Addition(lines, {"vae": encoding.settings.vae, "left_out": left_out})

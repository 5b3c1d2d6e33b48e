"""Make one shard of the `video` column in a worker, on any machine and with any engine.

A span consists of consecutive chunks of a video that one encoder pass makes. If the pass is unchanged, the chunks are
copied from stored tars; otherwise they are encoded. Every encoded chunk, new or copied, is demuxed and compared with
the plan before it is written to the tar. A failed span is recorded in the commit and does not affect other spans.

The worker has scratch space on the node's local disk. This space is removed at the end of the work or, if the worker is
killed, by a later worker or run.

    $TMPDIR/scratch-clipmill-<uid>/      accessible to this user only (0700), removed once it is empty
        <12 hex>/                        folder of one worker, locked while the worker is alive
            clipmill-scratch.json        the marker: program, format, name of the folder, run
        <12 hex>.json                    a marker that is being moved into its folder, or out of it

A folder is removed only if it is unlocked and holds a marker with the name of this folder. Folders without a marker are
never touched, and neither is anything else in $TMPDIR. A worker holds the lock of the parent folder while it creates or
removes a folder. If this lock is free, any incomplete folder was left by a killed worker. The marker beside an
incomplete folder identifies it.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.locks import is_same_folder, lock, open_private, private_root
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import ShardResult, begin_shard, stop_result, system_errors_as_results
from clipmill.prep.video.encode import SpanPlan, start_ms
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.settings import ChunkSettings, ResolvedRecipe
from clipmill.prep.video.span_task import OldChunks, ReadyChunk, SpanChunks, StagedSources, StoredTar, make_span
from clipmill.shards.columns import INDEXED, SOURCE_MEMBER, VIDEO
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.format import SOURCE_FIELDS, VIDEO_FIELDS
from clipmill.shards.writer import Sample

if TYPE_CHECKING:
    from clipmill.prep.video.source_span import SourceChunk

_CAPTION_COLUMNS = ["caption_id", "begin_s", "end_s", "text", "source"]
_PROGRAM, _FORMAT = "clipmill", 1
_MARKER = "clipmill-scratch.json"
_FOLDER = re.compile(r"[0-9a-f]{12}")
_MARKER_NAME = re.compile(r"([0-9a-f]{12})\.json")
_MAX_MARKER_BYTES = 1 << 16
_MARKER_PREFIX = json.dumps({"program": _PROGRAM})[:-1].encode()  # start of every marker, even if it is incomplete


@dataclass(frozen=True)
class Caption:
    """Caption of a video; `end_s` is None if the caption lasts to the end of the video."""

    caption_id: int
    begin_s: float
    end_s: float | None
    text: str
    source: str


@dataclass(frozen=True)
class ShardTask:
    """Input of a worker, made up only of paths and small values.

    Attributes:
        old_commit: Previous commit of the shard, used to copy unchanged chunks; None if the shard is new.
        other_tars: Other tars that contain chunks of these spans.
        captions_file: Caption table of the manifest; None if no video has captions.
        caption_groups: Row groups of the caption table that contain captions of the shard's videos.
        scratch_bytes: Maximum total size of the copies of remote sources on a node; None to use most of the free space.
    """

    variant_dir: Path
    shard_id: int
    split: str
    plan_fingerprint: str
    recipe: ResolvedRecipe
    spans: tuple[SpanPlan, ...]
    old_commit: Commit | None
    other_tars: tuple[StoredTar, ...]
    captions_file: Path | None
    caption_groups: tuple[int, ...] = ()
    scratch_bytes: int | None = None


def make_shard(task: ShardTask) -> ShardResult:
    """Make, publish and commit one shard. Running the task again writes the same bytes under the same names."""
    if task.recipe.settings.codec == INDEXED:
        return system_errors_as_results(_make_shard, task)
    try:
        version = find_ffmpeg().version
    except FailedWork as error:
        return stop_result(task, FailureCode.WORKER_LOST, str(error))
    if version != (planned_version := task.recipe.values["ffmpeg"]):
        message = f"this node has ffmpeg {version}, but the plan requires {planned_version}"
        return stop_result(task, FailureCode.FFMPEG_DIFFERS, message)
    return system_errors_as_results(_make_shard, task)


def _make_shard(task: ShardTask) -> ShardResult:
    is_source = task.recipe.settings.codec == INDEXED
    program, captions, fps = "" if is_source else find_ffmpeg().path, None, task.recipe.settings.fps_exact
    if task.captions_file is not None:
        video_ids = [plan.video_id for plan in task.spans]
        captions = captions_of(task.captions_file, video_ids, row_groups=task.caption_groups)
    num_reused, encoded_s = 0, 0.0
    with (
        scratch_folder(f"shard {task.shard_id:06d} of {task.variant_dir}") as scratch,
        begin_shard(
            task,
            column=VIDEO,
            split=task.split,
            extensions=[SOURCE_MEMBER if is_source else "mp4", "json", *(["txt"] if captions is not None else [])],
            fields=[*VIDEO_FIELDS, *SOURCE_FIELDS] if is_source else VIDEO_FIELDS,
            num_planned=sum(len(plan.span.chunk_frames) for plan in task.spans),
        ) as shard,
        StagedSources(
            folder=scratch, limit_bytes=task.scratch_bytes, on_wait=lambda: shard.show(shard.num_samples)
        ) as sources,
    ):
        old_chunks = OldChunks(
            task.variant_dir, task.old_commit, other_tars=task.other_tars, plans=task.spans, folder=scratch
        )
        for plan in task.spans:
            num_done, starts = shard.num_samples, plan.span.chunk_starts()

            # Progress is shown in chunks, but an encoder pass reports frames.
            def show_progress(frames: int, num_done: int = num_done, starts: list[int] = starts) -> None:
                shard.show(num_done + max(0, bisect_right(starts, starts[0] + frames) - 1))

            # Each span has its own folder, so that scratch space holds the new files of only one span at a time.
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                span = old_chunks.span(plan, recipe=task.recipe)
                is_new = len(span.chunks) != span.num_chunks
                if is_new:
                    try:
                        new_chunks = make_span(
                            plan,
                            sources=sources,
                            recipe=task.recipe,
                            program=program,
                            folder=Path(folder),
                            on_frames=show_progress,
                        )
                        span = SpanChunks(dict(enumerate(new_chunks)), len(new_chunks))
                        encoded_s += float(sum(chunk.facts.num_frames for chunk in new_chunks) / fps)
                    except SourceFailure as failure:
                        # Intact chunks stay in the shard even if their source can no longer be read.
                        is_new = False
                        key = chunk_key(plan.video_id, start_ms(plan.span.first_frame, fps=fps))
                        content = f" {key} failed, kept {list(span.chunks)}"
                        shard.fail(Failure(plan.video_id, key, str(failure.code), failure.message), content=content)
                num_reused += 0 if is_new else len(span.chunks)
                for index, chunk in span.chunks.items():
                    sample = video_sample(
                        chunk,
                        plan=plan,
                        index=index,
                        span_chunks=span.num_chunks,
                        split=task.split,
                        settings=task.recipe.settings,
                        captions=None if captions is None else captions.get(plan.video_id, []),
                    )
                    shard.add(sample)
        return shard.commit(num_reused=num_reused, encoded_s=encoded_s)


def captions_of(
    captions_file: Path, video_ids: Sequence[str], *, row_groups: Sequence[int]
) -> dict[str, list[Caption]]:
    """Return the captions of the given videos, sorted by time.

    Args:
        row_groups: Row groups of the table that contain the captions. Only one row group is in memory at a time.
    """
    import pyarrow.parquet as pq

    videos = pa.array(sorted(set(video_ids)), pa.string())
    captions_of_video: dict[str, list[Caption]] = {}
    with pq.ParquetFile(captions_file, read_dictionary=["video_id"], pre_buffer=False) as file:
        for group in row_groups:
            ids = file.read_row_group(group, columns=["video_id"], use_threads=False)["video_id"].unify_dictionaries()
            rows = pa.array(np.flatnonzero(pc.is_in(ids.cast(pa.string()), value_set=videos).to_numpy()))
            table = file.read_row_group(group, columns=_CAPTION_COLUMNS, use_threads=False).take(rows)
            for video_id, row in zip(ids.take(rows).to_pylist(), table.to_pylist(), strict=True):
                end_s = row["end_s"] if row["end_s"] != float("inf") else None
                caption = Caption(row["caption_id"], row["begin_s"], end_s, row["text"], row["source"])
                captions_of_video.setdefault(video_id, []).append(caption)
    for captions in captions_of_video.values():
        captions.sort(key=lambda caption: (caption.begin_s, caption.caption_id))
    return captions_of_video


def video_sample(
    chunk: "ReadyChunk | SourceChunk",
    *,
    plan: SpanPlan,
    index: int,
    span_chunks: int,
    split: str,
    settings: ChunkSettings,
    captions: Sequence[Caption] | None,
) -> Sample:
    """Return the sample of a chunk.

    Args:
        index: Index of the chunk in the span.
        span_chunks: Actual number of chunks in the span.
        captions: Captions of the complete video; None if the dataset has no captions and samples have no txt member.
    """
    fps, first_frame = settings.fps_exact, plan.span.chunk_starts()[index]
    begin_s, end_s = first_frame / fps, (first_frame + chunk.facts.num_frames) / fps
    key = chunk_key(plan.video_id, start_ms(first_frame, fps=fps))
    full_frames = settings.chunk_frames if settings.cut == "even" else plan.span.chunk_frames[index]
    chunk_captions = [
        caption
        for caption in captions or ()
        if caption.begin_s < end_s and (caption.end_s is None or caption.end_s > begin_s)
    ]
    description = {
        "key": key,
        "video_id": plan.video_id,
        "source_id": plan.source_id,
        "source_fingerprint": plan.source.fingerprint,
        "dataset": plan.dataset,
        "split": split,
        # These values are exact: [numerator, denominator].
        "begin_s": begin_s.as_integer_ratio(),
        "end_s": end_s.as_integer_ratio(),
        "fps": fps.as_integer_ratio(),
        "num_frames": chunk.facts.num_frames,
        "num_source_frames": chunk.num_source_frames,
        "is_tail": chunk.facts.num_frames != full_frames,
        "width": chunk.facts.width,
        "height": chunk.facts.height,
        "codec": chunk.facts.codec,
        "span_fingerprint": plan.fingerprint,
        "span_chunks": span_chunks,
        "captions": [asdict(caption) for caption in chunk_captions],
    }
    text = json.dumps(description, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    extension, content = chunk.content
    members = {extension: content, "json": text.encode("utf-8", "replace")}
    if captions is not None:
        members["txt"] = "\n".join(caption.text for caption in chunk_captions).encode("utf-8", "replace")
    fields = {
        "video_id": plan.video_id,
        "start_ms": start_ms(first_frame, fps=fps),
        "num_frames": chunk.facts.num_frames,
        "fps_num": fps.numerator,
        "fps_den": fps.denominator,
        "span_fingerprint": plan.fingerprint,
        **vars(chunk.facts),
    }
    return Sample(key=key, members=members, fields=fields)


@contextmanager
def scratch_folder(run: str = "") -> Iterator[Path]:
    """Yield a new folder, and remove it at the end; first remove folders that this user's killed workers left behind.

    Args:
        run: Description of the work; stored in the marker, but not used.

    Raises:
        OSError: The folder cannot be created, or its parent folder is not private to this user.
    """
    remove_abandoned()
    folder, descriptor = _make_scratch(private_root("scratch"), run)
    try:
        yield folder
    finally:
        with suppress(OSError):  # if the folder cannot be removed, the next worker removes it as abandoned
            _remove_scratch(folder)
        os.close(descriptor)


def remove_abandoned() -> None:
    """Remove folders that this user's killed workers left on this machine; skip folders that cannot be removed."""
    root = private_root("scratch")
    if not root.is_dir() or root.is_symlink():
        return
    with suppress(OSError):
        with _lock_scratch_root(root):
            for marker_file in root.glob("*.json"):
                if name := _MARKER_NAME.fullmatch(marker_file.name):
                    with suppress(OSError):  # for example, the folder is not empty
                        content = _read_marker(os.open(marker_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
                        if _is_marker_of(content, name[1]):
                            _finish_removing(root / name[1])
                        elif content.startswith(_MARKER_PREFIX) or _MARKER_PREFIX.startswith(content):
                            marker_file.unlink()  # the worker was killed before it created the folder
            entries = [entry for entry in root.iterdir() if _FOLDER.fullmatch(entry.name)]
        for folder in entries:
            with suppress(OSError):
                _remove_if_abandoned(folder)
        with _lock_scratch_root(root):
            pass  # releasing this lock removes the root if it is empty


def _make_scratch(root: Path, run: str) -> tuple[Path, int]:
    """Create a folder with a marker in `root`; return the folder and the descriptor that holds its lock."""
    with _lock_scratch_root(root):
        folder = root / secrets.token_hex(6)
        marker_file = _marker_beside(folder)
        host = os.uname().nodename
        marker = {"program": _PROGRAM, "format": _FORMAT, "folder": folder.name, "run": run}
        try:
            marker_file.write_text(json.dumps({**marker, "worker": f"process {os.getpid()} on {host}"}) + "\n")
            folder.mkdir(mode=0o700)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                lock(descriptor)
                marker_file.rename(folder / _MARKER)
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:
            with suppress(OSError):
                _finish_removing(folder)
            raise
        return folder, descriptor


def _remove_scratch(folder: Path) -> None:
    """Remove a locked folder: first its content, then, while holding the parent's lock, the marker and the folder."""
    for entry in folder.iterdir():
        if entry.name == _MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    with _lock_scratch_root(folder.parent):
        (folder / _MARKER).rename(_marker_beside(folder))
        _finish_removing(folder)


def _finish_removing(folder: Path) -> None:
    """Remove an empty folder, and then the marker beside it; the caller holds the lock of the parent folder."""
    with suppress(FileNotFoundError):
        folder.rmdir()
    _marker_beside(folder).unlink(missing_ok=True)


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if lock(descriptor, waits=False):
            marker = os.open(_MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
            if _is_marker_of(_read_marker(marker), folder.name):
                _remove_scratch(folder)
    finally:
        os.close(descriptor)


def _read_marker(descriptor: int) -> bytes:
    """Return the content of a small regular file, and close the file.

    Raises:
        OSError: The descriptor does not refer to a regular file.
    """
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(_MAX_MARKER_BYTES)


def _is_marker_of(marker: bytes, folder: str) -> bool:
    """Return True if this program wrote the marker for `folder`."""
    try:
        content: Any = parse_json(marker)
    except ValueError:
        return False
    expected = {"program": _PROGRAM, "format": _FORMAT, "folder": folder}
    return isinstance(content, dict) and all(content.get(key) == value for key, value in expected.items())


@contextmanager
def _lock_scratch_root(root: Path) -> Iterator[None]:
    """Hold the lock of the parent folder; create the folder if it is missing, and remove it at the end if it is empty.

    Raises:
        OSError: The folder cannot be created, or is not private to this user.
    """
    while True:
        descriptor = open_private(root)
        try:
            lock(descriptor)
            if not is_same_folder(root, descriptor):
                continue  # the previous worker has removed the empty folder
            try:
                yield
            finally:
                with suppress(OSError):  # fails if other workers have folders in the root
                    root.rmdir()
            return
        finally:
            os.close(descriptor)


def _marker_beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")

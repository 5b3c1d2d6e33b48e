"""Find video files under a folder, in a bucket or on web servers, and look them up by the names in annotations.

A scan of a folder reads only names and file types, and does not open files. An error is attributed to the entry or
subfolder that caused it. The listing of a bucket includes the sizes of the objects; no object is opened. Files on web
servers cannot be listed, so a table must list them.
"""

import difflib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from clipmill.manifests.adapters.annotations import Reason
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.stores import AccessDenied, AccessRefused, scheme_of
from clipmill.manifests.storage.urls import Location, host_problem, is_web, join_url, mask_secrets, split_url

# Extensions that programs and cameras use for the supported containers (`clipmill.shards.opening`).
VIDEO_SUFFIXES = frozenset(
    f".{name}"
    for names in (
        "mp4 m4v mov qt mj2 ismv f4v 3gp 3g2 insv lrv 360",  # MP4 and QuickTime; action cameras
        "mkv mk3d webm",  # Matroska
        "avi divx",
        "ts mts m2ts m2t trp tp tod",  # MPEG transport streams; broadcasts and camcorders
        "mpg mpeg mpe vob mod m1v m2v mpv",  # MPEG program and elementary streams; DVDs and camcorders
        "flv asf wmv wtv dvr-ms ogv ogm ivf gif mxf rm rmvb dv dif",
    )
    for name in names.split()
)
_NO_SUFFIX = "without an extension"
_MAX_NAMED_SUFFIXES = 12

_MAX_COMPARED, _MAX_NAMES, _MAX_NAME_CHARS = 10, 20_000, 200
_CUTOFF = 0.75  # minimum similarity for difflib, which allows a wrong digit in a short name, but not a different name


class Ambiguous(Exception):
    """A name matches several files, listed in `matches`."""

    def __init__(self, name: str, matches: list["VideoFile"]) -> None:
        more = ", ..." if len(matches) > 2 else ""
        super().__init__(f"{name!r} matches {len(matches)} files: {matches[0].relative}, {matches[1].relative}{more}")
        self.matches = matches


@dataclass(frozen=True)
class VideoFile:
    """A folder entry with a video extension. It may not be a regular file.

    Attributes:
        path: Absolute path, or URL of an object.
        relative: Path relative to the scanned folder, with / as separator.
        size_bytes: Size of an object; None for a local file.
    """

    path: Location
    relative: str
    size_bytes: int | None = None

    @property
    def source_id(self) -> str:
        """Relative path without extension."""
        return PurePosixPath(self.relative).with_suffix("").as_posix()


@dataclass(frozen=True)
class Fault:
    """A folder or entry that cannot be accessed."""

    path: Location
    reason: Reason
    why: str


@dataclass(frozen=True)
class Scan:
    """The result of scanning a folder; all lists are sorted by relative path.

    Attributes:
        files: Entries with a video extension.
        faults: Entries and folders that cannot be accessed.
        beside: Entries with one of the other requested extensions.
        num_hidden: Number of hidden entries with a video extension, which were ignored.
        omitted: Number of the other visible entries, by lower-case extension.
        links_out: Links out of the folder that were followed: relative path and target.
    """

    files: list[VideoFile]
    faults: list[Fault]
    beside: list[VideoFile]
    num_hidden: int = 0
    omitted: Mapping[str, int] = field(default_factory=dict)
    links_out: Sequence[tuple[str, str]] = ()

    def describe_omitted(self) -> str | None:
        """Describe the numbers of omitted files by extension, most frequent first; None if there are none."""
        if not self.omitted:
            return None
        ranked = sorted(self.omitted.items(), key=lambda item: (-item[1], item[0]))
        counts = [f"{count:,} {on_one_line(suffix) or _NO_SUFFIX}" for suffix, count in ranked[:_MAX_NAMED_SUFFIXES]]
        if rest := sum(count for _, count in ranked[_MAX_NAMED_SUFFIXES:]):
            counts.append(f"{rest:,} others")
        noun = count_noun(sum(self.omitted.values()), "file")
        return f"{noun} without a video extension: {', '.join(counts)}"


def scan_videos(directory: Path, *, skip: Path | None = None, beside: frozenset[str] = frozenset()) -> Scan:
    """Find entries under `directory` with a video extension, and list the entries that cannot be accessed.

    Hidden files, hidden folders and the folder `skip` are ignored. Symbolic links to folders are followed; each folder
    is visited once.

    Args:
        beside: Other extensions to list, in lower case.

    Raises:
        UserError: `directory` is missing, is not a folder, cannot be read, or contains no entry with a video extension.
    """
    require_directory(directory)
    root = directory.resolve()
    files: list[VideoFile] = []
    others: list[VideoFile] = []
    faults: list[Fault] = []
    named_like_videos: list[Path] = []
    num_hidden, omitted = 0, Counter[str]()
    links_out: list[tuple[str, str]] = []
    seen = set[tuple[int, int]]()  # device and inode of each visited folder
    if skip is not None:
        with suppress(OSError):
            status = skip.stat()
            seen.add((status.st_dev, status.st_ino))
    # Links come last, so that a folder that is reachable both directly and through a link gets its direct name,
    # regardless of the order in which the disk lists the entries.
    pending = [(False, root)]
    while pending:
        _, folder = heappop(pending)
        try:
            entries, hidden = _entries(folder, seen)
        except OSError as error:
            if folder == root:
                hint = "check its permissions"
                raise UserError(f"cannot list {directory}: {error.strerror or error}", hint=hint) from error
            faults.append(Fault(folder, Reason.UNREADABLE, f"the folder cannot be listed: {error.strerror or error}"))
            continue
        num_hidden += sum(Path(entry.name).suffix.lower() in VIDEO_SUFFIXES for entry in hidden)
        for entry in entries:
            path = Path(entry.path)
            is_video = path.suffix.lower() in VIDEO_SUFFIXES
            try:
                is_folder = _is_folder(entry, is_video=is_video)
            except OSError as error:
                faults.append(Fault(path, Reason.UNREADABLE, error.strerror or str(error)))
                continue
            links_out += _links_out(entry, root=root, is_used=is_folder or is_video)
            if is_folder:
                heappush(pending, (entry.is_symlink(), path))
                named_like_videos += [path] if is_video else []
            elif is_video:
                files.append(VideoFile(path, path.relative_to(root).as_posix()))
            elif path.suffix.lower() in beside:
                others.append(VideoFile(path, path.relative_to(root).as_posix()))
            else:
                omitted[path.suffix.lower()] += 1
    with_videos = {parent for file in files for parent in Path(file.path).parents} if named_like_videos else set()
    for path in named_like_videos:
        if path not in with_videos:
            faults.append(Fault(path, Reason.NOT_A_FILE, "it is a folder without videos"))
    if not files:
        raise no_videos(directory, faults, omitted=omitted)
    files.sort(key=file_order)
    others.sort(key=file_order)
    faults.sort(key=lambda fault: os.fsencode(fault.path))
    return Scan(files, faults, others, num_hidden, omitted, sorted(links_out))


def no_videos(directory: Location, faults: list[Fault], *, omitted: Mapping[str, int]) -> UserError:
    """Return the error for a folder without videos."""
    scan = Scan([], faults, [], omitted=omitted)
    others = f", but {others}" if (others := scan.describe_omitted()) else ""
    named = "".join(f"; {on_one_line(str(fault.path))}: {fault.why}" for fault in faults[:3])
    return UserError(
        f"no video files in {directory}{named}{others}",
        hint="supported extensions: " + " ".join(sorted(suffix[1:] for suffix in VIDEO_SUFFIXES)),
    )


def require_directory(directory: Path) -> None:
    """Raise UserError unless `directory` is an accessible folder."""
    hint = "use the folder that contains the video files"
    try:
        exists, is_folder = directory.exists(), directory.is_dir()
    except OSError as error:
        raise UserError(f"cannot access {directory}: {error.strerror or error}", hint=hint) from error
    if not exists:
        raise UserError(f"no such folder: {directory}", hint=hint)
    if not is_folder:
        raise UserError(f"{directory} is a file, not a folder", hint=hint)


class VideoLookup:
    """Lookup of a file by its relative path or its name, with or without the extension.

    If there is no exact match, names are compared in Unicode's composed form (NFC): macOS returns decomposed names,
    while annotations mostly contain composed names.
    """

    def __init__(self, files: list[VideoFile]) -> None:
        self._by_name: dict[str, list[VideoFile]] = {}
        self._by_composed: dict[str, list[VideoFile]] = {}
        for file in files:
            relative = PurePosixPath(file.relative)
            for key in {str(file.path), file.relative, file.source_id, relative.name, relative.stem}:
                self._by_name.setdefault(key, []).append(file)
                if not key.isascii():
                    self._by_composed.setdefault(compose_unicode(key), []).append(file)

    def find(self, name: str) -> VideoFile | None:
        """Return the file that `name` refers to; None if there is no such file.

        Raises:
            Ambiguous: Several files match, and none of them has exactly this relative path.
        """
        name = name.removeprefix("./")
        matches = self._by_name.get(name) or self._by_composed.get(compose_unicode(name), [])
        if len(matches) < 2:
            return matches[0] if matches else None
        exact = [file for file in matches if compose_unicode(file.relative) == compose_unicode(name)]
        if len(exact) > 1:
            exact = [file for file in exact if file.relative == name]
        if len(exact) == 1:
            return exact[0]
        raise Ambiguous(name, matches)


class LooseLookup:
    """Lookup of a file by the same names as `VideoLookup`, ignoring case and the kind of separators.

    It is used for names without an exact match, because spreadsheets and other systems change both:
    `Kitchen\\01.mp4` may mean `kitchen/01.MP4`.
    """

    def __init__(self, files: Sequence[VideoFile]) -> None:
        self._by_name: dict[str, list[VideoFile]] = {}
        for file in files:
            relative = PurePosixPath(file.relative)
            for key in {_fold_name(name) for name in (file.relative, file.source_id, relative.name, relative.stem)}:
                self._by_name.setdefault(key, []).append(file)

    def find(self, name: str) -> VideoFile | None:
        """Return the only file that `name` can refer to; None if there is no such file.

        Raises:
            Ambiguous: Several files match, and it is not the case that exactly one matches by its relative path.
        """
        plain = _fold_name(name)
        matches = self._by_name.get(plain, [])
        by_path = [file for file in matches if _fold_name(file.relative) == plain]
        if len(matches) == 1 or len(by_path) == 1:
            return (by_path or matches)[0]
        if matches:
            raise Ambiguous(name, matches)
        return None


class NearestName:
    """Search for the video file with the most similar name, for names without a match.

    Args:
        files: Video files. If there are very many, only names that differ in case are found.
        max_compared: Maximum number of names to compare; after that, only names that differ in case are found.
    """

    def __init__(self, files: Sequence[VideoFile], *, max_compared: int = _MAX_COMPARED) -> None:
        self._path_of: dict[str, str] = {}
        for file in files:
            for key in (file.source_id, PurePosixPath(file.relative).stem):
                self._path_of.setdefault(compose_unicode(key).casefold(), file.relative)
        self._num_left = max_compared if len(files) <= _MAX_NAMES else 0

    def find(self, name: str) -> str | None:
        """Return the relative path of the nearest file; None if no file is near, or after too many comparisons."""
        plain = compose_unicode(PurePosixPath(name).with_suffix("").as_posix()).casefold()
        if plain in self._path_of:
            return self._path_of[plain]
        if not self._num_left or len(plain) > _MAX_NAME_CHARS:
            return None
        self._num_left -= 1  # a comparison takes milliseconds per thousand names
        close = difflib.get_close_matches(plain, self._path_of, n=1, cutoff=_CUTOFF)
        return self._path_of[close[0]] if close else None


def compose_unicode(name: str) -> str:
    """Convert `name` to Unicode's composed form (NFC). Names are compared in this form."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _fold_name(name: str) -> str:
    """Convert a name to a form that ignores differences in separators, case and Unicode form."""
    return compose_unicode(name.strip().replace("\\", "/").removeprefix("./")).casefold()


def file_order(file: VideoFile) -> bytes:
    """Return the sort key of a file."""
    return file.relative.encode("utf-8", "surrogateescape")


def _entries(folder: Path, seen: set[tuple[int, int]]) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the visible and hidden entries of `folder`, and add it to `seen`; empty lists if it is in `seen`."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in seen:
        return [], []
    seen.add(identity)
    with os.scandir(folder) as scan:
        entries = list(scan)
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    return visible, [entry for entry in entries if entry.name.startswith(".")]


def _is_folder(entry: os.DirEntry[str], *, is_video: bool) -> bool:
    """Return True if `entry` is a folder or a link to a folder.

    Raises:
        OSError: The type is unknown and the name has no video extension, because a broken link may have pointed to a
            folder of videos. Entries with a video extension are checked again when they are used.
    """
    try:
        is_folder = entry.is_dir()
        if not is_folder and not is_video and entry.is_symlink():
            entry.stat()
        return is_folder
    except OSError:
        if is_video:
            return False
        raise


def _links_out(entry: os.DirEntry[str], *, root: Path, is_used: bool) -> list[tuple[str, str]]:
    """Return the relative path and target of a link that leads out of `root`; an empty list for any other entry."""
    if not is_used or not entry.is_symlink() or not os.path.exists(entry.path):  # noqa: PTH110 - names that are too long
        return []
    target = Path(os.path.normpath(Path(entry.path, "..", Path(entry.path).readlink())))
    return [] if target.is_relative_to(root) else [(os.path.relpath(entry.path, root), str(target))]


_NUM_REQUESTS = 32  # number of parallel requests


def scan_bucket(folder: str, *, skip: str | None = None, beside: frozenset[str] = frozenset()) -> Scan:
    """Find the objects with a video extension under the URL of a folder in a bucket.

    Hidden files and folders, and the folder `skip`, are ignored.

    Args:
        beside: Other extensions to list, in lower case.

    Raises:
        UserError: The URL is not supported; the bucket does not exist or refuses the credentials; the server cannot
            list its files; or there is no object with a video extension.
    """
    split_url(folder)
    if is_web(folder):
        raise UserError(
            f"the files in {folder} cannot be listed: it is on a web server, not in a bucket",
            hint="use `prep manifest folder` with --captions and a table whose column `video` has their names or URLs; "
            "or copy them to a bucket",
        )
    objects = open_objects(folder)
    files: list[VideoFile] = []
    others: list[VideoFile] = []
    omitted: Counter[str] = Counter()
    skipped, num_skipped = None if skip is None else f"{skip.rstrip('/')}/", 0
    try:
        for info in objects.list():
            url, suffix = objects.url_of(info.key), PurePosixPath(info.key).suffix.lower()
            if skipped is not None and url.startswith(skipped):
                num_skipped += suffix in VIDEO_SUFFIXES
                continue
            if any(part.startswith(".") for part in info.key.split("/")):
                continue
            if suffix in VIDEO_SUFFIXES:
                files.append(VideoFile(url, info.key, info.size_bytes))
            elif suffix in beside:
                others.append(VideoFile(url, info.key, info.size_bytes))
            else:
                omitted[suffix] += 1
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"cannot list {mask_secrets(folder)}: {error.strerror or error}", hint="check the URL and the network"
        ) from error
    odd = (key for key in sorted(objects.odd_names) if PurePosixPath(key).suffix.lower() in VIDEO_SUFFIXES)
    faults = [Fault(objects.url_of(key), Reason.BAD_NAME, "an object with such a name cannot be read") for key in odd]
    if not files and num_skipped:
        raise UserError(
            f"all videos in {mask_secrets(folder)} are in the data folder {mask_secrets(str(skip))}, from which "
            "sources are not read",
            hint="use a data folder that does not contain them, with --data",
        )
    if not files:
        raise no_videos(folder, [], omitted=omitted)
    return Scan(sorted(files, key=file_order), faults, sorted(others, key=file_order), omitted=omitted)


def normal_url(name: str, *, base: str | None) -> str:
    """Return the URL for `name` in a table: a URL, or a path relative to the URL `base`.

    Raises:
        UserError: The URL is not supported, has a password or a query string, or refers to this machine's network.
        ValueError: `name` is not a URL, and `base` is None.
    """
    if not is_remote(name):
        if base is None:
            raise ValueError("not a URL, and the command has no folder that it could be in")
        return join_url(base, name.removeprefix("./"))
    root, key = split_url(name)
    scheme_of(root)
    if not is_web(name):
        return f"{root}/{key}"
    if (base is None or root != split_url(base)[0]) and (problem := host_problem(root)) is not None:
        raise UserError(f"{mask_secrets(name)}: {problem}")
    return f"{root}/{quote(key)}"


def named_videos(names: Iterable[str], *, base: str | None) -> Scan:
    """Look up the objects that a table lists; missing objects are omitted.

    Args:
        names: URLs, or paths relative to `base`, with a video extension.
        base: URL of a folder, or None.

    Raises:
        UserError: A bucket does not exist, or it refuses the credentials.
    """
    urls: dict[str, str] = {}  # path relative to the folder, or host and path, by URL
    for name in names:
        try:
            url = normal_url(name, base=base)
        except (UserError, ValueError):
            continue  # reported with its row
        root, key = split_url(url)
        if PurePosixPath(key).suffix.lower() in VIDEO_SUFFIXES:
            urls[url] = _relative_name(url, root=root, key=key, base=base)
    servers = {root: open_objects(root) for root in {split_url(url)[0] for url in urls}}
    files: list[VideoFile] = []
    faults: list[Fault] = []
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        for result in pool.map(lambda item: _look_up(servers, *item), urls.items()):
            if isinstance(result, VideoFile):
                files.append(result)
            elif result is not None:
                faults.append(result)
    return Scan(sorted(files, key=file_order), faults, [])


def _relative_name(url: str, *, root: str, key: str, base: str | None) -> str:
    if base is not None:
        base_root, base_key = split_url(base.rstrip("/"))
        if root == base_root and key.startswith(f"{base_key}/" if base_key else ""):
            return key[len(base_key) + 1 :] if base_key else key
    return f"{root.partition('://')[2]}/{key}"


def _look_up(servers: dict[str, Objects], url: str, relative: str) -> VideoFile | Fault | None:
    root, key = split_url(url)
    try:
        return VideoFile(url, relative, servers[root].info(key).size_bytes)
    except FileNotFoundError:
        return None
    except AccessRefused as error:
        if not is_web(url) and not isinstance(error, AccessDenied):
            raise
        return Fault(url, Reason.UNREADABLE, mask_secrets(str(error).rpartition(": ")[2]))
    except OSError as error:
        return Fault(url, Reason.UNREADABLE, mask_secrets(error.strerror or str(error)))

"""Find video files in a folder, in a bucket or on web servers, and look them up by the names in annotations.

A scan of a folder reads only names and file types, and opens no files. An error affects only the entry or subfolder
that caused it. The listing of a bucket contains the sizes of the objects, so no object is opened. Files on web servers
cannot be listed, so a table must list them.
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
_MAX_LISTED_SUFFIXES = 12

_MAX_COMPARED, _MAX_NAMES, _MAX_NAME_CHARS = 10, 20_000, 200
_MIN_SIMILARITY = 0.75  # for difflib; low enough for a typing error in a short name, too high for unrelated names


class AmbiguousName(Exception):
    """A name matches several files.

    Attributes:
        matches: The files.
    """

    def __init__(self, name: str, matches: list["VideoFile"]) -> None:
        more = ", ..." if len(matches) > 2 else ""
        super().__init__(f"{name!r} matches {len(matches)} files: {matches[0].relative}, {matches[1].relative}{more}")
        self.matches = matches


@dataclass(frozen=True)
class VideoFile:
    """Entry of a folder with the extension of a video or a companion file. The entry need not be a regular file.

    Attributes:
        path: Absolute path of a file, or URL of an object.
        relative: Path relative to the scanned folder, with / as separator.
        size_bytes: Size of an object; None for a local file.
    """

    path: Location
    relative: str
    size_bytes: int | None = None

    @property
    def source_id(self) -> str:
        """Relative path without the extension."""
        return PurePosixPath(self.relative).with_suffix("").as_posix()


@dataclass(frozen=True)
class Fault:
    """A folder or entry that cannot be accessed."""

    path: Location
    reason: Reason
    detail: str


@dataclass(frozen=True)
class Scan:
    """Entries of a folder and its subfolders. All lists are sorted by relative path.

    Attributes:
        files: Entries with a video extension.
        faults: Entries and folders that cannot be accessed.
        companions: Entries with other extensions that were requested, such as subtitles.
        num_hidden: Number of hidden entries with a video extension, which are ignored.
        omitted: Number of other visible entries, by lower-case extension.
        outward_links: Symbolic links that were followed out of the folder, as pairs of relative path and target.
    """

    files: list[VideoFile]
    faults: list[Fault]
    companions: list[VideoFile]
    num_hidden: int = 0
    omitted: Mapping[str, int] = field(default_factory=dict)
    outward_links: Sequence[tuple[str, str]] = ()

    def describe_omitted(self) -> str | None:
        """Describe how many files were omitted for each extension; return None if no file was omitted."""
        if not self.omitted:
            return None
        ranked = sorted(self.omitted.items(), key=lambda item: (-item[1], item[0]))
        counts = [f"{count:,} {on_one_line(suffix) or _NO_SUFFIX}" for suffix, count in ranked[:_MAX_LISTED_SUFFIXES]]
        if rest := sum(count for _, count in ranked[_MAX_LISTED_SUFFIXES:]):
            counts.append(f"{rest:,} others")
        noun = count_noun(sum(self.omitted.values()), "file")
        return f"{noun} without a video extension: {', '.join(counts)}"


def scan_videos(directory: Path, *, skip: Path | None = None, companions: frozenset[str] = frozenset()) -> Scan:
    """Find the entries of a folder and its subfolders that have a video extension.

    Hidden files and folders are ignored. Symbolic links to folders are followed, but each folder is visited only once.

    Args:
        skip: Folder to ignore.
        companions: Other extensions to list, in lower case.

    Raises:
        UserError: `directory` is missing, is not a folder, cannot be read, or has no entry with a video extension.
    """
    require_directory(directory)
    root = directory.resolve()
    files: list[VideoFile] = []
    companion_files: list[VideoFile] = []
    faults: list[Fault] = []
    video_like_folders: list[Path] = []  # folders with a video extension
    num_hidden, omitted = 0, Counter[str]()
    outward_links: list[tuple[str, str]] = []
    seen = set[tuple[int, int]]()  # device and inode of each visited folder
    if skip is not None:
        with suppress(OSError):
            status = skip.stat()
            seen.add((status.st_dev, status.st_ino))
    # Links come last. If a folder is reachable both directly and through a link, its files get the direct paths,
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
            outward_links += _outward_links(entry, root=root, is_used=is_folder or is_video)
            if is_folder:
                heappush(pending, (entry.is_symlink(), path))
                video_like_folders += [path] if is_video else []
            elif is_video:
                files.append(VideoFile(path, path.relative_to(root).as_posix()))
            elif path.suffix.lower() in companions:
                companion_files.append(VideoFile(path, path.relative_to(root).as_posix()))
            else:
                omitted[path.suffix.lower()] += 1
    video_folders = {parent for file in files for parent in Path(file.path).parents} if video_like_folders else set()
    for path in video_like_folders:
        if path not in video_folders:
            faults.append(Fault(path, Reason.NOT_A_FILE, "it is a folder without videos"))
    if not files:
        raise no_videos_error(directory, faults, omitted=omitted)
    files.sort(key=file_order)
    companion_files.sort(key=file_order)
    faults.sort(key=lambda fault: os.fsencode(fault.path))
    return Scan(files, faults, companion_files, num_hidden, omitted, sorted(outward_links))


def no_videos_error(directory: Location, faults: list[Fault], *, omitted: Mapping[str, int]) -> UserError:
    """Return the error for a folder without videos."""
    scan = Scan([], faults, [], omitted=omitted)
    others = f", but {others}" if (others := scan.describe_omitted()) else ""
    details = "".join(f"; {on_one_line(str(fault.path))}: {fault.detail}" for fault in faults[:3])
    return UserError(
        f"no video files in {directory}{details}{others}",
        hint="use files with these extensions: " + " ".join(sorted(suffix[1:] for suffix in VIDEO_SUFFIXES)),
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
    """Lookup of files by relative path or by name, with or without the extension.

    If no name matches exactly, names are compared in Unicode's composed form (NFC), because macOS returns decomposed
    names, but annotations usually contain composed names.
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
        """Return the file that a name refers to, or None if there is no such file.

        Raises:
            AmbiguousName: Several files match, and none of them has exactly this relative path.
        """
        name = name.removeprefix("./")
        matches = self._by_name.get(name) or self._by_composed.get(compose_unicode(name), [])
        if len(matches) < 2:
            return matches[0] if matches else None
        path_matches = [file for file in matches if compose_unicode(file.relative) == compose_unicode(name)]
        if len(path_matches) > 1:
            path_matches = [file for file in path_matches if file.relative == name]
        if len(path_matches) == 1:
            return path_matches[0]
        raise AmbiguousName(name, matches)


class LooseLookup:
    """Lookup of files like `VideoLookup` that ignores case and the kind of path separators.

    Use this lookup for names without an exact match. Spreadsheets and operating systems may change case and separators,
    so `Kitchen\\01.mp4` may mean `kitchen/01.MP4`.
    """

    def __init__(self, files: Sequence[VideoFile]) -> None:
        self._by_name: dict[str, list[VideoFile]] = {}
        for file in files:
            relative = PurePosixPath(file.relative)
            for key in {_fold_name(name) for name in (file.relative, file.source_id, relative.name, relative.stem)}:
                self._by_name.setdefault(key, []).append(file)

    def find(self, name: str) -> VideoFile | None:
        """Return the only file that a name can refer to, or None if there is no such file.

        Raises:
            AmbiguousName: Several files match by name, and none or several of them match by relative path.
        """
        folded_name = _fold_name(name)
        matches = self._by_name.get(folded_name, [])
        path_matches = [file for file in matches if _fold_name(file.relative) == folded_name]
        if len(matches) == 1 or len(path_matches) == 1:
            return (path_matches or matches)[0]
        if matches:
            raise AmbiguousName(name, matches)
        return None


class NearestName:
    """Search for the video file with the most similar name, to suggest it for a name without a match.

    Args:
        files: Video files. If there are too many, only names that are equal except for case are suggested.
        max_compared: Maximum number of names to compare with all files. For any further name, only names that are equal
            except for case are suggested.
    """

    def __init__(self, files: Sequence[VideoFile], *, max_compared: int = _MAX_COMPARED) -> None:
        self._paths: dict[str, str] = {}  # relative path by folded name
        for file in files:
            for key in (file.source_id, PurePosixPath(file.relative).stem):
                self._paths.setdefault(compose_unicode(key).casefold(), file.relative)
        self._num_left = max_compared if len(files) <= _MAX_NAMES else 0

    def find(self, name: str) -> str | None:
        """Return the relative path of the file with the most similar name, or None if no name is similar enough."""
        folded_name = compose_unicode(PurePosixPath(name).with_suffix("").as_posix()).casefold()
        if folded_name in self._paths:
            return self._paths[folded_name]
        if not self._num_left or len(folded_name) > _MAX_NAME_CHARS:
            return None
        self._num_left -= 1  # a comparison takes milliseconds per thousand names
        matches = difflib.get_close_matches(folded_name, self._paths, n=1, cutoff=_MIN_SIMILARITY)
        return self._paths[matches[0]] if matches else None


def compose_unicode(name: str) -> str:
    """Convert a name to Unicode's composed form (NFC), which is used to compare names."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _fold_name(name: str) -> str:
    """Convert a name to a form that ignores differences in separators, case and Unicode form."""
    return compose_unicode(name.strip().replace("\\", "/").removeprefix("./")).casefold()


def file_order(file: VideoFile) -> bytes:
    """Return the sort key of a file: the bytes of its relative path."""
    return file.relative.encode("utf-8", "surrogateescape")


def _entries(folder: Path, seen: set[tuple[int, int]]) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the visible and the hidden entries of a folder, or empty lists if the folder was visited before.

    Args:
        seen: Device and inode of each visited folder. This function adds the folder to this set.
    """
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
    """Return True if an entry is a folder or a link to a folder.

    Raises:
        OSError: The type of an entry without a video extension is unknown. (It may be a broken link to a folder of
            videos. An entry with a video extension is checked again when it is used.)
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


def _outward_links(entry: os.DirEntry[str], *, root: Path, is_used: bool) -> list[tuple[str, str]]:
    """Return [(relative path, target)] for a link that leads out of `root`, or [] for any other entry."""
    if not is_used or not entry.is_symlink() or not os.path.exists(entry.path):  # noqa: PTH110 - names that are too long
        return []
    target = Path(os.path.normpath(Path(entry.path, "..", Path(entry.path).readlink())))
    return [] if target.is_relative_to(root) else [(os.path.relpath(entry.path, root), str(target))]


_NUM_REQUESTS = 32  # number of concurrent requests


def scan_bucket(folder: str, *, skip: str | None = None, companions: frozenset[str] = frozenset()) -> Scan:
    """Find the objects in a folder of a bucket that have a video extension. Hidden files and folders are ignored.

    Args:
        folder: URL of the folder.
        skip: URL of a folder to ignore.
        companions: Other extensions to list, in lower case.

    Raises:
        UserError: The URL is not supported or belongs to a web server, the bucket does not exist or access is denied,
            or there is no object with a video extension.
    """
    split_url(folder)
    if is_web(folder):
        raise UserError(
            f"the files in {folder} cannot be listed: it is on a web server, not in a bucket",
            hint="use `prep manifest folder` with --captions and a table whose column `video` contains the names or "
            "URLs of the files; or copy the files to a bucket",
        )
    objects = open_objects(folder)
    files: list[VideoFile] = []
    companion_files: list[VideoFile] = []
    omitted: Counter[str] = Counter()
    skipped_prefix, num_skipped = None if skip is None else f"{skip.rstrip('/')}/", 0
    try:
        for info in objects.list():
            url, suffix = objects.url_of(info.key), PurePosixPath(info.key).suffix.lower()
            if skipped_prefix is not None and url.startswith(skipped_prefix):
                num_skipped += suffix in VIDEO_SUFFIXES
                continue
            if any(part.startswith(".") for part in info.key.split("/")):
                continue
            if suffix in VIDEO_SUFFIXES:
                files.append(VideoFile(url, info.key, info.size_bytes))
            elif suffix in companions:
                companion_files.append(VideoFile(url, info.key, info.size_bytes))
            else:
                omitted[suffix] += 1
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"cannot list {mask_secrets(folder)}: {error.strerror or error}", hint="check the URL and the network"
        ) from error
    odd_keys = [key for key in sorted(objects.odd_names) if PurePosixPath(key).suffix.lower() in VIDEO_SUFFIXES]
    detail = "an object with such a name cannot be read"
    faults = [Fault(objects.url_of(key), Reason.BAD_NAME, detail) for key in odd_keys]
    if not files and num_skipped:
        raise UserError(
            f"all videos in {mask_secrets(folder)} are in the data folder {mask_secrets(str(skip))}, which is not "
            "searched for videos",
            hint="use a data folder that does not contain the videos, with --data",
        )
    if not files:
        raise no_videos_error(folder, [], omitted=omitted)
    return Scan(sorted(files, key=file_order), faults, sorted(companion_files, key=file_order), omitted=omitted)


def resolve_url(name: str, *, base: str | None) -> str:
    """Return the normalized URL for a name in a table.

    Args:
        name: URL, or path relative to `base`.
        base: URL of a folder on a web server, or None.

    Raises:
        UserError: The URL is not supported, contains a password or a query string, or refers to a private network.
        ValueError: `name` is not a URL, and `base` is None.
    """
    if not is_remote(name):
        if base is None:
            raise ValueError("not a URL, and there is no folder for relative paths")
        return join_url(base, name.removeprefix("./"))
    root, key = split_url(name)
    scheme_of(root)
    if not is_web(name):
        return f"{root}/{key}"
    if (base is None or root != split_url(base)[0]) and (problem := host_problem(root)) is not None:
        raise UserError(f"{mask_secrets(name)}: {problem}")
    return f"{root}/{quote(key)}"


def find_listed_videos(names: Iterable[str], *, base: str | None) -> Scan:
    """Look up the objects that a table lists. Missing objects are omitted.

    Args:
        names: URLs, or paths relative to `base`. Names without a video extension are ignored.
        base: URL of a folder on a web server, or None.

    Raises:
        UserError: A bucket does not exist, or access to it is denied.
    """
    urls: dict[str, str] = {}  # path relative to the folder, or host and path, by URL
    for name in names:
        try:
            url = resolve_url(name, base=base)
        except (UserError, ValueError):
            continue  # reported later, with the row of the table
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

"""Video files in a bucket, which can be listed, and on web servers, where a table has to name them.

The listing of a bucket includes the sizes of the objects; no object is opened.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from urllib.parse import quote

from clipmill.manifests.adapters.annotations import Reason
from clipmill.manifests.adapters.video_files import VIDEO_SUFFIXES, Fault, Scan, VideoFile, file_order, no_videos
from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.stores import AccessDenied, AccessRefused, scheme_of
from clipmill.manifests.storage.urls import host_problem, is_web, mask_secrets, split_url, url_below

_NUM_REQUESTS = 32  # number of parallel requests


def scan_bucket(folder: str, *, skip: str | None = None, beside: frozenset[str] = frozenset()) -> Scan:
    """Find the objects below the URL of a folder in a bucket that have a video extension.

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
            hint="use `prep manifest folder` with --captions and a table whose column `video` has their names or URLs, "
            "or copy them to a bucket",
        )
    objects = open_objects(folder)
    files: list[VideoFile] = []
    others: list[VideoFile] = []
    omitted: Counter[str] = Counter()
    skipped, num_skipped = None if skip is None else f"{skip.rstrip('/')}/", 0
    try:
        for info in objects.list():
            url, suffix = objects.address_of(info.key), PurePosixPath(info.key).suffix.lower()
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
            f"cannot list {mask_secrets(folder)}: {error.strerror or error}", hint="check the address and the network"
        ) from error
    odd = (key for key in sorted(objects.odd_names) if PurePosixPath(key).suffix.lower() in VIDEO_SUFFIXES)
    faults = [
        Fault(objects.address_of(key), Reason.BAD_NAME, "an object with such a name cannot be read") for key in odd
    ]
    if not files and num_skipped:
        raise UserError(
            f"all videos in {mask_secrets(folder)} are in the data folder {mask_secrets(str(skip))}, where "
            "sources are not read",
            hint="give a data folder with --data that does not contain them",
        )
    if not files:
        raise no_videos(folder, [], omitted=omitted)
    return Scan(sorted(files, key=file_order), faults, sorted(others, key=file_order), omitted=omitted)


def normal_url(name: str, *, base: str | None) -> str:
    """Return the URL for `name` in a table: a URL, or a path below the URL `base`.

    Raises:
        UserError: The URL is not supported, has a password or a query string, or leads into this machine's network.
        ValueError: `name` is not a URL, and there is no base.
    """
    if not is_remote(name):
        if base is None:
            raise ValueError("not a URL, and the command gives no folder that it could be in")
        return url_below(base, name.removeprefix("./"))
    root, key = split_url(name)
    scheme_of(root)
    if not is_web(name):
        return f"{root}/{key}"
    if (base is None or root != split_url(base)[0]) and (problem := host_problem(root)) is not None:
        raise UserError(f"{mask_secrets(name)}: {problem}")
    return f"{root}/{quote(key)}"


def named_videos(names: Iterable[str], *, base: str | None) -> Scan:
    """Look up the objects that a table names; missing objects are omitted.

    Args:
        names: URLs, or paths below `base`, with a video extension.
        base: URL of a folder, or None.

    Raises:
        UserError: A bucket does not exist, or it refuses the credentials.
    """
    urls: dict[str, str] = {}  # URL -> path below the folder, or host and path
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


def distinct_names(names: Iterable[object]) -> Iterator[str]:
    """Yield each name once; values that are not strings are omitted."""
    yield from dict.fromkeys(name.strip() for name in names if isinstance(name, str) and name.strip())

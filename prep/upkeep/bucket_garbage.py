"""What a data folder in a bucket can have beside its files: uploads of killed commands, and objects of others.

The parts of an upload that was begun and not completed take room, and no listing shows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.upkeep.own_names import is_ours

if TYPE_CHECKING:
    from clipmill.manifests.storage.s3_requests import OpenUpload
    from clipmill.manifests.storage.working_copy import WorkingCopy


@dataclass(frozen=True)
class BucketGarbage:
    """Uploads that can be aborted, and objects that are kept.

    Attributes:
        foreign: keys that no file of the format can have.
        unknown_because: why the uploads could not be listed, or None.
    """

    uploads: Sequence["OpenUpload"] = ()
    foreign: Sequence[str] = ()
    unknown_because: str | None = None


def find_in_bucket(data_dir: Path) -> BucketGarbage:
    """Find the uploads of killed commands; call it while holding the locks of all columns. Nothing if it is local."""
    if (copy := _copy_of(data_dir)) is None:
        return BucketGarbage()
    foreign = copy.foreign_keys()
    try:
        uploads = [upload for upload in copy.objects.open_uploads() if is_ours(data_dir, upload.key)]
    except (UserError, OSError) as error:  # the account may lack the right, or the server the request
        return BucketGarbage(foreign=foreign, unknown_because=str(getattr(error, "strerror", None) or error))
    return BucketGarbage(uploads, foreign)


def abort(uploads: Sequence["OpenUpload"], data_dir: Path) -> None:
    """Abort uploads, which frees their parts; raises as `Objects` does, and if a lock has been lost in any case."""
    if (copy := _copy_of(data_dir)) is None:
        return
    copy.require_locks()  # files that a successor has removed already take no request
    for upload in uploads:
        copy.require_locks()
        copy.objects.abort(upload)


def _copy_of(data_dir: Path) -> "WorkingCopy | None":
    if (mirror := mirror_of(data_dir)) is None:
        return None
    from clipmill.manifests.storage.working_copy import WorkingCopy

    assert isinstance(mirror, WorkingCopy)
    return mirror

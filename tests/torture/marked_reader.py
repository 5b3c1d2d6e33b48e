"""Process that reads a data folder as training does: `python -m tests.torture.marked_reader DATA CACHE [VARIANT]`.

It opens a variant, prints its name, and then answers each line of its input with a digest of all samples, until the
input ends.
"""

import hashlib
import sys
from pathlib import Path

from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import reading_variants
from clipmill.shards.reader import Variant
from clipmill.train.data.data_folder import folder_path, open_data_folder


def main(address: str, cache: Path, *names: str) -> None:
    chosen = {folder_path(address, cache=cache): {VIDEO: name} for name in names}
    with reading_variants(chosen):
        folder = open_data_folder(address, cache=cache)
        variant = Variant.open(folder.path, tars=folder.tars).require_complete()
        print(variant.directory.name, flush=True)
        for _ in sys.stdin:
            digest = hashlib.sha256()
            for shard in variant.shards():
                content = folder.tars.read(shard.tar_path, 0, shard.tar_bytes) if folder.tars else None
                digest.update(content or shard.tar_path.read_bytes())
            print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

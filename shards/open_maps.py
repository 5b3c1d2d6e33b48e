"""A limit on mapped files: the kernel allows a process 65,530 maps (`vm.max_map_count`), and a dataset may have more
shards. Maps beyond the limit are closed, the least recently used first; their owners map them again when needed.
"""

import threading
import weakref
from collections import OrderedDict
from typing import Protocol

# Of the process, for all variants together. The rest is for maps that are used meanwhile (a few thousand per loader of
# latents), copies of remote tars (clipmill.train.data.mapped_tars) and libraries.
MAX_OPEN_MAPS = 24_576


class MapOwner(Protocol):
    """Something that holds a map which can be closed."""

    def close(self) -> bool:
        """Close the map; return False if it is in use. Must not wait for a lock."""
        ...


class OpenMaps:
    """The open maps of a process, in the order of their last use. Thread-safe; owners are not kept alive."""

    def __init__(self, limit: int = MAX_OPEN_MAPS) -> None:
        self.limit = limit
        self._owners: OrderedDict[int, weakref.ref[MapOwner]] = OrderedDict()
        # Reentrant, because an owner may be collected while the lock is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._owners)

    def used(self, owner: MapOwner) -> None:
        """Note that `owner` has a map and uses it now; close others if there are too many."""
        key = id(owner)
        with self._lock:
            if key in self._owners:
                self._owners.move_to_end(key)
            else:
                self._owners[key] = weakref.ref(owner, lambda _: self._forget(key))
            num_tried = 0
            while len(self._owners) > self.limit and num_tried < len(self._owners):
                oldest, reference = self._owners.popitem(last=False)
                found = reference()
                if found is not None and (found is owner or not found.close()):
                    self._owners[oldest] = reference
                    num_tried += 1

    def closed(self, owner: MapOwner) -> None:
        """Note that `owner` has closed its map."""
        self._forget(id(owner))

    def _forget(self, key: int) -> None:
        with self._lock:
            self._owners.pop(key, None)


OPEN_MAPS = OpenMaps()

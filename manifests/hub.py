"""Downloads from the Hugging Face Hub where there is no network: the cache is looked in at once, without retries.

The packages that download ask a host that does not exist for 25 s a file. They may be missing, so that nothing of them
is imported here.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

_OFFLINE = "HF_HUB_OFFLINE"  # of huggingface_hub, which reads it when it is imported
_ENDPOINT = "https://huggingface.co"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@contextmanager
def hub_if_reachable() -> Iterator[None]:
    """Context manager of a download: if the name of the Hub cannot be resolved, only its cache is looked in.

    Raises:
        ConnectionError: it cannot, and the cache does not have the files.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or _ENDPOINT).hostname or ""
    if _OFFLINE in os.environ or _has_proxy() or _is_known(host):
        yield
        return
    os.environ[_OFFLINE] = "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    before = getattr(constants, _OFFLINE, None)
    if constants is not None:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"{host} cannot be resolved, and the cache does not have the files") from error
    finally:
        del os.environ[_OFFLINE]
        if constants is not None:
            constants.HF_HUB_OFFLINE = before


def _has_proxy() -> bool:
    """Return True if requests go to a proxy, which resolves the names."""
    return any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True

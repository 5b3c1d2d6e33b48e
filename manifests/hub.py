"""Downloads from the Hugging Face Hub without a network: only the cache is used, without retries.

Without this, the packages that download spend 25 s per file on a host that does not exist. They may be missing, so
that none of them is imported here.
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
    """Context manager of a download: if the name of the Hub cannot be resolved, only its cache is used.

    Raises:
        ConnectionError: The name cannot be resolved, and the cache does not have the files.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or _ENDPOINT).hostname or ""
    # If there is a proxy, it resolves the names.
    has_proxy = any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)
    if _OFFLINE in os.environ or has_proxy or _is_known(host):
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


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True

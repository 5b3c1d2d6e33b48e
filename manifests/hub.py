"""Restrict downloads from the Hugging Face Hub to the local cache if the Hub is unreachable.

Without this module, packages that download files would wait 25 s per file for an unreachable host. These packages are
optional, so this module does not import them.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

_OFFLINE = "HF_HUB_OFFLINE"  # environment variable that huggingface_hub reads when it is imported
_ENDPOINT = "https://huggingface.co"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@contextmanager
def hub_if_reachable() -> Iterator[None]:
    """Context manager in which downloads use only the local cache if the Hub's host cannot be resolved.

    Raises:
        ConnectionError: The host name cannot be resolved, and the cache does not contain the files.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or _ENDPOINT).hostname or ""
    # If there is a proxy, it resolves the host name.
    has_proxy = any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)
    if _OFFLINE in os.environ or has_proxy or _can_resolve(host):
        yield
        return
    os.environ[_OFFLINE] = "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    previous = getattr(constants, _OFFLINE, None)
    if constants is not None:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"{host} cannot be resolved, and the cache does not contain the files") from error
    finally:
        del os.environ[_OFFLINE]
        if constants is not None:
            constants.HF_HUB_OFFLINE = previous


def _can_resolve(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True

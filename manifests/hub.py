"""Downloads from the Hugging Face Hub. Without a network, only the cache is used, and no request is retried.

Otherwise, the downloading packages would spend 25 s per file on an unreachable host. These packages are optional, so
this module does not import them.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

_OFFLINE = "HF_HUB_OFFLINE"  # huggingface_hub reads it when it is imported
_ENDPOINT = "https://huggingface.co"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@contextmanager
def hub_if_reachable() -> Iterator[None]:
    """Context manager around a download: if the host name of the Hub cannot be resolved, only the cache is used.

    Raises:
        ConnectionError: The name cannot be resolved, and the cache does not have the files.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT") or _ENDPOINT).hostname or ""
    # A proxy would resolve the host names.
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

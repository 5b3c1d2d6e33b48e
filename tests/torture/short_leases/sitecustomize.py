"""Leases that expire in seconds, and requests that time out earlier.

Every Python interpreter imports a module of this name at startup.
"""

from datetime import timedelta

from clipmill.manifests.storage import leases, stores

EXPIRY_S = 4.0


def shorten() -> None:
    """Shorten the leases of this process."""
    leases.EXPIRY_S, leases.RENEWAL_S, leases.WRITE_LIMIT_S, leases._MARGIN_S = EXPIRY_S, 0.5, 1.0, 1.5
    leases.LAST_POLL_S = 0.5
    stores._TIMEOUTS["read_timeout"] = stores._WRITE_TIMEOUTS["timeout"] = timedelta(seconds=1)
    stores._WRITE_RETRY["retry_timeout"] = timedelta(milliseconds=100)


if __name__ == "sitecustomize":
    shorten()

"""Starting a private Ray instance, or connecting to a cluster."""

import logging
import os
import re
import socket
import sys
from contextlib import chdir
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.prep.engines.ray_agents import end_agents_with_this_process

_ANSWER_LIMIT_S = 10.0
_START_HINT = "start one with `ray start --head`, or omit --address to start Ray on this machine"
_VERSION_HINT = "install the same Python and the same Ray on every node and where this command runs"
_JOB_VARIABLE, _ADDRESS_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS"


def cluster_address(asked: str | None) -> str | None:
    """Return the value of `--address`; inside a Ray job the default is the job's cluster."""
    return asked if asked is not None or _JOB_VARIABLE not in os.environ else os.environ.get(_ADDRESS_VARIABLE, "auto")


def name_of_cluster(address: str | None) -> str:
    """Return the name of a Ray instance for messages."""
    return "Ray on this machine" if address is None else f'the Ray cluster at "{address}"'


def starting_text(address: str | None) -> str:
    """Return what is shown until Ray takes the first task."""
    name = name_of_cluster(address)
    return f"starting {name} (takes up to 30 s)" if address is None else f"connecting to {name}"


def connect(ray: Any, address: str | None, *, num_cpus: int | None = None) -> None:
    """Start a private instance with `num_cpus` CPUs, or connect to the cluster at `address`.

    Raises:
        UserError: Ray cannot start here, nothing answers at the address, or the cluster has another version.
        FailedWork: Ray did not start, for example because one of its processes was killed.
    """
    if address is None:
        # A private instance on this machine needs no token file in the user's home directory.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        try:
            _init(ray, address="local", num_cpus=num_cpus, include_dashboard=False)
        except Exception as error:  # noqa: BLE001 - Ray raises plain ones, too
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise UserError(  # for example, socket paths are limited to 107 bytes
                    f"Ray cannot start on this machine: {error}",
                    hint="set RAY_TMPDIR to a writable folder with a short path, or use --engine processes",
                ) from None
            raise FailedWork(  # for example, one of its processes was killed
                f"Ray did not start on this machine: {first_line(error).rstrip('.')}; run the same command again"
            ) from None
        end_agents_with_this_process(ray)
        return
    try:
        _require_answer(ray, address)
        _init(ray, address=address)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f'cannot connect to a Ray cluster at "{address}": {_reason(error)}',
            hint=_VERSION_HINT if "Version mismatch" in str(error) else _START_HINT,
        ) from None


def _init(ray: Any, **options: Any) -> None:
    """Call `ray.init` from a folder without Python files.

    Workers import from the folder that it is called from before all others: a `numpy.py` of the user would be run.
    """
    with chdir(sys.prefix):
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _require_answer(ray: Any, address: str) -> None:
    """Raise OSError if nothing listens at `host:port`; Ray itself would retry for minutes."""
    if address == "auto":  # the cluster that was started last on this machine, which may have ended
        address = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()
        except OSError as error:
            raise OSError(f"nothing answers at {address} ({error.strerror or error})") from None


def _reason(error: Exception) -> str:
    versions = re.findall(r"(Ray|Python): (\S+)", str(error))
    if "Version mismatch" in str(error) and len(versions) == 4:
        theirs, ours = (" and ".join(" ".join(pair) for pair in versions[begin : begin + 2]) for begin in (0, 2))
        return f"it runs {theirs}, but this command runs {ours}"
    return first_line(error)

"""Starting a private Ray instance, or connecting to a cluster.

Whoever can send work to a Ray instance runs code as its user. A private instance therefore listens on the loopback
interface only, takes work only with a token that is made for it, and keeps its sockets in a folder of its user.
"""

import logging
import os
import re
import secrets
import socket
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.prep.engines.ray_agents import name_agents, start_sweeper

START_LIMIT_S = 60.0  # for Ray to start on this machine; 5 s on an idle one
_ANSWER_LIMIT_S = 10.0
_START_HINT = "start one with `ray start --head`, or give --engine processes to use this machine only"
_TOKEN_HINT = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token as on the nodes of the cluster"
_VERSION_HINT = "install the same Python and the same Ray on every node and where this command runs"


def name_of_cluster(address: str | None) -> str:
    """Return the name of a Ray instance for messages."""
    return "Ray on this machine" if address is None else f'the Ray cluster at "{address}"'


def starting_text(address: str | None) -> str:
    """Return what is shown until Ray takes the first task."""
    name = name_of_cluster(address)
    return f"starting {name} (takes up to {START_LIMIT_S:g} s)" if address is None else f"connecting to {name}"


def make_private() -> None:
    """Set the environment of a private instance; Ray reads it when it is imported."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # The only switch that makes every process of Ray listen on the loopback interface, on Linux too.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def connect(ray: Any, address: str | None, *, num_cpus: int | None = None) -> None:
    """Start a private instance with `num_cpus` CPUs, or connect to the cluster at `address`.

    Raises:
        UserError: Ray cannot start here, nothing answers at the address, or the cluster has another version or token.
        FailedWork: Ray did not start, for example because one of its processes was killed.
    """
    if address is None:
        try:
            parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            folder = Path(tempfile.mkdtemp(prefix="ray", dir=parent))
            start_sweeper(folder)
            # Ray opens its own folder to all users, so that is one within.
            _init(ray, address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=os.fspath(folder / "r"))
        except Exception as error:  # noqa: BLE001 - Ray raises plain ones, too
            if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
                raise UserError(  # for example, socket paths are limited to 107 bytes
                    f"Ray cannot start on this machine: {error}",
                    hint="set RAY_TMPDIR to a writable folder with a short path, or use --engine processes",
                ) from None
            raise FailedWork(  # for example, one of its processes was killed
                f"Ray did not start on this machine: {first_line(error).rstrip('.')}; run the same command again, "
                "or with --engine processes"
            ) from None
        name_agents(ray)
        return
    try:
        _require_answer(ray, address)
        _init(ray, address=address)
    except ray.exceptions.AuthenticationError:
        raise UserError(f'the Ray cluster at "{address}" requires another token', hint=_TOKEN_HINT) from None
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
    """Raise the error of a cluster that does not answer, or refuses the token; Ray itself would retry for minutes."""
    if address == "auto":  # the cluster that was started last on this machine, which may have ended
        address = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()
        except OSError as error:
            raise OSError(f"nothing answers at {address} ({error.strerror or error})") from None
        ray._raylet.GcsClient(address=address)


def _reason(error: Exception) -> str:
    versions = re.findall(r"(Ray|Python): (\S+)", str(error))
    if "Version mismatch" in str(error) and len(versions) == 4:
        theirs, ours = (" and ".join(" ".join(pair) for pair in versions[begin : begin + 2]) for begin in (0, 2))
        return f"it runs {theirs}, but this command runs {ours}"
    return first_line(error)

"""Fixtures of object storage; tests/conftest.py provides them to every test."""

import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from clipmill.manifests.storage import mirrors
from tests.object_storage.faults import Faults, faulty
from tests.object_storage.server import S3Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Run a real S3 server that the environment of this process points to."""
    with s3_server() as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment().items():
            environment.setenv(name, value)
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """URL of an empty bucket: s3://NAME."""
    return s3.make_bucket(f"test-{secrets.token_hex(8)}")


@pytest.fixture(scope="session")
def _proxy(s3: S3Server) -> Iterator[Faults]:
    with faulty(s3.port) as proxy:
        yield proxy


@pytest.fixture
def faults(s3: S3Server, _proxy: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Start a fault proxy in front of the server, without faults, and let the environment point to it."""
    _proxy.set()
    monkeypatch.setenv("AWS_ENDPOINT_URL", _proxy.endpoint)
    yield _proxy
    _proxy.set()


@pytest.fixture
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients in this process give up after two retries within a second."""
    backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2}
    settings = {"max_retries": 2, "retry_timeout": timedelta(seconds=5), "backoff": backoff}
    for kind in ("", "_WRITE"):
        monkeypatch.setattr(f"clipmill.manifests.storage.stores.{kind}_RETRY", settings)
        monkeypatch.setattr(
            f"clipmill.manifests.storage.stores.{kind}_TIMEOUTS", {"read_timeout": timedelta(seconds=1)}
        )
    monkeypatch.setattr("clipmill.manifests.storage.objects.RETRY_S", 2.0)


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that makes this process act as a different machine, without local copies."""

    def move() -> Path:
        scratch = tmp_path_factory.mktemp("scratch")
        monkeypatch.setenv("TMPDIR", str(scratch))
        monkeypatch.setattr(mirrors, "_mounted", {})
        return scratch

    return move

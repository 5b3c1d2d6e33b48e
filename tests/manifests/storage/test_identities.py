"""Tests of machine identities at Google and Azure, with a local server that issues tokens and accepts only these."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import open_objects

LIFE_S = 1


@dataclass
class Identities:
    """Server of tokens, and of one object.

    Attributes:
        num_tokens: Number of tokens that it has issued.
        used: Headers of the requests for the object.
    """

    url: str = ""
    num_tokens: int = 0
    used: list[str | None] = field(default_factory=list)

    def answer(self, path: str, authorization: str | None) -> bytes:
        """Return the body of the response to a request."""
        if "token" not in path:
            self.used.append(authorization)
            return b"content"
        self.num_tokens += 1
        lives = {"expires_in": LIFE_S, "expires_on": str(int(time.time()) + LIFE_S)}
        token = {"access_token": f"token-{self.num_tokens}", "token_type": "Bearer", **lives}
        return json.dumps(token).encode()


@pytest.fixture
def identities() -> Iterator[Identities]:
    """Run a server within the test."""
    known = Identities()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = known.answer(self.path, self.headers.get("Authorization"))
            self.send_response(200)
            headers = {"ETag": '"1"', "Last-Modified": "Sun, 29 Nov 2026 21:00:00 GMT", "x-goog-generation": "1"}
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield known
        server.shutdown()


KINDS = {
    "gs-machine": {"GCE_METADATA_HOST": "{host}"},
    "az-machine": {"AZURE_MSI_ENDPOINT": "{url}/token"},
    "az-service": {"IDENTITY_ENDPOINT": "{url}/token", "IDENTITY_HEADER": "secret"},
    "az-workload": {
        "AZURE_AUTHORITY_HOST": "{url}",
        "AZURE_CLIENT_ID": "client",
        "AZURE_TENANT_ID": "tenant",
        "AZURE_FEDERATED_TOKEN_FILE": "{file}",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_an_identity_are_renewed(
    kind: str, identities: Identities, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "subject").write_text("subject")
    url, host = identities.url, identities.url.removeprefix("http://")
    variables = {
        "GOOGLE_BASE_URL": url,
        "GOOGLE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ENDPOINT": f"{url}/account",
        "AZURE_ALLOW_HTTP": "true",
    }
    for name, value in {**variables, **KINDS[kind]}.items():
        monkeypatch.setenv(name, value.format(url=url, host=host, file=tmp_path / "subject"))
    objects = open_objects(f"{kind[:2]}://clips/data")
    assert objects.read("key") == b"content"
    time.sleep(LIFE_S + 0.1)
    assert objects.read("key") == b"content"
    assert identities.used == ["Bearer token-1", f"Bearer token-{identities.num_tokens}"]
    assert identities.num_tokens > 1


def test_accounts_of_other_providers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (account := tmp_path / "account.json").write_text(json.dumps({"type": "external_account"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account))
    with pytest.raises(UserError, match=r"gs://clips/data cannot be opened: .*external_account") as error:
        open_objects("gs://clips/data")
    assert "GOOGLE_APPLICATION_CREDENTIALS (the path of a service account's key file)" in str(error.value.hint)

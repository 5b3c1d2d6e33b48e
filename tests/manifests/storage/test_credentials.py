"""Tests of credentials that are renewed while they are used: each kind, with keys that expire after seconds."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import AccessRefused, open_objects
from clipmill.manifests.storage.s3_requests import S3Requests
from tests.conftest import ROOT
from tests.object_storage.faults import CONTAINER, Fault, Faults, faulty
from tests.object_storage.server import S3Server

LIFE_S = 6.0
ROLE = "arn:aws:iam::123456789012:role/reader"
MIB = 1 << 20
# A credential process whose keys expire soon.
PROCESS = """
import json, sys
sys.path.insert(0, {root!r})
from tests.object_storage.faults import expiring_key
key = expiring_key({life_s})
print(json.dumps({{"Version": 1, "SessionToken": key.pop("Token"), **key}}))
"""


def write_certificate(path: Path) -> Path:
    """Write a certificate for this machine's loopback interface, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, form, serialization.NoEncryption())
    path.write_bytes(certificate.public_bytes(encoding) + private)
    return path


@pytest.fixture
def use_credentials(faults: Faults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that makes this process use one kind of credentials, which expire."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)

    def lead(kind: str) -> None:
        faults.set(key_life_s=LIFE_S)
        if kind == "instance":
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", faults.endpoint)
        elif kind == "container":
            (tmp_path / "token").write_text("token")
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", faults.endpoint + CONTAINER)
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        else:
            (tmp_path / "keys.py").write_text(PROCESS.format(root=str(ROOT), life_s=LIFE_S))
            (tmp_path / "config").write_text(
                "[profile base]\naws_access_key_id=a\naws_secret_access_key=b\n"
                f"[profile role]\nrole_arn={ROLE}\nsource_profile=base\n"
                f"[profile process]\ncredential_process={sys.executable} {tmp_path / 'keys.py'}\n"
            )
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
            monkeypatch.setenv("AWS_PROFILE", kind)

    return lead


def use(bucket: str, faults: Faults) -> None:
    """Use one client for longer than its first keys are valid, and upload for longer than any key is valid."""
    objects = open_objects(bucket)
    objects.write("small", b"content")
    assert objects.read("small") == b"content"
    content = bytes(5 * 8 * MIB)  # four parts at a time
    faults.set(latency_s=LIFE_S / 3, key_life_s=LIFE_S)
    objects.write("large", content)
    assert objects.info("large").size_bytes == len(content)
    seen = faults.seen()
    assert len(seen.keys) > 1 and seen.num_expired == 0


@pytest.mark.parametrize("kind", ["instance", "container", "role", "process"])
def test_keys_are_renewed_before_they_expire(
    kind: str, bucket: str, faults: Faults, use_credentials: Callable[[str], None]
) -> None:
    use_credentials(kind)
    use(bucket, faults)
    # Requests that this package signs itself use the same keys.
    objects = open_objects(bucket)
    assert list(S3Requests(bucket, objects._store).open_uploads()) == []


def test_a_write_waits_for_an_instance_that_gives_no_keys_for_a_while(
    bucket: str, faults: Faults, use_credentials: Callable[[str], None]
) -> None:
    use_credentials("instance")
    faults.set(Fault("error", path="^/latest/", status=503, for_s=6.0), key_life_s=LIFE_S)
    objects = open_objects(bucket)
    objects.write("small", b"content")
    assert objects.read("small") == b"content"


def test_keys_of_a_web_identity_are_renewed_before_they_expire(
    s3: S3Server, bucket: str, faults: Faults, use_credentials: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = write_certificate(tmp_path / "certificate.pem")
    (tmp_path / "token").write_text("identity")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    with faulty(s3.port, certificate=certificate) as sts:  # obstore contacts an STS only with TLS
        sts.set(key_life_s=LIFE_S)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.endpoint)
        use(bucket, faults)


def test_keys_that_cannot_be_renewed_and_unknown_profiles_are_named(
    bucket: str, faults: Faults, use_credentials: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_credentials("role")
    objects = open_objects(bucket)
    objects.write("small", b"content")
    faults.set(Fault("error", method="POST", path="^/$", status=403, code="AccessDenied"), key_life_s=LIFE_S)
    with pytest.raises(
        AccessRefused, match=r"the credentials cannot be renewed: ClientError: .* AssumeRole"
    ) as refused:
        open_objects(bucket).read("small")
    assert refused.value.hint == "check the profile in AWS_PROFILE"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(
        UserError, match=r"the AWS profile nobody \(AWS_PROFILE\) does not provide credentials"
    ) as unknown:
        open_objects(bucket)
    assert "AWS_CONFIG_FILE" in str(unknown.value.hint)

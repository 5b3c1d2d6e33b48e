"""Tests of S3 requests without obstore: signed as botocore signs them, and with every name that a bucket can have."""

import re
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from urllib.parse import parse_qsl, quote, urlencode

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import is_odd, open_objects
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.google import google_server
from tests.object_storage.server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.prep.running import wait_until

PLAIN = [*(f"k{number}" for number in range(5)), "a b+c", "\u00e4/%2F", "x/y"]
ODD = ["a//b", "x/../y", "x/./y", "..", "/", "/k", "line\x01"]


def test_names_that_obstore_refuses_are_set_aside_and_all_others_listed(
    s3: S3Server, bucket: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.manifests.storage.objects.PAGE", 2)
    for key in (*PLAIN, *ODD):
        s3.put(f"{bucket}/some folder", key)
    objects = open_objects(f"{bucket}/some folder")
    faults.set(Fault("error", path="max-keys=2", every=4), Fault("cut", path="max-keys=2", every=3, skip=1))
    assert sorted(info.key for info in objects.list()) == sorted(PLAIN)
    assert objects.odd_names == set(ODD) and faults.seen().num_faults >= 4
    faults.set()
    assert {info.key for info in objects.list(recursive=False)} == {key for key in PLAIN if "/" not in key}
    assert [info.key for info in objects.list("x")] == ["x/y"]
    assert {info.key for info in open_objects(bucket).list()} == {f"some folder/{key}" for key in PLAIN}
    _require_signed(faults)
    assert is_odd("a/") is is_odd("") is False


def test_a_name_that_another_cloud_cannot_list_is_named(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with google_server(s3) as google:
        for name, value in google.environment().items():
            monkeypatch.setenv(name, value)
        s3.put(bucket, "data/a//b")
        with pytest.raises(UserError, match="cannot be listed: data/a//b") as told:
            list(open_objects(f"{bucket.replace('s3', 'gs')}/data").list())
    assert "rename or remove" in (told.value.hint or "")


def test_an_upload_of_a_killed_process_is_found_and_aborted(bucket: str, faults: Faults, tmp_path: Path) -> None:
    (tmp_path / "tar").write_bytes(bytes(9 * 2**20))
    program = "from clipmill.manifests.storage.objects import open_objects; from pathlib import Path; import sys\n"
    program += "open_objects(sys.argv[1]).write('a folder/k.tar', Path(sys.argv[2]))"
    faults.set(Fault("hang", method="PUT", path="partNumber=2"))
    with Popen([sys.executable, "-c", program, bucket, tmp_path / "tar"], stderr=PIPE) as process:
        wait_until(lambda: faults.seen().num_faults)
        process.kill()
    faults.set()
    objects = open_objects(bucket)
    (upload,) = objects.open_uploads()
    assert upload.key == "a folder/k.tar" and not list(objects.list())
    objects.abort(upload)
    assert not list(objects.open_uploads())
    _require_signed(faults)


def _require_signed(faults: Faults) -> None:
    """Compare the signatures of requests without obstore with botocore's signatures."""
    signed = [(method, path) for method, path in faults.seen().requests if "X-Amz-Signature=" in path]
    assert signed
    for method, path in signed:
        where, _, query = path.partition("?")
        *pairs, (_, signature) = parse_qsl(query, keep_blank_values=True)
        url = f"{faults.endpoint}{where}?{urlencode(pairs, quote_via=quote, safe='')}"  # as a server reads it
        request = AWSRequest(method, url, headers={"host": faults.endpoint.partition("//")[2]})
        request.context["timestamp"] = re.search(r"X-Amz-Date=(\w+)", path)[1]  # type: ignore[index]
        signer = S3SigV4QueryAuth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", "us-east-1")
        text = signer.string_to_sign(request, signer.canonical_request(request))
        assert signer.signature(text, request) == signature, path

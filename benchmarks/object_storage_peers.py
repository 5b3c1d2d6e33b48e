"""Program of the clients that `benchmarks.object_storage` compares: `object_storage_peers NAME ADDRESS`.

    {"do": "get", "keys": [...]}     read objects one after another: {"bytes": ..., "cpu_s": ..., "seconds": ...}

Each client runs in a separate process. boto3 and s3fs are in the environment of `make peers`, without clipmill.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peer_process import answer_requests

Read = Callable[[str], bytes]


def open_clipmill(bucket: str) -> Read:
    """Return a reader with clipmill's client, which uses obstore."""
    from clipmill.manifests.storage.objects import open_objects

    return open_objects(f"s3://{bucket}").read


def open_boto3(bucket: str) -> Read:
    """Return a reader with AWS's client, boto3."""
    import boto3

    client = boto3.client("s3")
    return lambda key: bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def open_s3fs(bucket: str) -> Read:
    """Return a reader with fsspec's client, s3fs, which uses aiobotocore."""
    import s3fs

    client = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    return lambda key: bytes(client.cat_file(f"{bucket}/{key}"))


CLIENTS: dict[str, Callable[[str], Read]] = {"clipmill": open_clipmill, "boto3": open_boto3, "s3fs": open_s3fs}


def main() -> None:
    """Answer requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("bucket")
    arguments = parser.parse_args()
    opened: list[Read] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if not opened:
            opened.append(CLIENTS[arguments.client](arguments.bucket))
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        num_bytes = sum(len(opened[0](key)) for key in request["keys"])
        return {
            "bytes": num_bytes,
            "cpu_s": time.process_time() - begin_cpu_s,
            "seconds": time.perf_counter() - begin_s,
        }

    answer_requests(answer)


if __name__ == "__main__":
    main()

"""List the supported kinds of object storage, with the form of their URLs and their environment variables.

obstore reads the variables itself. They are listed here for error messages, and for checks before the first request.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cloud:
    """A kind of object storage.

    Attributes:
        form: Form of the URLs, for messages.
        credentials: Variables with the credentials of an account, for messages.
        endpoints: Variables with the URL of a server other than the provider's. Messages mention the first variable.
        allow_http: Variable that must be true if the URL of the server begins with http://.
        reports_clock: True if the server's error codes tell when the clock of this machine is wrong.
        max_deletions: Maximum number of objects that one request can delete.
    """

    form: str
    credentials: str = ""
    endpoints: tuple[str, ...] = ()
    allow_http: str = ""
    reports_clock: bool = False
    max_deletions: int = 1


_AZURE = Cloud(
    "az://CONTAINER/FOLDER",
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)",
    endpoints=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    allow_http="AZURE_ALLOW_HTTP",
    max_deletions=256,
)
CLOUDS = {
    "s3": Cloud(
        "s3://BUCKET/FOLDER",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        endpoints=("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        allow_http="AWS_ALLOW_HTTP",
        reports_clock=True,
        max_deletions=1000,
    ),
    "gs": Cloud(
        "gs://BUCKET/FOLDER",
        "GOOGLE_APPLICATION_CREDENTIALS (the path of a service account's key file)",
        endpoints=("GOOGLE_BASE_URL",),
        allow_http="GOOGLE_ALLOW_HTTP",
    ),
    "az": _AZURE,
    "abfs": _AZURE,
    "http": Cloud("http://HOST/FOLDER"),
    "https": Cloud("https://HOST/FOLDER"),
}


def cloud_of(url: str) -> Cloud:
    """Return the kind of object storage of a URL with a supported scheme."""
    return CLOUDS[url.partition("://")[0].lower()]

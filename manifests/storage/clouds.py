"""The kinds of object storage: the form of their URLs, and the environment variables for servers and accounts.

The client library reads the variables. They are listed here for checks before a request and for error messages.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cloud:
    """A kind of object storage.

    Attributes:
        form: Form of its URLs.
        credentials: Variables with the credentials of an account, for messages.
        endpoints: Variables with the URL of a server that is not the provider's; messages contain the first variable.
        allow_http: Variable that must be true if that URL begins with http://.
        names_clock: True if the server reports that the clock of this machine is wrong.
        num_deleted: Maximum number of objects that one request deletes.
    """

    form: str
    credentials: str = ""
    endpoints: tuple[str, ...] = ()
    allow_http: str = ""
    names_clock: bool = False
    num_deleted: int = 1


_AZURE = Cloud(
    "az://CONTAINER/FOLDER",
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)",
    endpoints=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    allow_http="AZURE_ALLOW_HTTP",
    num_deleted=256,
)
CLOUDS = {
    "s3": Cloud(
        "s3://BUCKET/FOLDER",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        endpoints=("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        allow_http="AWS_ALLOW_HTTP",
        names_clock=True,
        num_deleted=1000,
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


def cloud_of(address: str) -> Cloud:
    """Return the kind of object storage for a URL with a supported scheme."""
    return CLOUDS[address.partition("://")[0].lower()]

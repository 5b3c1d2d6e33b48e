"""The kinds of object storage: the form of their addresses, and the variables that lead to a server and an account.

The client reads the variables itself; they are named here for what is checked before a request and for error messages.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cloud:
    """A kind of object storage.

    Attributes:
        form: how its addresses look.
        credentials: the variables of an account, for messages.
        endpoints: variables with the URL of another server than the provider's; the first one is in messages.
        allow_http: variable that must be true if that URL begins with http://.
        names_clock: whether the server says so when the clock of this machine is off.
        num_deleted: how many objects one request deletes at most.
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
    """Return the kind of object storage of an address with a scheme that is supported."""
    return CLOUDS[address.partition("://")[0].lower()]

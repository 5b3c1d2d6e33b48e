"""Get the credentials of an AWS profile from boto3, which renews the credentials of roles, processes and SSO.

The extra `aws` installs boto3.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider

from clipmill.manifests.errors import UserError, first_line

# Lifetime reported to obstore. obstore requests new credentials five minutes before they expire, so it uses them for
# one minute. This is safe, because boto3 renews credentials ten minutes before they expire.
_CACHE_TIME = timedelta(minutes=6)
_SHORT_LIFETIME_S = 120  # remaining lifetime below which each request gets the credentials from boto3


class ProfileCredentials(Boto3CredentialProvider):
    """Credential provider for a profile. It sets expiry times, so that obstore never uses expired credentials."""

    def __call__(self) -> Any:
        """Return valid credentials, with the time at which obstore must request new ones."""
        credentials = super().__call__()
        expires_within = getattr(self.credentials, "refresh_needed", None)  # missing for keys from a file
        if expires_within is not None and expires_within(refresh_in=_SHORT_LIFETIME_S):
            credentials["expires_at"] = datetime.now(UTC) + timedelta(seconds=1)
        return credentials


def provider_of_profile(profile: str) -> ProfileCredentials:
    """Return a provider for the credentials of a profile in AWS's configuration files. No request is sent yet.

    Raises:
        UserError: The profile does not exist, or has no credentials.
    """
    try:
        return ProfileCredentials(ttl=_CACHE_TIME)
    except (BotoCoreError, ValueError) as error:
        raise UserError(
            f"the AWS profile {profile} (AWS_PROFILE) does not provide credentials: {first_line(error)}",
            hint="correct AWS_PROFILE, or the profile in ~/.aws/config ($AWS_CONFIG_FILE)",
        ) from None

"""Credentials of an AWS profile, which boto3 renews: assumed roles, credential processes, single sign-on.

boto3 is an optional package, the extra `aws`.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider

from clipmill.manifests.errors import UserError, first_line

# obstore requests new credentials five minutes before the expiry time that it is given. boto3 renews credentials ten
# minutes before they expire, so they are still valid a minute later.
_HELD = timedelta(minutes=6)
_SOON_S = 120  # lifetime below which credentials are requested from boto3 for each request


class ProfileCredentials(Boto3CredentialProvider):
    """obstore's provider, which caches credentials for a time that fits their lifetime."""

    def __call__(self) -> Any:
        """Return valid credentials; they are renewed before they expire."""
        credentials = super().__call__()
        expires_within = getattr(self.credentials, "refresh_needed", None)  # keys from a file do not expire
        if expires_within is not None and expires_within(refresh_in=_SOON_S):
            credentials["expires_at"] = datetime.now(UTC) + timedelta(seconds=1)
        return credentials


def provider_of_profile(profile: str) -> ProfileCredentials:
    """Return a provider for the credentials of a profile in AWS's configuration files; no request is sent yet.

    Raises:
        UserError: The profile does not exist, or has no credentials.
    """
    try:
        return ProfileCredentials(ttl=_HELD)
    except (BotoCoreError, ValueError) as error:
        raise UserError(
            f"the AWS profile {profile} (AWS_PROFILE) does not provide credentials: {first_line(error)}",
            hint="correct AWS_PROFILE, or the profile in ~/.aws/config ($AWS_CONFIG_FILE)",
        ) from None

"""The clusters of these tests take work only with a token, as the documentation teaches."""

import os
import secrets

# Ray reads them once in a process, when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

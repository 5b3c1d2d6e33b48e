"""Startup hook that intercepts all processes of a command.

Every Python interpreter imports a module of this name at startup.
"""

import os

if "CLIPMILL_TORTURE_WATCH" in os.environ:
    from tests.torture.interposer.calls import install

    install()

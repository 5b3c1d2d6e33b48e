"""Every Python interpreter imports a module of this name at startup, so all processes of a command are intercepted."""

import os

if "CLIPMILL_TORTURE_WATCH" in os.environ:
    from tests.torture.interposer.calls import install

    install()

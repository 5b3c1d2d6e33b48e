"""Every Python imports a module of this name at its start: so all processes of a command are watched."""

import os

if "CLIPMILL_TORTURE_WATCH" in os.environ:
    from tests.torture.interposer.calls import install

    install()

#!/bin/sh
# Checks and measures on this machine what needs a GPU. No network, no compiler and no root are needed.
#
#     ./run.sh OUT [--part A|B|C] [--minutes 9] [--dry-run]
#
# OUT gets the results. $PYTHON is the interpreter, else the first of the candidates below that has torch.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

is_right() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
has_torch() { "$1" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("torch") is None)' 2>/dev/null; }

python=
if [ -n "${PYTHON:-}" ]; then
    if is_right "$PYTHON"; then python=$PYTHON; fi
else
    for name in python3 python python3.12 python3.13 python3.11; do
        if is_right "$name"; then
            if has_torch "$name"; then python=$name; break; fi
            python=${python:-$name}
        fi
    done
fi
if [ -z "$python" ]; then
    echo "error: ${PYTHON:-python3} does not run as Python 3.11, 3.12 or 3.13" >&2
    echo "hint: name one with PYTHON=/path/to/python3.12" >&2
    exit 2
fi

# The kit stays as it was carried here, even where it could be written to.
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$here/checkout${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m scripts.gpu_kit.run --kit "$here" "$@"

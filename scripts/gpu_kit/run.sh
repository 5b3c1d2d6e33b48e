#!/bin/sh
# Checks and measures on this machine what needs a GPU. No network, no compiler and no root are needed.
#
#     ./run.sh OUT [--part A|B|C] [--minutes 9] [--dry-run]
#
# OUT gets the results. $PYTHON is the interpreter, else the first of the candidates below that has torch.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

for name in checkout checkout/COMMIT checkout/pyproject.toml checkout/scripts/gpu_kit/start.py data; do
    if [ ! -e "$here/$name" ]; then
        echo "error: this kit is incomplete: there is no $here/$name" >&2
        echo "hint: copy the whole kit to this machine again" >&2
        exit 2
    fi
done

# Nothing of the folder that this is called in is imported: it may hold a torch or a tokenize.py of its own. An empty
# entry of PYTHONPATH stands for that folder, too.
PYTHONPATH=$(printf %s "${PYTHONPATH:-}" | tr -s : | sed 's/^://; s/:$//')
export PYTHONSAFEPATH=1 PYTHONPATH

version_of() { "$1" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_right() { case "$(version_of "$1")" in "Python 3.11" | "Python 3.12" | "Python 3.13") ;; *) return 1 ;; esac; }
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
    version=$(version_of "${PYTHON:-python3}")
    case "$version" in "Python "*) what="it is $version" ;; *) what="it is not a working Python" ;; esac
    echo "error: ${PYTHON:-python3} does not run as Python 3.11, 3.12 or 3.13: $what" >&2
    echo "hint: name one with PYTHON=/path/to/python3.12" >&2
    exit 2
fi

# The kit stays as it was carried here, even where it could be written to.
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$here/checkout${PYTHONPATH:+:$PYTHONPATH}"
# Signals are for the program, which ends what it has started.
exec "$python" -P -m scripts.gpu_kit.start --kit "$here" "$@"

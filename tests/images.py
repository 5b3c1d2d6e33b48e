"""Images of the Dockerfiles without docker: each stage is a folder over the files of this machine, entered by chroot.

A stage sees this machine's programs in place of its base image, without compilers and with this Python as `python`.
What it writes stays in its folder. That takes root, namespaces and overlayfs, as a build with docker does.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# This Python, as `python`: it is called by its own path, next to which it finds its library.
_PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
# Registries, certificates and caches of this machine, which a build with docker has from its own settings.
_PASSED = ("PIP_", "UV_", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy")
_COMPILERS = "cc c++ gcc g++ cpp as ld clang clang++ tcc"
_ENTER = """
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
for folder in dev proc sys; do mount --rbind "/$folder" "$1/root/$folder"; done
"""


@dataclass
class Stage:
    """A stage of a Dockerfile: its shell commands so far, and what the next one starts with."""

    commands: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": f"{_PYTHON.parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    user: str = "0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)

    def run(self, words: str) -> str:
        """Return the command that runs a shell command in the stage."""
        is_root = self.user == "0"
        passed = {name: value for name, value in os.environ.items() if is_root and name.startswith(_PASSED)}
        passed |= {"HOME": os.environ["HOME"]} if is_root else {}
        # Gigabytes stay in the cache of this machine, which all stages see; clipmill itself is built in a stage.
        passed |= {"UV_LINK_MODE": "symlink"} if "pip sync" in words else {}
        variables = [f"{name}={value}" for name, value in {**passed, **self.environment}.items()]
        inside = f"{'' if is_root else 'export HOME=~clipmill && '}cd {self.folder} && {words}"
        chroot = ["chroot", f"--userspec={self.user}:{self.user}", "ROOT", "env", "-i", *variables, "/bin/sh", "-ec"]
        return shlex.join([*chroot, inside]).replace(" ROOT ", ' "$root" ', 1)


def read_dockerfile(text: str, arguments: dict[str, str]) -> dict[str, Stage]:
    """Return the stages by name; the last one is ""."""
    stages: dict[str, Stage] = {}
    stage = Stage()
    values: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        assert not line.endswith("\\"), "a continued line is not read here"
        key, _, rest = line.partition(" ")
        if key == "ARG":
            name, _, default = rest.partition("=")
            values[name] = arguments.get(name, default)
            continue
        known = {**values, **stage.environment}
        for name in re.findall(r"\$\{(\w+)\}", rest):
            rest = rest.replace(f"${{{name}}}", known[name])
        if key == "FROM":
            assert re.fullmatch(r"[\w.:-]+( AS \w+)?", rest), f"the base image is not a plain name: {rest}"
            stage = stages[rest.partition(" AS ")[2]] = Stage()
        elif key == "WORKDIR":
            stage.folder = rest
            stage.commands.append(f'mkdir -p "$root{rest}"')
        elif key == "ENV":
            stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif key == "USER":
            stage.user = rest
        elif key == "RUN":
            stage.commands.append(stage.run(rest))
        elif key == "COPY" and rest.startswith("--from="):
            source, origin, target = rest.removeprefix("--from=").split()
            stage.commands.append(f'mkdir -p "$root{target}"; cp -a "${source}{origin}/." "$root{target}"')
        elif key == "COPY":
            *origins, target = rest.split()
            place = f"$root{stage.folder}/{target}"
            stage.commands.append(f'mkdir -p "{place}"')
            stage.commands += [f'cp -a "$context/{origin}/." "{place}"' for origin in origins if origin == "."]
            stage.commands += [f'cp "$context/{origin}" "{place}"' for origin in origins if origin != "."]
        else:
            assert key in ("ENTRYPOINT", "CMD"), line
            stage.entrypoint = json.loads(rest) if key == "ENTRYPOINT" else stage.entrypoint
    return stages


def run_image(
    dockerfile: Path, commands: list[list[str]], *, context: Path, volume: Path, folder: Path, **arguments: str
) -> "subprocess.CompletedProcess[str]":
    """Build an image, and run commands in it.

    Args:
        commands: Words after the entrypoint.
        context: Files of the checkout that the build sees.
        volume: Folder that the commands see as /data.
        folder: Empty folder, for the stages.
    """
    stages = read_dockerfile(dockerfile.read_text(), arguments)
    lines = ["set -eu", f"context={shlex.quote(str(context))}"]
    for name, stage in stages.items():
        place = folder / (name or "final")
        place.mkdir(parents=True)
        lines += [f"set -- {shlex.quote(str(place))}", _ENTER, 'root="$1/root"']
        # No base image has a user 1000, and this Python may be below a home that others cannot enter.
        lines += ['sed -i "/:x:1000:/d" "$root/etc/passwd" "$root/etc/group"', 'chmod o+x "$root/root"']
        lines += [f'rm -f $(printf "$root/usr/bin/%s\\n" {_COMPILERS})']
        lines += [f'ln -sf {_PYTHON.name} "$root{_PYTHON.with_name("python")}"', *stage.commands]
        lines += [f'{name or "final"}="$root"']
    final = stages[""]
    lines += [f'mount --bind {shlex.quote(str(volume))} "$root{final.folder}"', "echo BUILT"]
    lines += [final.run(shlex.join([*final.entrypoint, *words])) for words in commands]
    script = folder / "image.sh"
    script.write_text("\n".join(lines) + "\n")
    words = ["unshare", "--mount", "--propagation", "private", "/bin/sh", str(script)]
    return subprocess.run(words, capture_output=True, text=True, check=False)

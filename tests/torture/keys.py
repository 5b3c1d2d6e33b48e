"""Access keys that expire while a command works in a bucket.

`renewed`: a profile, an instance or a container renews the keys, which live for seconds; no request may be signed with
an expired key. `expired`: the keys cannot be renewed. The command then exits with the status for refused work, and the
same command with valid keys produces the bytes of an undisturbed run.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.conftest import ROOT
from tests.object_storage.faults import CONTAINER, Faults, expiring_key, faulty
from tests.object_storage.folders import contents_of, upload
from tests.torture import bases
from tests.torture.buckets import SHORT_LEASES, leading_to, shared_server
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, same_contents
from tests.torture.commands import Ran
from tests.torture.workspace import Workspace

PART = "keys"
_NUM_CASES = 20  # cases per subject
_KINDS = ("profile", "instance", "container")
_REFUSED = {0, 3}  # 0: all work was done before the keys expired
_PROCESS = """
import json, sys
sys.path.insert(0, {root!r})
from tests.object_storage.faults import expiring_key
key = expiring_key({life_s})
print(json.dumps({{"Version": 1, "SessionToken": key.pop("Token"), **key}}))
"""


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of preparation and training with keys of both kinds, drawn from `seed`."""
    return {
        f"{kind}-{program}": partial(_cases, seed, workspace, kind, program)
        for kind in ("renewed", "expired")
        for program in ("prep", "train")
    }


def _cases(seed: int, workspace: Workspace, kind: str, program: str) -> Iterator[Case]:
    for number in range(_NUM_CASES):
        name = f"{PART}/{kind}-{program}/{number:02d}"
        yield Case(name, kind, partial(_try, workspace, kind, program, random=Random(f"{seed}/{name}")))


class _Trial:
    """Bucket with a data folder, and a proxy in front of it that knows which keys have expired."""

    def __init__(self, workspace: Workspace, program: str, folder: Path, proxy: Faults, *, name: str) -> None:
        self._workspace, self._program, self._folder, self._proxy = workspace, program, folder, proxy
        self._server = shared_server()
        self.address = f"{self._server.make_bucket(name)}/data"
        base = bases.with_manifest(workspace) if program == "prep" else bases.with_columns(workspace)
        with leading_to(self._server):
            upload(base / "data", self.address)

    def run(self, keys: dict[str, str] | None, *, has_short_leases: bool = True) -> Ran:
        """Run the command with `keys`, or with keys that the server always accepts."""
        environment = self._server.environment(endpoint=self._proxy.endpoint)
        if keys is not None:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
                del environment[name]
            environment |= keys
        if has_short_leases:
            environment |= {"CLIPMILL_SHORT_LEASES": "1", "PYTHONPATH": f"{SHORT_LEASES}{os.pathsep}{ROOT}"}
        if self._program == "prep":
            words: list[object] = [*bases.CHUNK, *bases.ENGINE, "--data", self.address]
        else:
            words = [*bases.TRAIN, "--shards", self.address, "--out", self._folder / "run", "--resume", "auto"]
            words += ["--cache", self._folder / "cache"]
        scratch = self._folder / "scratch"
        return self._workspace.commands.run(self._program, words, scratch=scratch, environment=environment)

    def contents(self) -> dict[str, str]:
        """Return the contents of the bucket without locks and temporary objects."""
        with leading_to(self._server):
            contents = contents_of(self.address)
        return {key: digest for key, digest in contents.items() if "/.tmp-" not in f"/{key}"}


def _try(workspace: Workspace, kind: str, program: str, folder: Path, *, random: Random) -> None:
    name = f"keys-{os.getpid()}-{threading.get_ident()}-{random.getrandbits(40):x}"
    with faulty(shared_server().port) as proxy:
        trial = _Trial(workspace, program, folder, proxy, name=name)
        if kind == "renewed":
            life_s = random.uniform(2.5, 6.0)
            proxy.set(latency_s=random.choice((0.0, 0.02, 0.1)), key_life_s=life_s)
            keys = _renewable_keys(random.choice(_KINDS), proxy, folder, life_s=life_s)
            # On a busy machine, the program that provides keys can take longer than a short lease lasts.
            ran = ended_well(trial.run(keys, has_short_leases=False), status=0)
            seen = proxy.seen()
            if len(seen.keys) < 2 or seen.num_expired:
                counts = f"{len(seen.keys)} keys, and {seen.num_expired} requests with a key that had expired"
                raise Broken(f"{counts}: {ran.describe()}")
        else:
            key = expiring_key(random.uniform(0.0, 6.0))
            keys = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
            ran = ended_well(trial.run(keys), status=_REFUSED)
            if ran.status and "ExpiredToken" not in ran.stderr:
                raise Broken(f"the cause is not named: {ran.describe()}")
            ended_well(trial.run(None), status=0)
        if program == "prep":
            same_contents(trial.contents(), _undisturbed_digests(workspace))
        elif not list(all_checkpoints(RunFolder(folder / "run").checkpoints)):
            raise Broken("no checkpoint is left")


def _renewable_keys(kind: str, proxy: Faults, folder: Path, *, life_s: float) -> dict[str, str]:
    """Return the environment variables that make a command use keys of one kind."""
    if kind == "instance":
        return {"AWS_METADATA_ENDPOINT": proxy.endpoint}
    if kind == "container":
        (folder / "token").write_text("token")
        token = str(folder / "token")
        uri = proxy.endpoint + CONTAINER
        return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": uri, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": token}
    (folder / "keys.py").write_text(_PROCESS.format(root=str(ROOT), life_s=life_s))
    (folder / "config").write_text(f"[profile own]\ncredential_process={sys.executable} {folder / 'keys.py'}\n")
    return {"AWS_PROFILE": "own", "AWS_CONFIG_FILE": str(folder / "config")}


def _undisturbed_digests(workspace: Workspace) -> dict[str, str]:
    """Return the contents of a data folder in a bucket after a run without faults."""

    def make(made: Path) -> None:
        with faulty(shared_server().port) as proxy:
            trial = _Trial(workspace, "prep", made, proxy, name=f"keys-{os.getpid()}-undisturbed")
            ended_well(trial.run(None), status=0)
            (made / "contents").write_text("\n".join(f"{digest} {key}" for key, digest in trial.contents().items()))

    lines = (workspace.made("keys", make) / "contents").read_text().splitlines()
    return {key: digest for digest, _, key in (line.partition(" ") for line in lines)}

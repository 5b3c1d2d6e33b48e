"""Processes that are forked for tests end with the pytest that asked for them, even if it is killed."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.forks import Forks
from tests.prep.running import running, wait_until

# As a pytest: it has a worker forked, which sleeps for ever, and sleeps too.
ASKING = """
import sys, time
from pathlib import Path
from tests import workers
from tests.forks import Forks

folder, address = sys.argv[1:]
workers.fork_from(Forks(Path(folder), address=address))
process = workers.ForkedContext().Process(target=time.sleep, args=(3600,))
process.start()
print(process.pid, flush=True)
time.sleep(3600)
"""


def test_a_forked_worker_ends_with_a_pytest_that_is_killed(forks: Forks, tmp_path: Path) -> None:
    forks.python()  # starts the server
    command = [sys.executable, "-c", ASKING, str(forks.folder), forks.address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        worker = int(asking.stdout.readline())
        assert running(worker) is not None
        asking.kill()
    wait_until(lambda: running(worker) is None)

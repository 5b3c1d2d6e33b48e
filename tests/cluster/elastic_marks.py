"""Case of tests.cluster.elastic in which `prep gc` keeps a variant that is read but no longer current."""

from clipmill.shards.marks import READERS_FOLDER, list_readers
from tests.cluster.elastic_nodes import Launch, kill_node, launch, wait_until
from tests.cluster.elastic_runs import Case, end_well
from tests.prep.running import prep_here
from tests.test_many_readers import CHUNKS, STEPS, make_data, variants
from tests.train.running import facts

_FLAGS = ("--steps", "200", "--checkpoint-every", "20", "--device", "cpu", "--resume", "auto")
_AT_STEP = 40


def marks_of_nodes(case: Case) -> str:
    """Replace node 1 while another user makes a new variant and removes the files that are not in use."""
    data = case.folder / "data"
    make_data(data, case.folder / "videos")
    (first,) = variants(data)

    def begin(node: int) -> Launch:
        words = ("dual-encoder", *STEPS, *_FLAGS, "--shards", data, "--out", case.out)
        return launch(node, words, log=case.folder / f"node{node}.log")

    def readers() -> list[str]:
        return sorted(reader.text.split()[0] for reader in list_readers(data).find("video", first))

    launches = [begin(0), begin(1)]
    case.wait_for_steps(_AT_STEP)
    prep_here(*CHUNKS, "--crf", 40, "--data", data)
    both = variants(data)
    of_launch = readers()
    kill_node(1)
    launches[1].end()
    case.wait_for_output(0, "failed: ")
    prep_here("gc", "--data", data)
    assert variants(data) == both, "the variant of a running training was removed"
    of_loss = readers()
    launches[1] = begin(1)
    case.wait_for_restart()
    wait_until(lambda: readers() == of_launch, what="marks of both nodes after the restart")
    prep_here("gc", "--data", data)
    assert variants(data) == both, "the variant of a training that was restarted was removed"
    end_well(*launches)
    assert of_launch == ["process", "process", "unfinished"], f"marks at the start: {of_launch}"
    assert "unfinished" in of_loss and of_loss.count("process") < 2, f"marks after the loss: {of_loss}"
    assert facts(case.out)["variant"] == first, "the training switched to a different variant"
    prep_here("gc", "--data", data)
    assert variants(data) == both - {first} and not list((data / READERS_FOLDER).glob("?*.lock"))
    return "gc keeps the variant of the nodes until the run is finished"


CASES = (marks_of_nodes,)

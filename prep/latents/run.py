"""Driver of `latents`: how its workers use their machine, and how much memory they take."""

from clipmill.prep.core.chunk_plan import ChunksPlan
from clipmill.prep.core.chunk_work import Workers
from clipmill.prep.core.plan import with_work
from clipmill.prep.engines.choice import threads_per_worker
from clipmill.prep.latents.column import LatentsRequest
from clipmill.prep.latents.recipe import Encoding
from clipmill.prep.latents.trial import run_trial
from clipmill.prep.latents.worker import EncoderUse

_WORKER_GB = 3.5  # measured (benchmarks/README.md): Stable Diffusion's VAE, batch of 16 on a CPU: 3.0 GB
_MARGIN = 1.2


def choose_workers(plan: ChunksPlan, request: LatentsRequest) -> Workers:
    """Return how the workers of a run encode."""
    gpus = request.gpus_per_worker(has_work=bool(with_work(plan.shards)))
    num_threads = threads_per_worker(
        request.workers, gpus_per_worker=gpus, address=request.cluster, execution=request.execution
    )
    return Workers(
        request=request,
        gpus_each=gpus,
        memory_gb=worker_memory_gb(plan, request, on_cpu=not gpus),
        use=EncoderUse(device="cuda" if gpus else "cpu", batch=request.batch, num_threads=num_threads),
    )


def worker_memory_gb(plan: ChunksPlan, request: LatentsRequest, *, on_cpu: bool) -> float:
    """Return the memory that a worker reserves on a cluster.

    For a VAE of videos on CPUs it is what the segments of a batch take in a trial on this machine, with a margin.
    """
    encoding, has_work = Encoding.of(plan.recipe), bool(with_work(plan.shards))
    is_asked = request.cluster is not None and request.execution.task_memory is None
    if is_asked and on_cpu and has_work and encoding.is_video:
        trial = run_trial(plan, num_gpus=0)
        if trial is not None and trial.segment_bytes is not None:
            return _MARGIN * trial.segment_bytes * encoding.units_per_batch(request.batch) / 1e9
    return _WORKER_GB

"""The files of deploy/: images, and jobs of KubeRay and Kubernetes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipmill.prep.cli import build_app
from clipmill.train.cli import app as train_app
from clipmill.train.commands.training import parse
from tests.images import read_dockerfile, run_image

DOCKERFILES = {"prep": "prep", "columns": "prep", "train": "train"}  # part -> name
# Fields of the definition of RayJob, version v1, in KubeRay 1.7 (ray.io_rayjobs.yaml), and those that it requires.
RAY_JOB = {
    *("activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "managedBy"),
    *(
        "entrypointNumCpus",
        "entrypointNumGpus",
        "entrypointResources",
        "jobId",
        "metadata",
        "preRunningDeadlineSeconds",
    ),
    *("rayClusterSpec", "runtimeEnvYAML", "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "suspend"),
    *("submitterPodTemplate", "ttlSecondsAfterFinished"),
}
RAY_CLUSTER = {
    *("authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"),
    *("headServiceAnnotations", "historyServerOptions", "managedBy", "networkPolicy", "rayVersion", "suspend"),
    *("tlsOptions", "upgradeStrategy", "workerGroupSpecs"),
}
HEAD = {"enableIngress", "headService", "ingressOptions", "labels", "rayStartParams", "resources", "serviceType"}
HEAD |= {"template"}
WORKERS = {"groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "priority"}
WORKERS |= {"rayStartParams", "replicas", "resources", "scaleStrategy", "suspend", "template"}
SCHEMAS = "kubernetes-validate==1.37.0"  # the definitions of Kubernetes 1.37
VALIDATE = """
import json, sys
import kubernetes_validate
for document in json.load(sys.stdin):
    kubernetes_validate.validate(document, "1.37", strict=True)
"""


@pytest.fixture(scope="module")
def ray_job(repository: Path) -> dict[str, Any]:
    return yaml.safe_load((repository / "deploy/kuberay_rayjob.yaml").read_text())


@pytest.fixture(scope="module")
def torchrun_job(repository: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((repository / "deploy/torchrun_job.yaml").read_text()))


def groups(ray_job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = ray_job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_job_of_kuberay_has_fields_of_its_definition(repository: Path, ray_job: dict[str, Any]) -> None:
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = ray_job["spec"], ray_job["spec"]["rayClusterSpec"]
    head, *workers = groups(ray_job)
    assert spec.keys() <= RAY_JOB and cluster.keys() <= RAY_CLUSTER and head.keys() <= HEAD
    for group in workers:
        assert {"groupName", "maxReplicas", "minReplicas", "template"} <= group.keys() <= WORKERS
    for group in groups(ray_job):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "clipmill-prep"
    assert f"\nray=={cluster['rayVersion']} " in (repository / "requirements-prep.lock").read_text()


def test_the_commands_of_the_jobs_are_commands_of_ours(
    ray_job: dict[str, Any], torchrun_job: list[dict[str, Any]]
) -> None:
    program, *words = shlex.split(ray_job["spec"]["entrypoint"])
    assert program == "prep"
    build_app().parse_args(words, exit_on_error=False, print_error=False)
    (container,) = torchrun_job[1]["spec"]["template"]["spec"]["containers"]
    words = container["args"][container["args"].index("train") + 1 :]
    assert container["command"] == ["torchrun"] and "--no-python" in container["args"]
    parse(train_app, words)
    service, job = torchrun_job
    endpoint = next(word for word in container["args"] if word.startswith("--rdzv-endpoint="))
    name, pod = service["metadata"]["name"], job["spec"]["template"]["spec"]
    assert endpoint == f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:{service['spec']['ports'][0]['port']}"
    assert pod["subdomain"] == name and f"--nnodes={job['spec']['completions']}" in container["args"]


@pytest.mark.parametrize("part", DOCKERFILES)
def test_an_image_runs_without_root_on_locked_wheels_alone(repository: Path, part: str) -> None:
    path = repository / f"deploy/{DOCKERFILES[part]}.Dockerfile"
    final = read_dockerfile(path.read_text(), {"PART": part})[""]
    assert final.user == "1000" and final.entrypoint == [DOCKERFILES[part]]
    installs = [line for line in path.read_text().splitlines() if line.startswith("RUN") and "install" in line]
    for line in installs:
        assert re.search(r"--require-hashes|--no-deps|useradd", line) and "apt" not in line, line


def test_a_part_is_set_up_by_its_lock(repository: Path, tmp_path: Path) -> None:
    def plan(part: str) -> "subprocess.CompletedProcess[str]":
        words = ["make", "--dry-run", "setup", f"PART={part}", f"VENV={tmp_path / 'venv'}"]
        return subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)

    for part in DOCKERFILES:
        ran = plan(part)
        assert ran.returncode == 0 and f"--require-hashes --compile-bytecode requirements-{part}.lock" in ran.stdout
    assert "PART=both is not one of: prep columns train" in plan("both").stderr


@pytest.mark.nightly
def test_the_jobs_are_valid_for_kubernetes(
    ray_job: dict[str, Any], torchrun_job: list[dict[str, Any]], tmp_path: Path
) -> None:
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--target", str(tmp_path), SCHEMAS]
    subprocess.run(uv, check=True)
    pods = [{"apiVersion": "v1", "kind": "Pod", **group["template"]} for group in groups(ray_job)]
    program, documents = [sys.executable, "-c", VALIDATE], [*torchrun_job, *pods]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for document in documents:
        subprocess.run(program, input=json.dumps([document]), env=environment, text=True, check=True)
        broken = {**document, "spec": {**document["spec"], "invented": 1}}
        ran = subprocess.run(
            program, input=json.dumps([broken]), env=environment, text=True, check=False, capture_output=True
        )
        assert ran.returncode and "invented" in ran.stderr


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="a root folder of one's own takes root")
def test_the_images_are_built_and_work(repository: Path, tmp_path: Path) -> None:
    context, volume = tmp_path / "context", tmp_path / "volume"
    context.mkdir()
    volume.mkdir()
    os.chown(volume, 1000, 1000)
    for parent in tmp_path.parents[: len(tmp_path.parents) - 2]:
        parent.chmod(0o755)
    kept = [line[1:] for line in (repository / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for pattern in kept:
        for path in repository.glob(pattern):
            subprocess.run(["cp", "-a", str(path), str(context)], check=True)
    making = [
        ["manifest", "synthetic", "--videos", "4", "--minutes", "0.2"],
        ["chunk", "--len", "3s", "--workers", "1"],
        ["status"],
    ]
    training = [
        ["doctor"],
        [*("dual-encoder", "--shards", "data", "--preset", "tiny", "--steps", "2", "--batch", "2", "--device", "cpu")],
    ]
    for name, commands, shown in (("prep", making, "16 chunks"), ("train", training, "done: 2 steps")):
        ran = run_image(
            repository / f"deploy/{name}.Dockerfile",
            commands,
            context=context,
            volume=volume,
            folder=tmp_path / name,
        )
        assert ran.returncode == 0 and shown in ran.stdout, f"{ran.stdout}\n{ran.stderr}"
        built, _, _ = ran.stdout.partition("BUILT")
        assert "Python 3." in built and "pyarrow==" in built and ("torch==" in built) == (name == "train")
    owners = {path.stat().st_uid for path in volume.rglob("*")}
    assert owners == {1000} and (volume / "run" / "index.html").is_file()

"""The launch files and the study of scale: what can be checked without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.launching import ROOT, weights

EXAMPLES = ROOT / "examples"


def parses(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sh"])
def test_scripts_parse_and_say_how_they_are_used(name: str) -> None:
    script = EXAMPLES / name
    assert os.access(script, os.X_OK)
    parses(script.read_text())
    done = subprocess.run([script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "RECIPE DIR" in done.stderr


def test_the_kubernetes_job_is_complete() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"], "the number of processes is fixed"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the name that the operator looks for"
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    parses(container["args"][0])
    assert "torchrun -m spartan train" in container["args"][0]


@pytest.mark.slow
def test_the_torchrun_script_trains_and_goes_on(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PROCESSES": "2"}
    for said in ("on 2 processes", "is finished"):
        command = [str(EXAMPLES / "torchrun.sh"), "digits", "run", "--set", "epochs=1"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    assert weights(tmp_path / "run")


def test_the_page_shows_what_the_model_of_scale_computes() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/scale_model.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line for line in printed if line.startswith("| 10")]
    assert len(rows) > 12
    page = (ROOT / "docs/scale.md").read_text()
    assert [row for row in rows if row not in page] == []
    reductions, size = printed[0].split()[0], printed[0].split()[3]
    assert f"{reductions} a step, {size} bytes" in page

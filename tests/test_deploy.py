"""What `deploy/` hands out: manifests that render and fit Kubernetes' schemas, a unit for systemd, real options."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


@pytest.fixture(scope="module")
def rendered():
    """Every object, by kind, as `kubectl apply -k` would send it."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read what kustomize renders")
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which has kustomize")
    done = subprocess.run(["kubectl", "kustomize", str(DEPLOY / "kubernetes" / "monitoring")], capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def options_of_serve():
    import typer

    from headwater.cli import typer_app

    verb = typer.main.get_command(typer_app).commands["serve"]
    return {option for each in verb.params for option in each.opts}


def test_the_manifests_fit_the_schemas_of_kubernetes(rendered):
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate for the schemas")
    for kind, each in rendered.items():
        if kind != "ServiceMonitor":  # the Prometheus operator's own
            validate.validate(each, "1.31", strict=True)
    assert {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor"} <= set(rendered)


def test_the_pods_are_found_by_everything_that_selects_them(rendered):
    pod = rendered["StatefulSet"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    assert rendered["StatefulSet"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert rendered["Service"]["spec"]["selector"].items() <= labels
    assert rendered["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert rendered["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels
    wanted = rendered["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= rendered["Service"]["metadata"]["labels"].items()
    named = {port["name"] for port in rendered["Service"]["spec"]["ports"]}
    assert {each["port"] for each in rendered["ServiceMonitor"]["spec"]["endpoints"]} <= named


def test_the_node_is_started_with_options_that_exist_and_drains_before_it_is_killed(rendered):
    pod = rendered["StatefulSet"]["spec"]["template"]["spec"]
    (node,) = pod["containers"]
    given = dict(each.split("=", 1) for each in node["args"] if each.startswith("--"))
    assert set(given) <= options_of_serve()
    assert float(given["--drain-s"]) < pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    assert given["--listen"].endswith(f":{ports['flight']}")
    assert given["--http"].endswith(f":{ports['http']}")
    probes = [node[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [(each["path"], each["port"]) for each in probes] == [
        ("/healthz", "http"),
        ("/healthz", "http"),
        ("/readyz", "http"),
    ]
    mounts = [each["mountPath"] for each in node["volumeMounts"]]
    for name in ("--tokens", "--tls-cert", "--tls-key", "--state"):
        assert any(given[name].startswith(mount) for mount in mounts), name


def test_systemd_takes_the_unit_and_its_options_exist(tmp_path):
    text = (DEPLOY / "systemd" / "headwater.service").read_text()
    assert set(re.findall(r"--[a-z-]+", text)) <= options_of_serve()
    drain_s, stop_s = (float(re.search(rf"{name}[ =](\d+)", text)[1]) for name in ("--drain-s", "TimeoutStopSec"))
    assert drain_s < stop_s
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "headwater.service"
    unit.write_text(text.replace("/opt/headwater/bin/headwater", sys.executable))
    verify = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "headwater.service" in line]
    assert (done.returncode, ours) == (0, [])

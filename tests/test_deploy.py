"""deploy/: its flags, ports, paths, names and times are those of the programs and of each other."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tts import health, serve
from tts.__main__ import COMMANDS
from tts.cluster.flags import parsed_flags
from tts.config.pipeline import AudioGenerationConfig, PrometheusMetricsMode, config_from_args
from tts.config.server import ServerConfig
from tts.observe.metrics import Metrics
from tts.processes.supervisor import STOP_S

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
HOME = "/var/lib/sonant"
HTTP_PORT = 8880
DEFAULTS = ServerConfig()
PORTS = {DEFAULTS.port, HTTP_PORT, DEFAULTS.metrics_port}


def objects(name: str) -> list[Any]:
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def kubernetes(name: str) -> Any:
    (found,) = objects(name)
    return found


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"][
    "sonant"
]
POD = kubernetes("deployment")["spec"]["template"]
SERVICES = objects("service")
(CONTAINER,) = POD["spec"]["containers"]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string((DEPLOY / "sonant.service").read_text(encoding="utf-8"))
    return parser["Service"]


def instructions(name: str) -> list[str]:
    """Return the arguments of all instructions of one kind, without those of other lines."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


UNIT_COMMAND = shlex.split(unit()["ExecStart"])
SERVED = {
    "compose": COMPOSE["command"],
    "kubernetes": CONTAINER["args"],
    "systemd": [
        word.replace("/etc/sonant", str(DEPLOY)) for word in UNIT_COMMAND[1:]
    ],
}  # fmt: skip


def server_config(where: str) -> ServerConfig:
    command, *flags = SERVED[where]
    assert command == "serve"
    args = serve.build_parser().parse_args(flags)
    return config_from_args(ServerConfig, args, environ=image_environ(where))


def image_environ(where: str) -> dict[str, str]:
    """Return the settings of the image, which a unit does not have."""
    pairs = [word.partition("=") for line in instructions("ENV") for word in line.split()]
    found = {name: text for name, _, text in pairs if name.startswith("SONANT_")}
    return {} if where == "systemd" else found


@pytest.mark.parametrize("where", SERVED)
def test_flags_and_files_are_accepted(where: str) -> None:
    """Every flag and key is a field, and the ports are those that are published."""
    server = server_config(where)
    assert {server.port, server.http_port, server.metrics_port} == PORTS
    args = serve.build_parser().parse_args([*SERVED[where][1:], "--audio-decoder=embedded"])
    model = config_from_args(AudioGenerationConfig, args, environ=image_environ(where))
    assert model.prometheus_metrics_mode is PrometheusMetricsMode.LAUNCH_SERVER
    in_container = where != "systemd"
    assert (server.host == "0.0.0.0") is (server.metrics_host == "0.0.0.0") is in_container
    assert server.voice_folder is None or server.voice_folder.is_relative_to(HOME)


def test_the_image_runs_a_command_that_exists() -> None:
    assert instructions("ENTRYPOINT") == ['["sonant"]']
    assert PROJECT["scripts"].keys() == {"sonant"}
    (command,) = instructions("CMD")
    (check,) = instructions("HEALTHCHECK")
    assert command == '["serve"]'
    assert check.endswith('CMD ["sonant", "health"]')
    assert {"serve", "health"} <= COMMANDS.keys()
    assert f"localhost:{DEFAULTS.port}" == health.ADDRESS


def test_the_image_has_the_projects_files_and_versions() -> None:
    sources = [word for line in instructions("COPY") for word in line.split()[:-1]]
    assert {"pyproject.toml", "decoder", "llm", "tts"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert [name for name in sources if not any(fnmatch(name, line) for line in allowed)] == []
    installs = re.findall(r"'(torch(?:audio)?==[\d.*]+)'", DOCKERFILE)
    assert len(installs) == 4
    assert set(installs) <= set(PROJECT["dependencies"])
    extras = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert {name for line in extras for name in line.split(",")} <= set(
        PROJECT["optional-dependencies"]
    )


def test_ports_are_the_servers() -> None:
    assert {int(word) for line in instructions("EXPOSE") for word in line.split()} == PORTS
    assert {int(text.rpartition(":")[2]) for text in COMPOSE["ports"]} == PORTS
    assert all(text.startswith("127.0.0.1:") for text in COMPOSE["ports"])
    named = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert set(named.values()) == PORTS
    published = [port for service in SERVICES for port in service["spec"]["ports"]]
    assert {port["port"] for port in published} == PORTS
    assert [port for port in published if named[port["targetPort"]] != port["port"]] == []
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(DEFAULTS.metrics_port)
    probes = [CONTAINER["startupProbe"], CONTAINER["readinessProbe"]]
    assert [probe["grpc"]["port"] for probe in probes] == [DEFAULTS.port] * 2


def test_the_user_and_the_folders_are_the_images() -> None:
    (user,) = instructions("USER")
    context = POD["spec"]["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert f"--home-dir {HOME} " in instructions("RUN")[-1]
    assert COMPOSE["volumes"] == [f"home:{HOME}"]
    assert COMPOSE["tmpfs"] == ["/tmp"]
    assert COMPOSE["read_only"]
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {"/tmp", HOME}
    assert set(mounts.values()) == {volume["name"] for volume in POD["spec"]["volumes"]}
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert Path("/var/lib") / unit()["StateDirectory"] == Path(HOME)
    assert unit()["Environment"] == f"HOME={HOME}"


@pytest.mark.parametrize(
    ("where", "stop_s"),
    [
        ("compose", int(COMPOSE["stop_grace_period"].removesuffix("s"))),
        ("kubernetes", POD["spec"]["terminationGracePeriodSeconds"]),
        ("systemd", int(unit()["TimeoutStopSec"])),
    ],
)
def test_a_server_is_killed_only_after_it_had_time_to_drain(where: str, stop_s: int) -> None:
    config = server_config(where)
    assert stop_s > config.drain_delay_s + config.drain_grace_s + STOP_S


def test_objects_of_kubernetes_select_the_pods() -> None:
    labels = POD["metadata"]["labels"]
    deployment = kubernetes("deployment")
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert [service["spec"]["selector"] for service in SERVICES] == [labels, labels]
    assert kubernetes("disruption-budget")["spec"]["selector"]["matchLabels"] == labels
    target = kubernetes("autoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    files = kubernetes("kustomization")["resources"]
    assert [name for name in files if not (DEPLOY / "kubernetes" / name).exists()] == []


def test_variables_of_a_service_with_our_name_are_not_read_as_settings() -> None:
    """Kubernetes would set SONANT_PORT to a URL, and variables that are no settings."""
    assert {service["metadata"]["name"] for service in SERVICES} == {"sonant", "sonant-http"}
    assert POD["spec"]["enableServiceLinks"] is False


def test_the_autoscaler_reads_a_metric_that_is_exported() -> None:
    (metric,) = kubernetes("autoscaler")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    metrics = Metrics()
    metrics.note_requests(3, 1)
    assert {metrics.value(name, state=state) for state in ("running", "waiting")} == {3, 1}
    (rule,) = kubernetes("prometheus-adapter")["rules"]["custom"]
    assert rule["seriesQuery"].startswith(name + "{")
    config = server_config("kubernetes")
    assert 0 < int(metric["pods"]["target"]["averageValue"]) < config.max_concurrent_requests
    comment = (DEPLOY / "kubernetes" / "autoscaler.yaml").read_text(encoding="utf-8")
    most = f"{config.max_concurrent_requests} running and {config.max_queued_requests} waiting"
    assert most in comment


def test_clients_of_the_headless_service_reconnect() -> None:
    assert SERVICES[0]["spec"]["clusterIP"] == "None"
    assert server_config("kubernetes").max_connection_age_s


def test_envoy_finds_the_ports_of_ray_serve() -> None:
    served, envoy = (
        yaml.safe_load((DEPLOY / "ray" / name).read_text(encoding="utf-8"))
        for name in ("serve.yaml", "envoy.yaml")
    )
    (cluster,) = envoy["static_resources"]["clusters"]
    (endpoint,) = (
        e["endpoint"] for e in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    )
    assert endpoint["address"]["socket_address"]["port_value"] == served["grpc_options"]["port"]
    assert endpoint["health_check_config"]["port_value"] == served["http_options"]["port"]
    (application,) = served["applications"]
    (route,) = (
        envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    )["route_config"]["virtual_hosts"][0]["routes"]
    (added,) = route["request_headers_to_add"]
    assert added["header"] == {"key": "application", "value": application["name"]}


def test_flags_of_ray_serve_are_those_of_the_server() -> None:
    data = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = data["applications"]
    config = config_from_args(ServerConfig, parsed_flags(application["args"]), environ={})
    (deployment,) = application["deployments"]
    running = config.max_concurrent_requests
    assert deployment["max_ongoing_requests"] == running + config.max_queued_requests
    assert deployment["autoscaling_config"]["target_ongoing_requests"] < running
    assert deployment["graceful_shutdown_timeout_s"] >= config.max_audio_duration_s

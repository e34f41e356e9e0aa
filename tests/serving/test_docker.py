"""Image and compose file without a container engine: their steps run in a clean folder, as no root.

The wheel is built from exactly what `.dockerignore` lets into the build, and installed without its
dependencies; those come from the environment of the tests. Steps that need root are left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_tools import ROOT

from specstack.processes import free_port

SERVING = ROOT / "serving"
NEEDS_ROOT = ("apt-get", "useradd")
PLACES = re.compile(r"(?<![\w./])/(?=(opt|wheels|src|etc/specstack)\b)")
"""Absolute paths of the image that become paths below a scratch folder."""


@dataclass(frozen=True)
class Step:
    instruction: str
    text: str


def stages() -> dict[str, list[Step]]:
    """The steps of the Dockerfile by the name of their stage."""
    found: dict[str, list[Step]] = {}
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            name = rest.split()[-1]
            found[name] = []
        found[name].append(Step(instruction, rest))
    return found


STAGES = stages()
TARGETS = ("cpu", "cuda")


def steps(stage: str, instruction: str) -> list[str]:
    return [step.text for step in STAGES[stage] if step.instruction == instruction]


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps a path out of the build; the last match decides."""
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    result = False
    for pattern in patterns:
        keep = pattern.startswith("!")
        plain = pattern.removeprefix("!")
        deep = plain.removeprefix("**/")
        names = [Path(part).name for part in parents] if deep != plain else parents
        if any(fnmatchcase(name, deep) for name in names):
            result = not keep
    return result


def build_context(target: Path) -> None:
    """Copy what the engine would send to the build."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    tops = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for top in tops:
        origin = ROOT / top
        for file in [origin] if origin.is_file() else origin.rglob("*"):
            name = str(file.relative_to(ROOT))
            if file.is_file() and not ignored(name, patterns):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target / name)


class Image:
    """The file system of the image, as far as its steps need no root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.context = root / "context"
        build_context(self.context)

    def placed(self, text: str) -> str:
        return PLACES.sub(f"{self.root}/", text)

    def copy(self, text: str, workdir: Path) -> None:
        *sources, target = shlex.split(text)
        if sources[0].startswith("--from="):
            return  # stages share one root here
        place = Path(self.placed(target))
        place = place if place.is_absolute() else workdir / place
        for source in sources:
            origin = self.context / source
            if origin.is_dir():
                shutil.copytree(origin, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, place)

    def build(self, stage: str) -> None:
        workdir = self.root
        for step in STAGES[stage]:
            if step.instruction == "WORKDIR":
                workdir = Path(self.placed(step.text))
                workdir.mkdir(parents=True, exist_ok=True)
            elif step.instruction == "COPY":
                self.copy(step.text, workdir)
            elif step.instruction == "RUN" and not step.text.startswith(NEEDS_ROOT):
                self.run(step.text.replace('"$wheel[serve]"', '--no-deps "$wheel"'), workdir)

    def run(self, command: str, workdir: Path) -> str:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for name in ("PYTHONPATH", "PIP_TARGET", "PIP_REQUIRE_VIRTUALENV"):
            environment.pop(name, None)
        result = subprocess.run(
            ["sh", "-ec", self.placed(command)], cwd=workdir, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The target `cpu`, built; dependencies are those of the tests' environment."""
    image = Image(tmp_path_factory.mktemp("image"))
    image.build("wheel")
    image.build("cpu")
    (packages,) = (image.root / "opt/specstack/lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return image


@pytest.mark.network
def test_the_image_runs_its_own_specstack_and_knows_its_pipeline(image: Image) -> None:
    origin = image.run(
        "/opt/specstack/bin/python -c 'import specstack as s; print(s.__file__)'", image.root
    )
    assert origin.startswith(f"{image.root}/opt/specstack/")
    assert "serve" in image.run("/opt/specstack/bin/specstack --help", image.root)
    for target in TARGETS:
        (command,) = steps(target, "CMD")
        arguments = " ".join(shlex.quote(argument) for argument in json.loads(command))
        answer = image.run(f"/opt/specstack/bin/specstack check {arguments}", image.root)
        assert answer.splitlines()[0].endswith("quickstart.yaml: ok")


@pytest.mark.network
def test_the_wheel_of_the_image_holds_heads_and_dashboards_but_no_tests(image: Image) -> None:
    (packages,) = (image.root / "opt/specstack/lib").glob("python*/site-packages")
    assert list(packages.glob("specstack/models/packaged_heads/*/*.safetensors"))
    assert (packages / "specstack_serving/dashboards/boards.py").exists()
    assert (packages / "specstack_loadtest/scenarios/prompts/mt_bench.jsonl").exists()
    assert (packages / "specstack_loadtest/templates/report.html.j2").exists()
    assert not list(packages.glob("**/test_*.py*"))


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("specstack/plan.py", False),
        ("serving/specstack_serving/main.py", False),
        ("serving/grafana/dashboards/specstack-cost.json", True),
        ("serving/compose.yaml", True),
        ("specstack/__pycache__/plan.cpython-311.pyc", True),
        ("tests/serving/test_docker.py", True),
        (".git/config", True),
        (".venv/bin/python", True),
    ],
)
def test_dockerignore_keeps_out_what_the_wheel_is_not_made_of(path: str, out: bool) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored(path, [line for line in lines if line and not line.startswith("#")]) is out


def test_both_targets_end_alike() -> None:
    """They differ in the base, in packages, in how long a start may take, and in the device."""
    assert set(STAGES) == {"wheel", *TARGETS}
    for instruction in ("COPY", "ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "ENTRYPOINT"):
        one, two = (steps(target, instruction) for target in TARGETS)
        assert one == two != [], instruction
    runs = [[run for run in steps(target, "RUN") if "apt-get" not in run] for target in TARGETS]
    assert runs[0] == [run.replace("python3 -m", "python -m") for run in runs[1]]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_pinned_and_serves_as_no_root(target: str) -> None:
    (base,) = steps(target, "FROM")
    assert re.search(r":\d[\w.-]+ AS", base)
    order = [step.instruction for step in STAGES[target]]
    assert order.index("USER") < order.index("ENTRYPOINT")
    (user,) = steps(target, "USER")
    assert user not in ("root", "0")
    (entry,) = steps(target, "ENTRYPOINT")
    assert json.loads(entry) == ["specstack", "serve"]
    (command,) = steps(target, "CMD")
    assert "engine.host=0.0.0.0" in json.loads(command), "127.0.0.1 is the container's own"


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = self.server.health if self.path == "/health" else 404  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def health_server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def health_check(target: str, port: int) -> int:
    (check,) = steps(target, "HEALTHCHECK")
    python, *rest = json.loads(check.split("CMD", 1)[1])
    assert python == "python"
    environment = {**os.environ, "HEALTH_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
    result = subprocess.run(
        [sys.executable, *rest], env=environment, capture_output=True, check=False
    )
    return result.returncode


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
def test_the_health_check_believes_a_200_only(
    health_server: HTTPServer, target: str, status: int, healthy: bool
) -> None:
    health_server.health = status  # type: ignore[attr-defined]
    assert (health_check(target, health_server.server_port) == 0) is healthy


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_of_nothing_fails(target: str) -> None:
    assert health_check(target, free_port()) != 0


COMPOSE: dict[str, Any] = yaml.safe_load((SERVING / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def compose_problems(compose: dict[str, Any]) -> list[str]:
    schema = json.loads((Path(__file__).parent / "data/compose-spec.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    return [error.json_path for error in validator.iter_errors(compose)]


def test_compose_keeps_the_compose_specification() -> None:
    assert compose_problems(COMPOSE) == []


def test_a_key_that_compose_does_not_know_is_noticed() -> None:
    """Control."""
    wrong = {**COMPOSE, "services": {"specstack": {"imag": "x"}}}
    assert compose_problems(wrong) == ["$.services.specstack"]


def mounts(service: str) -> dict[str, str]:
    """Sources by target: folders of the repository and named volumes."""
    volumes = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {volume[1]: volume[0] for volume in volumes}


def on_host(service: str, path: str) -> Path:
    """The file of the repository that a path within a container is."""
    folders = {at: source for at, source in mounts(service).items() if source.startswith(".")}
    target = max((at for at in folders if path.startswith(at)), key=len)
    return SERVING / folders[target] / path.removeprefix(target).lstrip("/")


def test_everything_that_is_mounted_exists() -> None:
    for name in SERVICES:
        for source in mounts(name).values():
            assert (SERVING / source).is_dir() if "/" in source else source in COMPOSE["volumes"]


def test_containers_find_their_files() -> None:
    config = SERVICES["prometheus"]["command"][0].removeprefix("--config.file=")
    assert on_host("prometheus", config) == SERVING / "prometheus/prometheus.yaml"
    provisioning = on_host("grafana", "/etc/grafana/provisioning")
    boards = yaml.safe_load((provisioning / "dashboards/specstack.yaml").read_text())
    folder = on_host("grafana", boards["providers"][0]["options"]["path"])
    assert len(list(folder.glob("*.json"))) == 4
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert on_host("grafana", home).exists()
    assert not on_host("grafana", home.replace("overview", "nothing")).exists()  # control


def test_services_find_each_other() -> None:
    sources = SERVING / "grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(sources.read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scrape = yaml.safe_load((SERVING / "prometheus/prometheus.yaml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"specstack:{steps('cpu', 'EXPOSE')[0]}"]
    assert {"specstack", "prometheus"} <= set(SERVICES)
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]


def test_a_service_starts_when_what_it_needs_is_healthy() -> None:
    waits = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    assert waits == {
        "specstack": {},
        "prometheus": {"specstack": {"condition": "service_healthy"}},
        "grafana": {"prometheus": {"condition": "service_healthy"}},
    }
    assert SERVICES["specstack"]["build"]["target"] in TARGETS
    assert steps("cpu", "HEALTHCHECK")
    assert "healthcheck" in SERVICES["prometheus"]


def test_compose_listens_to_this_machine_only_and_pins_its_images() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert re.search(r":(v?\d[\w.]+|cpu)$", service["image"])

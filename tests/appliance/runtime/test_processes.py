import os
import socket
import subprocess
import sys

from appliance.runtime import listener as listen
from appliance.runtime import processes


def test_a_zombie_child_is_not_a_descendant() -> None:
    command = [sys.executable, "-c", "input()"]
    living, dead = (subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2))
    assert {living.pid, dead.pid} <= set(processes.descendants(os.getpid()))
    dead.kill()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays a zombie
    found = processes.descendants(os.getpid())
    assert living.pid in found and dead.pid not in found
    for child in (living, dead):
        child.kill()
        child.communicate()


def test_lingering_connections_do_not_block_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # who closes first has the connection linger
            assert client.recv(1) == b""
    with listen.open_listener("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port

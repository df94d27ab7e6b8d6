"""Launches fakes as `slipway serve` launches the real programs:

driver.py DIRECTORY JSON      keys: port, engines (words of each), max, window_s, drain_s, startup_s, secrets, format,
                              exhausted, memory, keep, size, stalled_s, gateway_s
"""

import json
import os
import sys
from pathlib import Path

import msgspec

from appliance.config.gateway import GatewayConfig, SecretRef
from appliance.config.sections.endpoints import Endpoints
from appliance.config.sections.observability import Observability
from appliance.runtime.listener import LISTENER_SOCKET
from appliance.supervisor.crash_bundles import BundlePolicy
from appliance.supervisor.hangs import Budgets
from appliance.supervisor.launch import launch
from appliance.supervisor.monitor import Policy
from appliance.supervisor.supervise import CONTROL, Program, Service, engine_names, engine_program, gateway_program
from engine.arguments import engine_config

FAKE = str(Path(__file__).with_name("fake.py"))


def main(directory: Path, given: dict[str, object]) -> int:
    engines = given.get("engines", [["run"]])
    secrets = tuple(given.get("secrets", ()))
    budgets = Budgets(*[given["stalled_s"]] * 4) if "stalled_s" in given else Budgets()
    budgets = msgspec.structs.replace(budgets, gateway_s=given.get("gateway_s", 60.0))
    service = Service(
        gateway=GatewayConfig(
            endpoints=Endpoints(host="127.0.0.1", port=given["port"]),
            observability=Observability(log_format=given.get("format", "text")),
            names=("demo",),
            model="/nowhere",
            engines=(),
            max_context=64,
            vocab_size=97,
            drain_s=given.get("drain_s", 3.0),
            api_keys=SecretRef(env=secrets[0]) if secrets else None,
        ),
        engines=tuple(engine_config(model="/nowhere", kv_bytes=1, max_context=64, threads=3) for _ in engines),
        startup_s=given.get("startup_s", 600.0),
        restarts=Policy(
            given.get("max", 5),
            given.get("window_s", 600.0),
            given.get("backoff_s", 1.0),
            exhausted=given.get("exhausted", "exit"),
        ),
        secrets=secrets,
        memory=given.get("memory", ""),
        budgets=budgets,
    )

    def programs(service: Service, run: Path) -> list[Program]:
        words = (str(directory), str(run / LISTENER_SOCKET), str(run / CONTROL))
        found = [gateway_program(service, (sys.executable, FAKE, "gateway", *words))]
        for name, words in zip(engine_names(service), engines, strict=True):
            argv = (sys.executable, FAKE, "engine", str(directory), name, *words)
            found.append(engine_program(service, name, argv, threads=3))
        return found

    bundles = BundlePolicy((directory / "crashes",), given.get("keep", 10), given.get("size", 2**20))
    log = directory / "termination-log"
    return launch(service, os.environ, programs=programs, log=log, bundles=bundles)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))

"""A systemd service that runs the installed command, and the files for its folder below /etc.

systemd creates the folders of the service, passes secrets as credentials (systemd.exec(5)), and limits its memory.
"""

import sys
from pathlib import Path

from appliance.config import exits
from appliance.deployment.service import Deployment, Layout, gibibytes

FOLDER = "/etc/slipway"
_PERMANENT = (exits.MANIFEST, exits.CHECKPOINT, exits.MEMORY, exits.ENGINE, exits.INTEGRITY, exits.SELF_TEST)
"""Exits that a restart cannot fix."""
_HOMES = ("/home", "/root", "/run/user")
"""Folders that ProtectHome hides."""
_EXTRA_STOP_S = 5  # after the grace period, before systemd sends SIGKILL


def layout(name: str) -> Layout:
    """Return the folders that systemd creates for the service `name`."""
    return Layout(
        data=f"/var/lib/{name}",
        cache=f"/var/cache/{name}",
        secrets=f"/run/credentials/{name}.service",
        tls=f"/run/credentials/{name}.service",
        source=lambda path: {"path": str(path).replace("$", "$$")},
        folder=lambda name, path: str(path),
        secrets_as="files",
    )


def systemd(one: Deployment) -> dict[str, str]:
    """Return the unit, and the files of its folder by name."""
    return {f"{one.name}.service": _unit(one), **one.files}


def _unit(one: Deployment) -> str:
    sections = {
        "Unit": [
            f"Description=Slipway: {one.name}",
            "Documentation=man:systemd.service(5)",
            "Wants=network-online.target",
            "After=network-online.target",
            # A service whose start fails ten times within an hour is not started again.
            "StartLimitIntervalSec=1h",
            "StartLimitBurst=10",
        ],
        "Service": [*_process(one), *_files(one), *_limits(one), *_isolation(one)],
        "Install": ["WantedBy=multi-user.target"],
    }
    return "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def _process(one: Deployment) -> list[str]:
    command = _quoted(str(Path(sys.executable).parent / "slipway"))  # systemd expands no variables in it
    return [
        "Type=exec",
        f"ExecStart={command} serve {FOLDER}/{one.name}/manifest.yaml",
        "ExecReload=/bin/kill -HUP $MAINPID",
        # The service forwards the signal to its programs in order, so only its main process gets it.
        "KillMode=mixed",
        f"TimeoutStopSec={one.grace + _EXTRA_STOP_S}s",
        f"Environment=SLIPWAY_GRACE={one.grace}",
        "Restart=on-failure",
        "RestartSec=10s",
        f"RestartPreventExitStatus={' '.join(str(each.number) for each in _PERMANENT)}",
        # The service restarts an engine that the kernel killed for its memory.
        "OOMPolicy=continue",
    ]


def _files(one: Deployment) -> list[str]:
    lines = ["DynamicUser=yes", f"RuntimeDirectory={one.name}", "RuntimeDirectoryMode=0700"]
    lines += [f"Environment=XDG_RUNTIME_DIR=/run/{one.name}", f"CacheDirectory={one.name}"]
    lines += [f"Environment=XDG_CACHE_HOME=/var/cache/{one.name} HF_HOME=/var/cache/{one.name}/huggingface"]
    if one.data:
        lines += [f"StateDirectory={one.name}", "StateDirectoryMode=0700"]
    read = [*([one.model_path] if one.model else []), *one.folders.values(), *python_folders()]
    paths = [_quoted(str(path)).replace(":", "\\:") for path in read]  # a colon separates source and destination
    lines += [f"BindReadOnlyPaths={path}" for path in paths]
    for key, path in one.secret_files.items():
        written = path if path != Path() else Path(f"{FOLDER}/{one.name}/secrets/{key}")
        lines += [f"LoadCredential={key}:{_escaped(str(written))}"]
    return [*lines, *(f"LoadCredential={name}:{_escaped(str(path))}" for name, path in one.tls_files.items())]


def python_folders() -> list[Path]:
    """Return the folders of this Python and of Slipway that are below the folders of users."""
    paths = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[2])
    hidden = [path for path in dict.fromkeys(paths) if any(path.is_relative_to(home) for home in _HOMES)]
    return [path for path in hidden if not any(path != each and path.is_relative_to(each) for each in hidden)]


def _limits(one: Deployment) -> list[str]:
    return [f"MemoryMax={gibibytes(one.memory)}G", "LimitNOFILE=65536", "LimitMEMLOCK=infinity"]


def _isolation(one: Deployment) -> list[str]:
    capability = "CAP_NET_BIND_SERVICE" if one.port < 1024 else ""
    switches = ("NoNewPrivileges", "ProtectControlGroups", "ProtectKernelTunables", "ProtectKernelModules",
                "ProtectKernelLogs", "ProtectClock", "ProtectHostname", "RestrictSUIDSGID", "RestrictRealtime",
                "LockPersonality", "PrivateTmp")  # fmt: skip
    return [
        "ProtectSystem=strict",
        "ProtectHome=tmpfs",
        *(f"{name}=yes" for name in switches),
        # GPUs are device files.
        *([] if one.gpus else ["PrivateDevices=yes"]),
        *(["SupplementaryGroups=render video"] if one.amd else []),
        f"CapabilityBoundingSet={capability}",
        f"AmbientCapabilities={capability}",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallArchitectures=native",
        "UMask=0077",
    ]


def _escaped(text: str) -> str:
    """Escape specifiers of systemd."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a path as one word, also with spaces."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escaped(escaped)}"'

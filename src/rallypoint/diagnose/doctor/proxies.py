"""What stands between machines without being asked: HTTP proxies, and the sidecars of service meshes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from rallypoint.diagnose.doctor.shell import set_variable
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, ok, warning
from rallypoint.server.machine.ports import listening_ports

_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


class _Mesh:
    """How a service mesh gives itself away."""

    def __init__(self, name: str, variables: str, ports: set[int], paths: Collection[str], off: str) -> None:
        self.name = name
        self.variables = variables
        self.ports = ports
        self.paths = paths
        self.off = off


_MESHES: Final = (
    _Mesh(
        "Istio",
        "ISTIO_",
        {15_001, 15_006, 15_090},
        ("/etc/istio/proxy", "/var/run/secrets/istio"),
        'annotate the pods with sidecar.istio.io/inject: "false"',
    ),
    _Mesh(
        "Linkerd",
        "LINKERD",
        {4_140, 4_143, 4_191},
        ("/var/run/linkerd",),
        "annotate the pods with linkerd.io/inject: disabled",
    ),
)


def check_proxies(situation: Situation) -> Iterator[Finding]:
    found = [*_check_proxies(situation), *_check_meshes(situation.environ, listening_ports())]
    yield from found or [ok("proxies", "no proxy is set, and no sidecar of a service mesh is to be seen")]


def _check_proxies(situation: Situation) -> Iterator[Finding]:
    """Stores do not use them; etcd, downloads and loggers of experiments do."""
    environ = {name.lower(): value for name, value in situation.environ.items()}
    is_set = [name for name in _PROXIES if environ.get(name)]
    host = situation.endpoint.host if situation.endpoint else ""
    if not is_set:
        return
    what = f"{', '.join(is_set)} {'is' if len(is_set) == 1 else 'are'} set: stores and gloo do not use it"
    if host and not _is_excepted(host, environ.get("no_proxy", "")):
        yield warning(
            "proxies",
            f"{what}, but what asks {host} over HTTP would (etcd, model servers)",
            set_variable("no_proxy", ",".join(filter(None, (environ.get("no_proxy"), host)))),
        )
    else:
        yield ok("proxies", what)


def _is_excepted(host: str, exceptions: str) -> bool:
    names = [name.strip().lstrip("*").lstrip(".") for name in exceptions.split(",") if name.strip()]
    return exceptions.strip() == "*" or any(host == name or host.endswith(f".{name}") for name in names)


def _check_meshes(environ: Mapping[str, str], listening: Collection[int]) -> Iterator[Finding]:
    for mesh in _MESHES:
        signs = [
            *(f"the variable {name}" for name in environ if name.startswith(mesh.variables)),
            *(f"port {port}" for port in sorted(mesh.ports & set(listening))),
            *(path for path in mesh.paths if os.path.exists(path)),
        ]
        if signs:
            yield warning(
                "proxies",
                f"a sidecar of {mesh.name} seems to be here ({', '.join(signs[:3])}): it takes over "
                "connections, resets those that are no HTTP, and accepts what nobody listens to",
                mesh.off,
            )

"""All checks of one machine, in the order in which they are told."""

from __future__ import annotations

from typing import Final

from rallypoint.diagnose.doctor import (
    clock,
    endpoint,
    files,
    interfaces,
    limits,
    names,
    packages,
    proxies,
    stores,
    torch,
    variables,
)
from rallypoint.diagnose.doctor.runner import Check

CHECKS: Final = (
    Check("python", packages.check_python),
    Check("packages", packages.check_packages),
    Check("event-loop", packages.check_event_loop),
    Check("torch", torch.check_torch, torch.SECONDS),
    Check("variables", variables.check_variables),
    Check("host-name", names.check_host_name),
    Check("reverse-look-up", names.check_reverse),
    Check("address-families", interfaces.check_families),
    Check("interfaces", interfaces.check_interfaces),
    Check("endpoint", endpoint.check_endpoint),
    Check("port", endpoint.check_port),
    Check("loopback", stores.check_loopback, 20.0),
    Check("interface", stores.check_interface, 20.0),
    Check("store", stores.check_store, 20.0),
    Check("open-files", limits.check_open_files),
    Check("backlog", limits.check_backlog),
    Check("shared-memory", limits.check_shared_memory),
    Check("file-init", files.check_file_init, 15.0),
    Check("clock", clock.check_clock),
    Check("proxies", proxies.check_proxies),
)

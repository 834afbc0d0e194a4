"""Connect to a Ray cluster, and reserve one bundle of resources per rank."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from accelerate_core.plugin import ConfigurationError
from accelerate_launch.machine_0 import resolve
from accelerate_ray.settings import RaySettings, parse_resources, parse_runtime_env

#: Seconds in which a cluster must accept a connection.
_CONNECT = 6.0
#: Set in the driver of `ray job submit`, which has shipped its directory already.
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: After waiting this many seconds for resources, the launcher prints what it waits for.
_SILENCE = 5.0
#: A cluster that was started for this run does not grow, so missing resources are an error soon.
_LOCAL_WAIT = 3.0


@dataclass(frozen=True)
class Cluster:
    """A connection to a cluster.

    Attributes:
        shipped: whether the ranks run in a copy of the launcher's directory.
        local: whether the cluster was started for this run.
    """

    address: str
    shipped: bool
    local: bool
    runtime_env: Mapping[str, Any]

    def count_gpus(self) -> int:
        """Return the number of GPUs of all nodes."""
        return int(ray.cluster_resources().get("GPU", 0))


@contextmanager
def connected(settings: RaySettings, source: str) -> Iterator[Cluster]:
    """Connect to the cluster, and disconnect at the end. An existing connection is used and kept.

    Args:
        source: where the address came from, for errors.

    Raises:
        ConfigurationError: there is no cluster at the address, or a setting is invalid.
    """
    runtime_env = parse_runtime_env(settings.runtime_env)
    local = settings.address == "local"
    if ray.is_initialized():
        in_copy = _has_working_directory() or not _on_this_machine()
        yield Cluster(_address(), in_copy, local, runtime_env)
        return
    ship = {"working_dir": runtime_env.pop("working_dir", ".")}
    files = settings.files
    if local or _JOB in os.environ:  # the job has shipped its directory, if it was asked to
        files = "shared"
    try:
        _connect(settings.address, source, ship if files == "ship" else {})
        if files == "auto" and not _on_this_machine():
            ray.shutdown()
            _connect(settings.address, source, ship)
        yield Cluster(_address(), _has_working_directory(), local, runtime_env)
    finally:
        ray.shutdown()


def _connect(asked: str | None, source: str, runtime_env: dict[str, Any]) -> None:
    address = asked or "auto"
    _check_answers(address, source)
    try:
        ray.init(
            address=address,
            runtime_env=runtime_env or None,
            log_to_driver=False,  # the launcher prints the output of the ranks itself
            logging_level=logging.ERROR,
            **({"include_dashboard": False} if address == "local" else {}),
        )
    except (ConnectionError, TimeoutError) as error:
        if asked is None:
            raise ConfigurationError(
                "No Ray cluster runs on this machine. Start one with: ray start --head. Or name a "
                "cluster with --ray_address HOST:PORT, or start one for this run with --ray_address "
                "local."
            ) from None
        first = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"No Ray cluster answers at {address} ({source}): {first}"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"Cannot connect to Ray at {address!r}: {error}") from None


def _check_answers(address: str, source: str) -> None:
    """Check that something listens at the address, because Ray would try for more than a minute.

    Raises:
        ConfigurationError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        return
    try:
        resolve(host.strip("[]"), int(port))
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
    except OSError as error:
        raise ConfigurationError(
            f"No Ray cluster answers at {address} ({source}): "
            f"{error.strerror or error}. The head node prints its address when ray start --head has "
            "started it; the default port is 6379."
        ) from None


def _has_working_directory() -> bool:
    """Return whether processes of this connection run in a directory that Ray has copied."""
    return bool(ray.get_runtime_context().runtime_env.get("working_dir"))


def _address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _on_this_machine() -> bool:
    here = socket.gethostname()
    return all(node["NodeManagerHostname"] == here for node in ray.nodes() if node["Alive"])


def is_alive(node: str) -> bool:
    """Return whether the cluster still has a node."""
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def bundle_of(settings: RaySettings, gpus: int) -> dict[str, float]:
    """Return the resources that are reserved for each rank."""
    bundle = {"CPU": settings.cpus, "GPU": float(gpus), **parse_resources(settings.resources)}
    return {name: amount for name, amount in bundle.items() if amount}


@contextmanager
def reserved(
    cluster: Cluster, settings: RaySettings, bundle: Mapping[str, float], count: int
) -> Iterator[PlacementGroup]:
    """Reserve `count` bundles, and release them at the end.

    Raises:
        ConfigurationError: the cluster did not have the resources in time.
    """
    group = placement_group([dict(bundle)] * count, strategy=settings.strategy.upper())
    try:
        _wait_for(group, cluster, settings, bundle, count)
        yield group
    finally:
        remove_placement_group(group)


def has_room(bundle: Mapping[str, float], count: int, strategy: str, seconds: float) -> bool:
    """Return whether `count` bundles can be reserved within some seconds. They are released again."""
    group = placement_group([dict(bundle)] * count, strategy=strategy.upper())
    try:
        return bool(group.wait(timeout_seconds=seconds))
    finally:
        remove_placement_group(group)


def _wait_for(
    group: PlacementGroup,
    cluster: Cluster,
    settings: RaySettings,
    bundle: Mapping[str, float],
    count: int,
) -> None:
    patience = min(settings.wait, _LOCAL_WAIT) if cluster.local else settings.wait
    began = time.monotonic()
    said = False
    while not group.wait(timeout_seconds=0.5):
        waited = time.monotonic() - began
        asked = f"{count} x {_amounts(bundle)} ({settings.strategy})"
        if waited >= patience:
            raise ConfigurationError(
                f"The Ray cluster at {cluster.address} could not reserve {asked} within "
                f"{waited:.0f} s. It has {_nodes()}. Add nodes, ask for less with --num_processes, "
                "--ray_cpus, --ray_gpus or --ray_resources, or wait longer with --ray_wait."
            )
        if waited >= _SILENCE and not said:
            said = True
            sys.stderr.write(
                f"Waiting until the Ray cluster can reserve {asked}. It has {_nodes()}. Giving up "
                f"after {settings.wait:.0f} s (--ray_wait).\n"
            )
            sys.stderr.flush()


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _nodes() -> str:
    """Describe the resources of the nodes."""
    internal = ("node:", "memory", "object_store_memory")
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"].items()
            shown = {name: n for name, n in resources if not name.startswith(internal)}
            found.append(_amounts(shown) or "nothing")
    free = {
        name: n for name, n in ray.available_resources().items() if not name.startswith(internal)
    }
    nodes = "1 node" if len(found) == 1 else f"{len(found)} nodes"
    return f"{nodes} with {'; '.join(found)}, of which {_amounts(free) or 'nothing'} is free"

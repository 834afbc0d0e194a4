"""The launcher for several processes, which uses torch's elastic agent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from accelerate_launch.elastic import elastic_environment, restarts_of
from accelerate_launch.functions import run_elastic
from accelerate_launch.plan import DEFAULT_PORT, LOOPBACK, LaunchPlan

#: The extended version of torch's agent.
_AGENT_MODULE = "accelerate_launch.agent"


class TorchrunLauncher:
    """Starts one agent per machine. The agent starts, monitors and restarts the ranks."""

    name = "torchrun"
    api_version = (1, 0)
    priority = 10

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        return True

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on this machine."""
        command = [sys.executable, "-m", _AGENT_MODULE]
        if plan.quiet:
            command.append("--quiet")
        if plan.num_machines > 1:
            command += ["--address_source", address_source(plan)]
            command += _claim(plan)
        command += _rendezvous(plan)
        command += ["--nproc_per_node", str(plan.processes_per_machine)]
        command += ["--max_restarts", str(restarts_of(plan))]
        command += ["--monitor_interval", str(plan.monitor_interval)]
        for option in ("log_dir", "tee", "role"):
            value = getattr(plan, option)
            if value is not None:
                command += [f"--{option}", str(value)]
        if plan.log_dir is not None and plan.tee is None:
            command += ["--tee", "3"]  # otherwise torch creates the folder but writes nothing to it
        flags = {"script": [], "module": ["--module"], "program": ["--no_python"]}
        return [*command, *flags[plan.target.kind], "--", plan.target.path, *plan.target.arguments]

    def launch_environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Return the full size of an elastic launch, which the processes compare with their own."""
        if plan.min_machines is None:
            return {}
        return {
            **elastic_environment(plan),
            # torch 2.13 publishes the address of the shared store only once, so a machine that joins
            # later would wait for it in vain.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def launch_function(
        self, function: Callable[..., Any], args: Sequence[Any], plan: LaunchPlan
    ) -> None:
        """Run a function in the plan's processes on this machine. The agent runs in this process."""
        run_elastic(function, args, plan)


def address_source(plan: LaunchPlan) -> str:
    """Return where machine 0's address and port came from, for the agent's messages."""
    address, port = (plan.provenance.get(name) for name in ("main_process_ip", "main_process_port"))
    port_source = "default" if port is None or port.value is None else port.origin
    address_source = "default" if address is None else address.origin
    return f"main_process_ip from {address_source}, main_process_port from {port_source}"


def _claim(plan: LaunchPlan) -> list[str]:
    """Return an agent option if the command line calls this machine number 0 with c10d.

    c10d ignores the number. A number in a config file doesn't count, because all machines may share
    the file.
    """
    rank = plan.provenance.get("machine_rank")
    if plan.rdzv_backend != "c10d" or rank is None or rank.value != 0:
        return []
    host = plan.provenance.get("rdzv_conf")
    if not rank.origin.startswith("command line") or "is_host=" in str(host and host.value):
        return []
    return ["--claim", f"{rank.origin} 0"]


def _rendezvous(plan: LaunchPlan) -> list[str]:
    conf = ["--rdzv_conf", plan.rdzv_conf] if plan.rdzv_conf else []
    if plan.num_machines == 1 and plan.main_process_port is None and not plan.main_process_ip:
        # The system chooses a free port, and the loopback address needs no name service.
        return ["--standalone", "--local_addr", LOOPBACK, *conf]
    address = plan.main_process_ip or LOOPBACK
    port = plan.main_process_port or DEFAULT_PORT
    nodes = str(plan.num_machines)
    if plan.min_machines is not None:
        nodes = f"{plan.min_machines}:{plan.num_machines}"
    machines = ["--nnodes", nodes]
    # An address works even without a name service.
    local = ["--local_addr", plan.local_addr] if plan.local_addr else []
    if plan.rdzv_backend == "static":
        static = ["--node_rank", str(plan.machine_rank), "--master_addr", address]
        return [*machines, *static, "--master_port", str(port), *local, *conf]
    endpoint = ["--rdzv_backend", plan.rdzv_backend, "--rdzv_endpoint", f"{address}:{port}"]
    name = plan.rdzv_id or f"accelerate-{port}"
    return [*machines, *endpoint, "--rdzv_id", name, *local, *conf]

"""Start the ranks of a run, watch them, and start them again if one fails or its node dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from accelerate_core.plugin import ConfigurationError
from accelerate_launch.elastic import RESTARTED
from accelerate_launch.failures import caused_by_setting, describe
from accelerate_launch.membership import Machine
from accelerate_launch.membership import describe as describe_machines
from accelerate_launch.plan import PREEMPTED, counted
from accelerate_ray.cluster import Cluster, bundle_of, connected, is_alive, reserved
from accelerate_ray.elastic import Joining, choose_size, sizes_of
from accelerate_ray.options import RunOptions, shipped_variables
from accelerate_ray.output import Output
from accelerate_ray.rank_actor import Ending, News, Place, RankActor
from accelerate_ray.ranks import Rank, number_ranks, shared_devices

#: Seconds that a rank has to end after SIGTERM, before it is killed.
_GRACE = 15.0
#: Seconds in which Ray notices that a node is gone.
_NOTICE = 40.0
#: Ray may report that an actor is dead this many seconds before it reports that its node is.
_DECISION = 5.0
#: Seconds before an actor or the cluster is asked again.
_PAUSE = 0.2
_SILENT = "its node on {host} does not answer."
#: Seconds that one call for news waits.
_NEWS = 5.0
#: A node may die while ranks are placed on it. Placing is tried this many times.
_PLACEMENTS = 5


@dataclass(frozen=True)
class RankFailure:
    """A failed rank, with the attributes of torch's `ProcessFailure` and its host."""

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    host: str
    message: Any
    timestamp: int


@dataclass
class Outcome:
    """How an attempt ended.

    Attributes:
        failures: the ranks that failed, in the order of their failures.
        lost: why the actor of a rank ended without the rank's exit status.
        values: the return values of a function, in the order of ranks.
        joined: whether the ranks were stopped because a node has joined an elastic run.
    """

    failures: dict[int, RankFailure] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    joined: bool = False

    @property
    def ok(self) -> bool:
        """Whether all ranks have succeeded."""
        return not self.failures and not self.lost and not self.joined

    def explain(self, *, quiet: bool) -> tuple[str, int]:
        """Return a description of the failure, and the exit status of the launcher."""
        if not self.lost:
            return describe(self.failures, brief=quiet)
        # The other ranks only failed because they lost the connection to this one.
        lines = [f"Rank {rank} was lost: {why}" for rank, why in sorted(self.lost.items())]
        return "\n" + "\n".join(lines) + "\n", 1


class PlacementLostError(Exception):
    """A node died while ranks were placed on it."""


class Terminated(BaseException):
    """The launcher should stop the ranks now."""


def run(
    options: RunOptions,
    make_command: Callable[[Cluster], list[str]],
    signals: Sequence[int] = (),
) -> Outcome:
    """Run all ranks until they have succeeded, or failed more often than `max_restarts`.

    Args:
        make_command: returns the command line of a rank.
        signals: receives the numbers of signals that should be passed on to the ranks.

    Raises:
        ConfigurationError: a setting is invalid, or the cluster does not have the resources.
    """
    with (
        connected(options.settings, options.address_source) as cluster,
        tempfile.TemporaryDirectory(prefix="accelerate-ray-") as folder,
    ):
        gpus = _gpus_of(options, cluster)
        count = options.num_processes or (gpus and cluster.count_gpus()) or 1
        bundle = bundle_of(options.settings, gpus)
        command = make_command(cluster)
        output = Output(options.prefix, options.log_dir, options.tee)
        sizes = sizes_of(options, count)
        attempt = 0
        restarts = 0
        placements = 0
        machines: frozenset[Machine] = frozenset()
        while True:
            output.begin(attempt)
            try:
                joining = Joining(bundle, options.share, options.settings.strategy)
                count = choose_size(options, bundle, sizes)
                with reserved(cluster, options.settings, bundle, count) as group:
                    one = Attempt(
                        options, cluster, group, output, signals, Path(folder), attempt, machines
                    )
                    can_grow = count < sizes[-1]
                    outcome = one.run(command, bundle, count, joining if can_grow else None)
            except PlacementLostError as error:
                placements += 1
                if placements == _PLACEMENTS:
                    raise ConfigurationError(
                        f"Ray could not place the ranks in {placements} attempts: {error} If no "
                        "node died in the meantime, check that RAY_AUTH_MODE and Ray's token are the "
                        "same here and on the cluster."
                    ) from None
                continue
            finally:
                output.close()
            machines = one.machines
            if outcome.ok or one.told_to_end:
                return outcome
            attempt += 1
            if outcome.joined:
                sys.stderr.write("A node has joined. Restarting all ranks.\n")
                sys.stderr.flush()
                continue
            preempted = any(one.exitcode == PREEMPTED for one in outcome.failures.values())
            if preempted or caused_by_setting(outcome.failures) or restarts == options.max_restarts:
                return outcome
            restarts += 1
            text, _ = outcome.explain(quiet=options.quiet)
            which = f"restart {restarts} of {options.max_restarts}"
            sys.stderr.write(f"{text}Restarting all ranks ({which}).\n")
            sys.stderr.flush()


def _gpus_of(options: RunOptions, cluster: Cluster) -> int:
    asked = options.settings.gpus
    if asked is not None:
        return asked
    return 1 if cluster.count_gpus() and not options.on_cpu else 0


class Attempt:
    """One start of all ranks."""

    def __init__(
        self,
        options: RunOptions,
        cluster: Cluster,
        group: PlacementGroup,
        output: Output,
        signals: Sequence[int],
        folder: Path,
        number: int,
        machines: frozenset[Machine],
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._group = group
        self._output = output
        self._signals = signals
        self._folder = folder
        self._number = number
        self._ranks: list[Rank] = []
        self._actors: list[Any] = []
        self._passed_on = 0
        #: The nodes of the ranks. Until this attempt has placed its own, those of the attempt before.
        self.machines = machines
        #: Whether a signal that ends a run was passed on to the ranks.
        self.told_to_end = False

    def run(
        self,
        command: list[str],
        bundle: Mapping[str, float],
        count: int,
        joining: Joining | None,
    ) -> Outcome:
        """Place and start the ranks, and wait until all of them have ended.

        Args:
            joining: says when the ranks should be stopped, because a node has joined.

        Raises:
            PlacementLostError: a node died before the ranks were started.
            ConfigurationError: the ranks cannot be started on a node.
        """
        try:
            self._actors = self._make_actors(bundle, count)
            self._ranks = number_ranks(
                self._actors, self._places(), ray.get_runtime_context().get_node_id()
            )
            self._start(command)
            self._print_membership()
            try:
                outcome = self._watch(joining)
            finally:
                if joining is not None:
                    joining.close()
            if outcome.ok and self._options.files:
                results = [rank.actor.result.remote() for rank in self._ranks]
                outcome.values = [ray.cloudpickle.loads(one) for one in ray.get(results)]
            return outcome
        finally:
            self._end()

    def _make_actors(self, bundle: Mapping[str, float], count: int) -> list[Any]:
        others = {name: n for name, n in bundle.items() if name not in ("CPU", "GPU")}
        remote: Any = ray.remote(RankActor)
        return [
            remote.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=others,
                max_concurrency=4,
                runtime_env=dict(self._cluster.runtime_env) or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(count)
        ]

    def _places(self) -> list[Place]:
        try:
            places: list[Place] = ray.get(
                [actor.place.remote() for actor in self._actors],
                timeout=self._options.settings.wait,
            )
        except RuntimeEnvSetupError as error:
            raise ConfigurationError(f"Ray could not set up runtime_env: {error}") from None
        except GetTimeoutError:
            raise ConfigurationError(
                "Ray reserved the resources, but did not start all actors within "
                f"{self._options.settings.wait:.0f} s (--ray_wait)."
            ) from None
        except RayActorError as error:
            if "No module named" in str(error):
                last = str(error).strip().splitlines()[-1]
                raise ConfigurationError(
                    f"A node of the cluster cannot import accelerate_ray: {last}. Install "
                    "accelerate-core[ray] on every node, or name it in --ray_runtime_env: "
                    '{"pip": ["accelerate-core[ray]"]}.'
                ) from None
            raise PlacementLostError(_reason(error)) from None
        return places

    def _start(self, command: list[str]) -> None:
        first = self._ranks[0]
        port = self._options.port or ray.get(first.actor.free_port.remote(), timeout=60)
        shared = shared_devices(self._ranks)
        base = shipped_variables(os.environ, shipped=self._cluster.shipped)
        base |= self._options.environment
        nodes = list(dict.fromkeys(rank.place.node for rank in self._ranks))
        started = []
        for rank in self._ranks:
            same = sum(other.place.node == rank.place.node for other in self._ranks)
            variables = {
                "RANK": rank.number,
                "WORLD_SIZE": len(self._ranks),
                "LOCAL_RANK": rank.local_rank,
                "LOCAL_WORLD_SIZE": same,
                "GROUP_RANK": nodes.index(rank.place.node),
                "MASTER_ADDR": first.place.address,
                "MASTER_PORT": port,
                "TORCHELASTIC_RESTART_COUNT": self._number,
            }
            environment = base | shared[rank.place.node]
            environment |= {name: str(value) for name, value in variables.items()}
            if self._number:
                environment[RESTARTED] = "1"
            directory = rank.place.directory if self._cluster.shipped else os.getcwd()
            arguments = (command, environment, directory, self._options.files)
            started.append(rank.actor.start.remote(*arguments))
        try:
            ray.get(started, timeout=60)
        except RayActorError as error:
            raise PlacementLostError(_reason(error)) from None
        except RayError as error:
            raise ConfigurationError(f"Ray could not start a rank: {_cause(error)}") from None

    def _print_membership(self) -> None:
        """Print which nodes have joined or left since the attempt before."""
        before = self.machines
        places = (rank.place for rank in self._ranks)
        self.machines = frozenset(Machine(one.host, f"node {one.node[:8]}") for one in places)
        if before and self.machines != before:
            text = describe_machines(before, self.machines)
            sys.stderr.write(f"{text}; {counted(len(self._ranks), 'process')}\n")
            sys.stderr.flush()

    def _watch(self, joining: Joining | None) -> Outcome:
        """Show output until all ranks have ended.

        Stop the ranks after the first failure, or when a node joins.
        """
        outcome = Outcome()
        waiting = {rank.actor.news.remote(_NEWS): rank for rank in self._ranks}
        last: float | None = None
        while waiting and (last is None or time.monotonic() < last):
            self._pass_signals_on()
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.2)
            for answer in done:
                rank = waiting.pop(answer)
                try:
                    news: News = ray.get(answer)
                except ActorUnavailableError:  # Ray finds out whether the node has died
                    if rank.unanswered < _NOTICE:
                        rank.unanswered += _PAUSE
                        time.sleep(_PAUSE)
                        waiting[rank.actor.news.remote(_NEWS)] = rank
                    else:
                        outcome.lost[rank.number] = _SILENT.format(host=rank.place.host)
                    continue
                except RayActorError as error:
                    outcome.lost[rank.number] = self._why_lost(rank, error)
                    continue
                rank.unanswered = 0.0
                self._output.show(rank.number, rank.local_rank, news.lines)
                rank.ending = news.ending
                if news.ending is None:
                    waiting[rank.actor.news.remote(_NEWS)] = rank
                elif news.ending.status:
                    outcome.failures[rank.number] = self._failure(rank, news.ending)
            if last is None and joining is not None and joining.has_joined():
                outcome.joined = True
            if last is None and not outcome.ok and not self._is_preempted(outcome):
                last = time.monotonic() + _NOTICE
                for rank in waiting.values():
                    rank.actor.stop.remote(_GRACE)
        for rank in waiting.values():
            outcome.lost.setdefault(rank.number, _SILENT.format(host=rank.place.host))
        # The ranks may have succeeded before they were stopped.
        outcome.joined = outcome.joined and bool(outcome.failures or outcome.lost)
        return outcome

    def _is_preempted(self, outcome: Outcome) -> bool:
        """Return whether the ranks should end, and those that have ended had saved their state.

        The others may need long to save, and a second SIGTERM would interrupt that.
        """
        saved = all(one.exitcode == PREEMPTED for one in outcome.failures.values())
        return self.told_to_end and saved and not outcome.lost

    def _pass_signals_on(self) -> None:
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            if number == signal.SIGTERM and self.told_to_end:
                raise Terminated
            self.told_to_end = self.told_to_end or number == signal.SIGTERM
            for rank in self._ranks:
                if rank.ending is None:
                    rank.actor.send_signal.remote(number)

    def _why_lost(self, rank: Rank, error: RayActorError) -> str:
        place = rank.place
        last = time.monotonic() + _DECISION
        while is_alive(place.node) and time.monotonic() < last:
            time.sleep(_PAUSE)
        if not is_alive(place.node):
            return f"its node {place.node[:8]} on {place.host} died."
        return f"its actor on {place.host} ended: {_reason(error)}"

    def _failure(self, rank: Rank, ending: Ending) -> RankFailure:
        """Copy what the rank has recorded to files of this machine, from which it is described."""
        folder = self._output.folder_of(rank.number)
        if folder is None:
            folder = self._folder / str(self._number) / str(rank.number)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "error.json"
        file.write_text(ending.error, encoding="utf-8")
        if ending.stacks:
            Path(f"{file}.stacks").write_text(ending.stacks, encoding="utf-8")
        message: Any = ""
        when = int(ending.when)
        try:
            message = json.loads(ending.error)["message"]
            when = int(message["extraInfo"]["timestamp"])
        except (ValueError, KeyError, TypeError):
            pass  # it has recorded nothing
        return RankFailure(
            rank.local_rank, ending.pid, ending.status, str(file), rank.place.host, message, when
        )

    def _end(self) -> None:
        """End all ranks that still run, and all actors."""
        closing = [rank.actor.close.remote() for rank in self._ranks]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=3)
        for actor in self._actors:
            ray.kill(actor)


#: Lines of Ray's errors that only identify an actor.
_IDENTIFIES = ("class_name:", "actor_id:", "namespace:", "pid:", "ip:", "name:")


def _reason(error: BaseException) -> str:
    """Return the text of Ray's error on one line, without identifiers of the actor."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_IDENTIFIES))


def _cause(error: RayError) -> str:
    cause = getattr(error, "cause", None)
    return str(cause) if cause is not None else _reason(error)

"""Under what plugins are chosen, for those who tell the choice without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accelerate_core.config.files import ConfigFile
from accelerate_core.contract.topology import Topology, read_topology
from accelerate_core.plugins.selection import Considered, Request

__all__ = ["Situation"]


@dataclass(frozen=True)
class Situation:
    """The environment of a run, its config file and its processes.

    Attributes:
        environ: what the run's processes see.
        launchers: what became of each installed launcher; empty if that was not asked.
        problem: why `launch` would start nothing; "" if it would.
        launched: whether this is a run as `launch` starts it, so that its problem is everybody's.
    """

    environ: Mapping[str, str]
    config: ConfigFile | None
    topology: Topology
    launchers: tuple[Considered, ...] = ()
    problem: str = ""
    launched: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Situation:
        """Return that of a script which is started with this environment."""
        from accelerate_core.config.resolve import Sources

        return cls(dict(environ), Sources.of(environ).config, read_topology(environ))

    def request(self, *, cpu: bool) -> Request:
        """Return what plugins are asked with; `cpu` is the setting of that name."""
        return Request({}, self.environ, self.topology, self.config, cpu)

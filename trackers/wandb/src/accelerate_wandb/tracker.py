"""`WandBTracker`, which logs to a Weights & Biases run."""

from __future__ import annotations

import configparser
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from accelerate_core.plugin import warn
from accelerate_tracking import Columns, GeneralTracker, Rows, pictures, unreachable


class WandBTracker(GeneralTracker):
    """A Weights & Biases run. With `WANDB_MODE=offline`, it stays on disk for `wandb sync`.

    Args:
        run_name: name of the project.
        kwargs: passed to `wandb.init`.
    """

    name = "wandb"
    api_version = (1, 0)
    requires_logging_directory = False
    library = "wandb>=0.19"
    failed_word = "failed"
    resumes = True
    groups = True
    packages = ("wandb", "PIL", "matplotlib", "plotly")

    #: Ids of the runs that trackers of this class have open.
    _open: ClassVar[set[str]] = set()

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._last = 0

    @classmethod
    def unusable(cls, environ: Mapping[str, str]) -> str | None:
        why = super().unusable(environ)
        mode = environ.get("WANDB_MODE") or _setting(environ, "mode")
        if why or mode.lower() in {"offline", "dryrun", "disabled"}:
            return why
        server = environ.get("WANDB_BASE_URL") or _setting(environ, "base_url")
        server = server or "https://api.wandb.ai"
        if environ.get("WANDB_API_KEY") or _in_netrc(environ, urlsplit(server).hostname or ""):
            return unreachable(server, environ)
        return "it needs an account: set WANDB_API_KEY, or WANDB_MODE=offline"

    @property
    def tracker(self) -> Any:
        """The run that `wandb.init` returned."""
        return self.run

    @property
    def run_id(self) -> str:
        return str(self.run.id)

    def start(self) -> None:
        import wandb

        self._wandb: Any = wandb
        options: dict[str, Any] = {"project": self.run_name}
        if self.resume_id is not None:
            options |= {"id": self.resume_id, "resume": "allow"}
        if self.run_group is not None:
            options |= {"group": self.run_group.name, "name": f"rank{self.run_group.rank}"}
            options["reinit"] = "create_new"
        elif wandb.run is not None and wandb.run.id in self._open:
            options["reinit"] = "create_new"  # the open run belongs to another Accelerator
        options |= self._kwargs
        if "dir" in options:
            # The library's process resolves relative paths against its own working directory.
            options["dir"] = os.path.abspath(options["dir"])
        self.run: Any = wandb.init(**options)
        self._open.add(self.run.id)
        self._last = int(self.run.step or 0)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log one row. `kwargs` go to `wandb.Run.log`."""
        if step is not None and step < self._last:
            # The library drops rows with an earlier step than the last one.
            warn(
                f"wandb only accepts increasing steps, but step {step} came after {self._last}. "
                "Values of earlier steps are logged at the last step.",
            )
            step = self._last
        self._last = step if step is not None else self._last + 1
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each batch as one list of images. `kwargs` go to `wandb.Image`."""
        found = {
            name: [self._wandb.Image(image, **kwargs) for _, _, image in pictures({name: batch})]
            for name, batch in values.items()
        }
        self.log(found, step)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        # Otherwise None, and columns with several types, would be refused.
        options = {"allow_mixed_types": True, **kwargs}
        self.log({table_name: self._wandb.Table(columns=columns, data=data, **options)}, step)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        import matplotlib.pyplot  # noqa: F401  the library expects it to be imported

        self.log({name: self._wandb.Image(figure, **kwargs)}, step)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Log a file or directory. `kwargs` go to `wandb.Artifact`."""
        name = re.sub(r"[^a-zA-Z0-9_.\-]+", "_", name)[:128]
        artifact = self._wandb.Artifact(**{"name": name, "type": "file", **kwargs})
        add = artifact.add_dir if Path(path).is_dir() else artifact.add_file
        add(path)
        self.run.log_artifact(artifact)

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.log({name: text}, step, **kwargs)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.log({name: self._wandb.Histogram(values, **kwargs)}, step)

    def flush(self) -> bool:
        return False  # a process of the library writes, and does not report when it has

    def finish(self) -> None:
        self._open.discard(self.run.id)
        self.run.finish()

    def finish_failed(self) -> None:
        self._open.discard(self.run.id)
        self.run.finish(exit_code=1)


def _in_netrc(environ: Mapping[str, str], host: str) -> bool:
    path = environ.get("NETRC") or os.path.join(os.path.expanduser("~"), ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _setting(environ: Mapping[str, str], name: str) -> str:
    """Return a setting that `wandb offline` or `wandb login` wrote for this folder or the user."""
    user = Path(environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    here = Path(environ.get("WANDB_DIR") or ".")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([user / "settings", here / ".wandb" / "settings", here / "wandb" / "settings"])
    except (configparser.Error, OSError, UnicodeDecodeError):
        return ""
    return parser.get("default", name, fallback="")

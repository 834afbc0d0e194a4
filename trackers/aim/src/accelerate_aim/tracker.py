"""`AimTracker`, which logs to an Aim repository on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate_tracking import GeneralTracker, each, pictures, split


class AimTracker(GeneralTracker):
    """A run in the Aim repository `LOGGING_DIR/.aim`.

    Args:
        run_name: name of the run and of its experiment.
        logging_dir: directory of the repository.
        kwargs: passed to `aim.Run`.
    """

    name = "aim"
    api_version = (1, 0)
    requires_logging_directory = True
    library = "aim>=3.20"
    resumes = True
    groups = True
    packages = ("aim",)

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = str(logging_dir)
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self.writer

    @property
    def run_id(self) -> str:
        return str(self.writer.hash)

    def start(self) -> None:
        import aim

        self._aim: Any = aim
        options: dict[str, Any] = {"repo": self.logging_dir, "experiment": self.run_name}
        if self.resume_id is not None:
            options |= {"run_hash": self.resume_id, "force_resume": True}
        self.writer: Any = aim.Run(**{**options, **self._kwargs})
        self.writer.name = self.run_name
        if self.run_group is not None:
            self.writer.name += f" rank{self.run_group.rank}"
            self.writer.add_tag(self.run_group.name)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = _storable(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each value; `kwargs` go to `aim.Run.track`."""
        numbers, texts, others = split(values)
        objects = {key: self._aim.Text(text) for key, text in texts.items()}
        each(
            {**numbers, **objects, **others},
            lambda key, value: self.writer.track(value, name=key, step=step, **kwargs),
        )

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each batch as one list; `kwargs` go to `aim.Image`."""
        for name, found in values.items():
            images = [image for _, _, image in pictures({name: found})]
            batch = [self._aim.Image(image, **kwargs) for image in images]
            self.writer.track(batch if len(batch) > 1 else batch[0], name=name, step=step)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self.writer.track(self._aim.Image(figure, **kwargs), name=name, step=step)

    def log_artifact(self, path: str, name: str, **kwargs: Any) -> None:
        """Store a file or directory, by default in `artifacts` next to the repository."""
        if self.writer.artifacts_uri is None:
            folder = Path(self.logging_dir).absolute() / "artifacts"
            folder.mkdir(parents=True, exist_ok=True)
            self.writer.set_artifacts_uri(folder.as_uri())
        upload = self.writer.log_artifacts if Path(path).is_dir() else self.writer.log_artifact
        upload(path, name, **{"block": True, **kwargs})

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.writer.track(self._aim.Text(text), name=name, step=step, **kwargs)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.writer.track(self._aim.Distribution(values, **kwargs), name=name, step=step)

    def finish(self) -> None:
        self.writer.close()


def _storable(value: Any) -> Any:
    """Return a copy with integers of more than 64 bits, which Aim cannot store, as strings."""
    from accelerate_core.plugin import map_leaves

    def storable(leaf: Any) -> Any:
        return str(leaf) if type(leaf) is int and not -(2**63) <= leaf < 2**63 else leaf

    return map_leaves(storable, value)

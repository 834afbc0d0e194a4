"""Accelerate's registry of tracker classes, and its trackers for ClearML and TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import yaml

from accelerate_core.plugin import ConfigurationError, MissingPluginError
from accelerate_tracking import GeneralTracker, get_available_trackers, normalise_log_with
from accelerate_tracking.choice import _registered, available_names, tracker_class


class _Classes(MutableMapping[str, type[GeneralTracker]]):
    """Installed and registered tracker classes by name. Adding an entry registers a class."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        try:
            return tracker_class(str(name))
        except MissingPluginError as error:
            raise KeyError(str(error)) from error

    def __setitem__(self, name: str, value: type[GeneralTracker]) -> None:
        _registered[name] = value

    def __delitem__(self, name: str) -> None:
        del _registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(available_names())

    def __len__(self) -> int:
        return len(available_names())


LOGGER_TYPE_TO_CLASS = _Classes()


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the requested trackers, each once.

    Args:
        log_with: see `Accelerator`; "all" means all installed trackers.
        logging_dir: the folder for trackers that need one.

    Raises:
        MissingPluginError: a tracker is not installed.
        ConfigurationError: a tracker needs `logging_dir`.
    """
    asked = normalise_log_with(log_with)
    if "all" in asked:
        return [one for one in asked if not isinstance(one, str)] + get_available_trackers()
    for one in asked:
        cls: Any = tracker_class(one) if isinstance(one, str) else one
        if cls.requires_logging_directory and isinstance(one, str) and logging_dir is None:
            raise ConfigurationError(f"The tracker {one!r} needs a folder. Pass logging_dir.")
    return list(asked)


try:
    _ClearML: Any = tracker_class("clearml")
except MissingPluginError:  # importing the name raises an error that says what to install
    pass
else:

    class ClearMLTracker(_ClearML):
        """A ClearML task, with Accelerate's mapping of names.

        `eval_loss` has the title `loss` and the series `eval`; `test_` and `train_` work in the same
        way. Other names are titles in the series `train`. Values without a step are single values.

        Args:
            run_name: the name of the project and the task; the environment variables
                `CLEARML_PROJECT` and `CLEARML_TASK` take precedence.
            kwargs: arguments for `clearml.Task.init`.
        """

        counts_steps = False

        def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
            variables = {"project_name": "CLEARML_PROJECT", "task_name": "CLEARML_TASK"}
            names = {key: os.environ[name] for key, name in variables.items() if name in os.environ}
            super().__init__(run_name, **(names | kwargs))

        @staticmethod
        def _place(name: str) -> tuple[str, str]:
            series, found, title = name.partition("_")
            prefixed = found and series in ("eval", "test", "train")
            return (title, series) if prefixed else (name, "train")

        def _report(self, name: str, number: float, step: int | None, **kwargs: Any) -> None:
            if step is not None:
                super()._report(name, number, step, **kwargs)
            else:
                self.task.get_logger().report_single_value(name=name, value=number, **kwargs)

        def log_images(
            self, values: dict[str, Any], step: int | None = None, **kwargs: Any
        ) -> None:
            """Log images by name: single ones, which ClearML saves as JPEG, or batches, as PNG."""
            batches = {key: one for key, one in values.items() if getattr(one, "ndim", 0) == 4}
            if batches:
                super().log_images(batches, step, **kwargs)
            for key in [key for key in values if key not in batches]:
                title, series = self._place(key)
                self.task.get_logger().report_image(
                    title, series, iteration=step, image=values[key], **kwargs
                )

        def log_table(
            self,
            table_name: str,
            columns: list[str] | None = None,
            data: list[list[Any]] | None = None,
            dataframe: Any = None,
            step: int | None = None,
            **kwargs: Any,
        ) -> None:
            """Log a table. Without `columns`, the first row of `data` has the column names.

            Raises:
                ConfigurationError: neither `data` nor `dataframe` is given.
            """
            if dataframe is None and data is None:
                raise ConfigurationError(
                    f"log_table({table_name!r}) needs data= (a list of rows) or dataframe=."
                )
            table = ([columns] if columns else []) + list(data or ())
            self.task.get_logger().report_table(
                *self._place(table_name),
                iteration=step,
                table_plot=table if dataframe is None else dataframe,
                **kwargs,
            )

    _registered.setdefault("clearml", ClearMLTracker)


try:
    _TensorBoard: Any = tracker_class("tensorboard")
except MissingPluginError:  # importing the name raises an error that says what to install
    pass
else:

    class TensorBoardTracker(_TensorBoard):
        """A TensorBoard run, with the config where Accelerate writes it: in `TIMESTAMP/hparams.yml`."""

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Write the hyperparameters to a folder with the current time, as events and as YAML."""
            # TensorBoard only supports numbers, strings and booleans as hyperparameters.
            simple = bool, int, float, str
            flat = {k: v if isinstance(v, simple) else json.dumps(v) for k, v in values.items()}
            self.writer.add_hparams(flat, metric_dict={})
            self.writer.flush()
            folder = self.logging_dir / str(time.time())
            folder.mkdir()
            (folder / "hparams.yml").write_text(yaml.dump(values), encoding="utf-8")

    _registered.setdefault("tensorboard", TensorBoardTracker)

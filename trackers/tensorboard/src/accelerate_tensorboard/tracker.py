"""`TensorBoardTracker`, which writes event files with torch's `SummaryWriter`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from accelerate_tracking import Columns, GeneralTracker, Rows, each, pictures, split


class TensorBoardTracker(GeneralTracker):
    """Writes event files to `LOGGING_DIR/RUN_NAME`, with the config as hyperparameters.

    Args:
        run_name: name of the directory of the run.
        logging_dir: the directory that contains it.
        kwargs: passed to `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    api_version = (1, 0)
    requires_logging_directory = True
    library = "tensorboard>=2.14"
    failed_word = "STATUS_FAILURE"
    resumes = True
    groups = True
    packages = ()
    counts_steps = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._kwargs = kwargs
        self._has_config = False

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    @property
    def run_id(self) -> str:
        return self.run_name

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.run_group is not None:
            self.logging_dir /= f"rank{self.run_group.rank}"
        self.writer: Any = SummaryWriter(str(self.logging_dir), **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # TensorBoard only supports numbers, strings and booleans as hyperparameters.
        flat = {
            key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for key, value in values.items()
        }
        experiment, begin, _ = hparams(flat, {})
        self.writer.file_writer.add_summary(experiment)
        self.writer.file_writer.add_summary(begin)
        self._has_config = True
        path = self.logging_dir / "hparams.json"
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write scalars and strings. `kwargs` go to `add_scalar`."""
        numbers, texts, _ = split(values)

        def write(key: str, value: Any) -> None:
            if key in numbers:
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            else:
                self.writer.add_text(key, value, global_step=step)

        each({**numbers, **texts}, write)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, _, image in pictures(values):
            layout = "HW" if image.ndim == 2 else "HWC"
            self.writer.add_image(name, image, global_step=step, dataformats=layout, **kwargs)

    def log_table(
        self, table_name: str, columns: Columns, data: Rows, step: int | None = None, **kwargs: Any
    ) -> None:
        """Write the table as Markdown, which the Text tab renders.

        See `Accelerator.log_table` for the arguments.
        """
        rows = [columns, ["---"] * len(columns), *data]
        cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
        text = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        self.writer.add_text(table_name, text, global_step=step, **kwargs)

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        self.writer.add_figure(name, figure, global_step=step, **{"close": False, **kwargs})

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        self.writer.add_text(name, text, global_step=step, **kwargs)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.writer.add_histogram(name, values, global_step=step, **kwargs)

    def flush(self) -> None:
        self.writer.flush()

    def finish(self) -> None:
        self._end("STATUS_SUCCESS")

    def finish_failed(self) -> None:
        self._end(self.failed_word)

    def _end(self, status: str) -> None:
        if self._has_config:  # sets the status of the hyperparameter session
            from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
            from torch.utils.tensorboard.summary import hparams

            _, _, end = hparams({}, {})
            content = end.value[0].metadata.plugin_data
            data = plugin_data_pb2.HParamsPluginData.FromString(content.content)
            data.session_end_info.status = api_pb2.Status.Value(status)
            data.session_end_info.end_time_secs = time.time()
            content.content = data.SerializeToString()
            self.writer.file_writer.add_summary(end)
        self.writer.close()

"""The script whose values the tests read back, the values that it logs, and its environment."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

NINE = (
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip

CONFIG = {
    "lr": 0.125,
    "epochs": 3,
    "flag": True,
    "name": "probe",
    "layers": [16, 8],
    "betas": (0.9, 0.99),
    "seed": None,
    "optimizer": {"kind": "adam", "eps": 1e-8},
}
#: The config as trackers receive it.
PLAIN_CONFIG = {
    "lr": 0.125,
    "epochs": 3,
    "flag": True,
    "name": "probe",
    "layers": [16, 8],
    "betas": [0.9, 0.99],
    "seed": None,
    "optimizer/kind": "adam",
    "optimizer/eps": 1e-8,
}
STEPS = 3
KEYS = ("python", "numpy", "zero_d", "nested/value", "nested/deep/count")
COLUMNS = ["word", "count"]
ROWS = [["x", 1], ["y", 2]]

#: Keeps the libraries from collecting data about the machine.
INIT_KWARGS: dict[str, dict[str, Any]] = {
    "aim": {"system_tracking_interval": None, "capture_terminal_logs": False},
    "clearml": {"auto_resource_monitoring": False, "auto_connect_streams": False},
    "dvclive": {"save_dvc_exp": False, "dvcyaml": None},
    "trackio": {"auto_log_gpu": False, "auto_log_cpu": False},
}


def environment(directory: Path) -> dict[str, str]:
    """Return an environment in which all nine write to one directory, offline and without accounts."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    # Without these variables, the libraries don't see the accounts of this machine.
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB", "COMET", "CLEARML", "MLFLOW", "SWANLAB", "TRACKIO", "HF_"))
    }
    dead = "http://127.0.0.1:9"
    return {
        **kept,
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "http_proxy": dead,
        "https_proxy": dead,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(directory / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(directory / "comet"),
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{directory / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(directory / "clearml"),
        "DVC_NO_ANALYTICS": "1",
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(directory / "swanlog"),
    }


def value(key: str, step: int) -> float:
    """Return the number logged under a key at a step. It is exact in float32."""
    return KEYS.index(key) + step * 0.25 if key != "nested/deep/count" else 10.0 + step


def row(step: int) -> dict[str, Any]:
    """Return the values of one call of `log`."""
    import numpy as np
    import torch

    return {
        "python": value("python", step),
        "numpy": np.float32(value("numpy", step)),
        "zero_d": torch.tensor(value("zero_d", step), dtype=torch.bfloat16),
        "nested": {
            "value": value("nested/value", step),
            "deep": {"count": np.int64(value("nested/deep/count", step))},
        },
    }


def images() -> Any:
    """Return a batch of two images, N H W C, uint8."""
    import numpy as np

    return np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)


def main(case: str) -> None:
    import torch

    from accelerate_core import Accelerator

    log_with = sys.argv[2].split(",") if len(sys.argv) > 2 else "all"
    accelerator = Accelerator(cpu=True, log_with=log_with, project_dir="logs")
    first = 0
    if case == "resume":
        accelerator.load_state("checkpoint")
        print("RESUMED", accelerator.resumed_runs, flush=True)
        first = STEPS
    init_kwargs = INIT_KWARGS
    if case == "ranks":
        init_kwargs = {
            name: {**INIT_KWARGS.get(name, {}), "main_process_only": False} for name in log_with
        }
    accelerator.init_trackers("probe", CONFIG, init_kwargs)
    for step in range(first, first + STEPS):
        accelerator.log(row(step), step=step)
    if case == "crash":
        raise ValueError("the script is at fault")
    if case == "kill":
        accelerator.save_state("checkpoint")
        accelerator.flush_trackers()
        time.sleep(2)  # trackio and wandb write in the background
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ("resume", "ranks"):
        accelerator.end_training()
        return
    accelerator.log({"word": "a word"}, step=STEPS - 1)
    picture = torch.from_numpy(images()).permute(0, 3, 1, 2)
    accelerator.log_images({"picture": picture}, step=STEPS - 1, channels_first=True)
    accelerator.log_table("table", columns=COLUMNS, data=ROWS, step=STEPS - 1)
    accelerator.log_text("note", "several words", step=STEPS - 1)
    accelerator.log_histogram("weights", torch.linspace(-1, 1, 101), step=STEPS - 1)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([0, 1], [1, 0])
    accelerator.log_figure("line", figure, step=STEPS - 1)
    Path("model.txt").write_text("weights", encoding="utf-8")
    accelerator.log_artifact("model.txt")
    print("TRACKERS", ",".join(tracker.name for tracker in accelerator.trackers), flush=True)
    accelerator.end_training()
    print("ENDED", ",".join(tracker.name for tracker in accelerator.trackers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

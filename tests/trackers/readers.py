"""Read what each library wrote, with the library's own reader if it has one, and print it as JSON.

    python readers.py DIRECTORY [NAME ...]

For each tracker, the result has the `config`, `values` (key -> [step, number] in order), `texts`,
`images` (name -> nested lists), `table` and `status` that its files contain.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def _only(paths: Any) -> Path:
    (path,) = list(paths)
    return path


def _pixels(source: Any) -> Any:
    import numpy as np
    from PIL import Image

    image = Image.open(source)
    # Some libraries add an opaque channel.
    return np.asarray(image.convert("RGB") if image.mode == "RGBA" else image).tolist()


def _series(rows: list[tuple[str, int, float]]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for key, step, number in rows:
        found.setdefault(key, []).append([step, number])
    return found


def read_tensorboard(directory: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    folder = directory / "logs" / "probe"
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    plugin = events.summary_metadata
    config: dict[str, Any] = {}
    status = ""
    for name, metadata in plugin.items():
        if metadata.plugin_data.plugin_name == "hparams":
            data = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
            for key, value in data.session_start_info.hparams.items():
                config[key] = getattr(value, value.WhichOneof("kind"))
            if name.endswith("session_end_info"):
                status = api_pb2.Status.Name(data.session_end_info.status)
    texts = {
        name.removesuffix("/text_summary"): events.Tensors(name)[0]
        .tensor_proto.string_val[0]
        .decode()
        for name in tags["tensors"]
        if name.endswith("/text_summary")
    }
    values = {
        tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]
    }
    for part in (path for path in folder.iterdir() if path.is_dir()):
        below = EventAccumulator(str(part), size_guidance={"scalars": 0}).Reload()
        for tag in below.Tags()["scalars"]:  # `add_scalars` writes these for a nested dict
            inner = part.name.removeprefix(f"{tag}_")
            values[f"{tag}/{inner}"] = [[event.step, event.value] for event in below.Scalars(tag)]
    return {
        "config": config,
        "values": values,
        "texts": texts,
        "images": {
            tag: _pixels(io.BytesIO(events.Images(tag)[0].encoded_image_string))
            for tag in tags["images"]
        },
        "histograms": tags["histograms"],
        "table": texts.get("table", ""),
        "status": status,
    }


def _leveldb(path: Path, header: int) -> list[bytes]:
    """Return the records of a file in LevelDB's log format, which two libraries use."""
    data, block = path.read_bytes(), 32768
    records, parts, at = [], [], header
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            records.append(b"".join(parts))
            parts = []
    return records


def read_wandb(directory: Path) -> Found:
    return wandb_run(_only((directory / "wandb").glob("offline-run-*")))


def wandb_run(run: Path) -> Found:
    from wandb.proto import wandb_internal_pb2

    until = time.monotonic() + 20  # another process may still be writing
    while True:
        records = []
        for path in run.glob("*.wandb"):
            records += map(wandb_internal_pb2.Record.FromString, _leveldb(path, 7))
        if any(r.HasField("exit") for r in records) or time.monotonic() > until:
            break
        time.sleep(0.2)
    found: Found = {"config": {}, "values": {}, "texts": {}, "images": {}, "status": "running"}
    series: list[tuple[str, int, float]] = []
    for record in records:
        for update in [*record.config.update, *record.run.config.update]:
            key = update.key or "/".join(update.nested_key)
            found["config"][key] = json.loads(update.value_json)
        if record.HasField("exit"):
            found["status"] = "failed" if record.exit.exit_code else "finished"
        items: dict[str, Any] = {}
        for item in record.history.item:
            first, *rest = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if rest:
                items.setdefault(first, {})["/".join(rest)] = value
            else:
                items[first] = value
        step = record.history.step.num if record.HasField("history") else 0
        for key, value in items.items():
            if key.startswith("_"):
                continue
            if isinstance(value, (int, float)):
                series.append((key, step, value))
            elif isinstance(value, str):
                found["texts"][key] = value
            elif "_type" not in value:  # a nested dict
                series += [(f"{key}/{inner}", step, number) for inner, number in value.items()]
            elif value.get("_type") == "images/separated":
                for index, name in enumerate(value["filenames"]):
                    found["images"][f"{key}/{index}"] = _pixels(run / "files" / name)
            elif value.get("_type") == "table-file":
                table = json.loads((run / "files" / value["path"]).read_text())
                found["table"] = [table["columns"], *table["data"]]
            elif value.get("_type") == "histogram":
                found["histograms"] = [key]
    found["values"] = _series(series)
    return found


def read_trackio(directory: Path) -> Found:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("probe")
    found: Found = {"texts": {}, "images": {}}
    series = []
    media = directory / "trackio" / "media"
    for entry in SQLiteStorage.get_logs("probe", run.name):
        for key, value in entry.items():
            if key in ("step", "timestamp"):
                continue
            if isinstance(value, (int, float)):
                series.append((key, entry["step"], value))
            elif isinstance(value, str):
                found["texts"][key] = value
            elif value and "_type" not in value:  # a nested dict
                step = entry["step"]
                series += [(f"{key}/{inner}", step, number) for inner, number in value.items()]
            elif value.get("_type") == "trackio.image":
                found["images"][key] = _pixels(media / value["file_path"])
            elif value.get("_type") == "trackio.table":
                rows = value["_value"]
                found["table"] = [list(rows[0]), *(list(row.values()) for row in rows)]
            elif value.get("_type") == "trackio.markdown":
                found["texts"][key] = value["_value"]
            elif value.get("_type") == "trackio.histogram":
                found["histograms"] = [key]
    found["values"] = _series(series)
    config = SQLiteStorage.get_run_config("probe", run.name) or {}
    found["config"] = {k: v for k, v in config.items() if not k.startswith("_")}
    return found


def read_aim(directory: Path) -> Found:
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager

    where = str(directory / "logs")
    repo = Repo.from_path(where)
    (hash_,) = repo.list_all_runs()
    # A new repository has no index before `aim up` has run.
    RepoIndexManager.get_index_manager(repo).index(hash_)
    run = Repo.from_path(where).get_run(hash_)
    series = []
    for metric in run.metrics():
        rows = metric.dataframe()
        series += [
            (metric.name, int(step), float(number))
            for step, number in zip(rows["step"], rows["value"], strict=True)
        ]
    found: Found = {
        "config": dict(run["hparams"].items()),
        "values": _series(series),
        "texts": {},
        "images": {},
    }
    for name in ("word", "note"):
        texts = run.get_text_sequence(name, _context())
        if texts is not None:
            found["texts"][name] = texts.values.values_list()[0].data
    batch = run.get_image_sequence("picture", _context())
    if batch is not None:
        import numpy as np

        for index, image in enumerate(batch.values.values_list()[0]):
            found["images"][f"picture/{index}"] = np.asarray(image.to_pil_image()).tolist()
    if run.get_distribution_sequence("weights", _context()) is not None:
        found["histograms"] = ["weights"]
    return found


def _context() -> Any:
    from aim.storage.context import Context

    return Context({})


def read_comet_ml(directory: Path) -> Found:
    return comet_archive(_only((directory / "comet").glob("*.zip")))


def comet_archive(path: Path) -> Found:
    archive = zipfile.ZipFile(path)
    found: Found = {"config": {}, "texts": {}, "images": {}}
    series = []
    files: dict[str, str] = {}
    for line in archive.read("messages.json").decode().splitlines():
        message = json.loads(line)
        payload, kind = message["payload"], message["type"]
        if kind == "metric_msg":
            metric = payload["metric"]
            series.append((metric["metricName"], metric["step"], float(metric["metricValue"])))
        elif kind == "parameter_msg":
            param = payload.get("param") or payload["params"]  # a single value or a list
            found["config"][param["paramName"]] = param["paramValue"]
        elif kind == "log_other":
            found["texts"][payload["key"]] = payload["value"]
        elif kind == "file_upload":
            extra = payload.get("additional_params", {})
            name = extra.get("fileName") or extra.get("figName") or ""
            files[f"{payload['upload_type']}:{name}"] = payload["file_path"]
            if payload["upload_type"] == "text-sample":
                text = archive.read(os.path.basename(payload["file_path"])).decode()
                found["texts"][payload["metadata"]["name"]] = text
            if payload["upload_type"] == "visualization" and name.startswith("picture"):
                file = os.path.basename(payload["file_path"])
                found["images"][name] = _pixels(io.BytesIO(archive.read(file)))
            if payload["upload_type"] == "histogram3d":
                found["histograms"] = [name]
            if "table.csv" in name:
                import csv

                text = archive.read(os.path.basename(payload["file_path"])).decode()
                found["table"] = list(csv.reader(text.splitlines()))
    found["files"] = files
    found["values"] = _series(series)
    return found


def read_mlflow(directory: Path) -> Found:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("probe")
    (run,) = client.search_runs([experiment.experiment_id])
    values = {
        key: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    images: dict[str, Any] = {}
    names = [item.path for item in client.list_artifacts(run.info.run_id)]
    texts = {k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")}
    found: Found = {
        "config": run.data.params,
        "values": values,
        "texts": texts,
        "images": images,
        "status": run.info.status,
        "files": {name: name for name in names},
    }
    if "images" in names:
        for item in client.list_artifacts(run.info.run_id, "images"):
            if item.path.endswith(".png"):
                path = client.download_artifacts(run.info.run_id, item.path)
                key = Path(item.path).name.split("+")[0].replace("~", "/")
                images[key] = _pixels(path)
    if "table.json" in names:
        table = client.load_table(experiment.experiment_id, "table.json", [run.info.run_id])
        found["table"] = [list(table.columns), *table.values.tolist()]
    if "note_2.txt" in names:
        path = client.download_artifacts(run.info.run_id, "note_2.txt")
        texts["note"] = Path(path).read_text()
    return found


def read_clearml(directory: Path) -> Found:
    from clearml.utilities.config import text_to_config_dict

    folder = _only((directory / "clearml" / "offline").glob("offline-*.zip")).with_suffix("")
    task = json.loads((folder / "task.json").read_text())
    found: Found = {"texts": {}, "images": {}, "status": ",".join(task.get("tags") or [])}
    found["config"] = dict(text_to_config_dict(task["configuration"]["General"]["value"]))
    series = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            metric, variant = event.get("metric"), event.get("variant")
            key = f"{metric}/{variant}" if variant and variant != metric else metric
            if event["type"] == "training_stats_scalar":
                series.append((key.rstrip("/"), event["iter"], event["value"]))
            elif event["type"] == "training_debug_image" and metric == "picture":
                image = _only(folder.glob(f"data/**/picture/{variant}/*.png"))
                found["images"][key] = _pixels(image)
            elif event["type"] == "plot" and metric == "table":
                plot = json.loads(event["plot_str"])["data"][0]
                columns = plot["cells"]["values"]
                found["table"] = [plot["header"]["values"], *map(list, zip(*columns, strict=True))]
            elif event["type"] == "plot" and metric == "weights":
                found["histograms"] = ["weights"]
    found["values"] = _series(series)
    log = folder / "log.jsonl"
    for events in log.read_text().splitlines() if log.exists() else ():
        for line in "\n".join(event.get("msg", "") for event in json.loads(events)).splitlines():
            for name in ("word", "note"):
                if line.startswith(f"{name} ["):
                    found["texts"][name] = line.split(": ", 1)[1]
    return found


def read_dvclive(directory: Path) -> Found:
    import yaml
    from dvclive import Live
    from dvclive.utils import parse_metrics

    live = Live(str(directory / "dvclive"), resume=True, save_dvc_exp=False, dvcyaml=None)
    history, latest = parse_metrics(live)
    values, texts = {}, {}
    for path, rows in history.items():
        key = os.path.relpath(path, Path(live.plots_dir) / "metrics").removesuffix(".tsv")
        try:
            values[key] = [[int(row["step"]), float(row[os.path.basename(key)])] for row in rows]
        except ValueError:
            texts[key] = rows[0][os.path.basename(key)]
    folder = directory / "dvclive"
    images = {
        path.parent.relative_to(folder / "plots/images").as_posix(): _pixels(path)
        for path in (folder / "plots" / "images").rglob("*.png")
    }
    table = folder / "plots" / "custom" / "table.json"
    rows = json.loads(table.read_text()) if table.exists() else []
    return {
        "config": yaml.safe_load((folder / "params.yaml").read_text()),
        "values": values,
        "texts": texts,
        "images": images,
        "table": [list(rows[0]), *(list(row.values()) for row in rows)] if rows else None,
        "latest": latest,
    }


def read_swanlab(directory: Path) -> Found:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    run = _only((directory / "swanlog").glob("run-*"))
    found: Found = {"texts": {}, "images": {}, "status": "running"}
    series = []
    for raw in _leveldb(_only(run.glob("*.swanlab")), 7):
        record = Record.FromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "scalar":
            series.append((record.scalar.key, record.scalar.step, record.scalar.value.number))
        elif kind == "media":
            for index, item in enumerate(record.media.value.items):
                path = _only((run / "media").rglob(item.filename))
                key = record.media.key
                if path.suffix == ".png":
                    found["images"][f"{key}/{index}"] = _pixels(path)
                elif path.suffix == ".json":
                    options = json.loads(path.read_text())
                    rows = options.get("rowData", [])
                    found["table"] = [list(rows[0]), *(list(row.values()) for row in rows)]
                else:
                    found["texts"][key] = path.read_text()
        elif kind == "finish":
            found["status"] = RunState.Name(record.finish.state)
    found["values"] = _series(series)
    config = yaml.safe_load((run / "files" / "config.yaml").read_text())
    found["config"] = {key: entry["value"] for key, entry in config.items()}
    return found


def read_jsonl(directory: Path) -> Found:
    import numpy as np

    file = _only((directory / "logs" / "probe").glob("*/run.jsonl"))
    found: Found = {"texts": {}, "images": {}, "status": "running"}
    series = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "config":
            found["config"] = entry["values"]
        elif entry["kind"] == "log":
            for key, value in entry["values"].items():
                if isinstance(value, str):
                    found["texts"][key] = value
                else:
                    series.append((key, entry["step"], value))
        elif entry["kind"] == "images":
            for index, image in enumerate(np.load(file.parent / "media" / entry["file"])):
                found["images"][f"{entry['name']}/{index}"] = image.tolist()
        elif entry["kind"] == "table":
            found["table"] = [entry["columns"], *entry["data"]]
        elif entry["kind"] == "text":
            found["texts"][entry["name"]] = entry["text"]
        elif entry["kind"] == "histogram":
            found["histograms"] = [entry["name"]]
        elif entry["kind"] == "end":
            found["status"] = entry["status"]
    found["values"] = _series(series)
    return found


READERS = {
    name.removeprefix("read_"): function
    for name, function in list(globals().items())
    if name.startswith("read_")
}

if __name__ == "__main__":
    where = Path(sys.argv[1])
    result: dict[str, Found] = {}
    for name in sys.argv[2:] or READERS:
        try:
            result[name] = READERS[name](where)
        except Exception:  # continue with the others
            result[name] = {"error": traceback.format_exc()}
    print("FOUND" + json.dumps(result, default=str))

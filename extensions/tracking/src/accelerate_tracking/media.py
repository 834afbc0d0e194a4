"""Images, tables, figures, files, texts and histograms, converted to what trackers accept.

Images are passed as name -> one image (H W C) or a batch of images (N H W C), or C H W and N C H W
with `channels_first`. Each is a NumPy array, a tensor on any device, or a list of images of the same
shape, with float values in [0, 1] or uint8. C is 1, 3 or 4.

Only this module needs NumPy.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError, LogKwargs, warn
from accelerate_tracking.normalise import Reporter, is_scalar, is_tensor, scalar, text_of

Arguments = dict[str, Any]
#: Arguments of a tracker's `log_<verb>`, or a function that reads them from a device later.
Payload = Arguments | Callable[[], Arguments]


class MediaVerbs:
    """The methods for media. `contract.parts.Tracking` documents them.

    Each raises a ConfigurationError that names the value if it cannot be logged.
    """

    _reporter: Reporter

    def _queue_media(
        self, verb: str, make: Callable[[], Payload], step: int | None, log_kwargs: LogKwargs
    ) -> None:
        """Queue the result of `make` for trackers that support the verb. Called only if any does."""
        raise NotImplementedError

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        channels_first: bool = False,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log images by name."""
        self._queue_media("images", lambda: _images(values, channels_first), step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: LogKwargs = None,
    ) -> None:
        """Log a table."""

        def make() -> Arguments:
            if dataframe is None:
                return _table(table_name, columns, data, self._reporter)
            rows = dataframe.values.tolist()
            return _table(table_name, dataframe.columns, rows, self._reporter)

        self._queue_media("table", make, step, log_kwargs)

    def log_figure(
        self, name: str, figure: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a matplotlib figure."""

        def make() -> Arguments:
            if isinstance(figure, type) or not callable(getattr(figure, "savefig", None)):
                raise ConfigurationError(
                    f"log_figure({name!r}) needs a matplotlib figure, not {type(figure).__name__}."
                )
            return {"name": text_of(str(name)), "figure": figure}

        self._queue_media("figure", make, step, log_kwargs)

    def log_artifact(
        self, path: str | os.PathLike[str], name: str | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Keep a file or directory with the run."""

        def make() -> Arguments:
            found = Path(os.fspath(path)).expanduser()
            if not found.exists():
                raise ConfigurationError(f"log_artifact: there is no file or directory {found}.")
            return {"path": str(found.absolute()), "name": text_of(str(name or found.name))}

        self._queue_media("artifact", make, None, log_kwargs)

    def log_text(
        self, name: str, text: str, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log a text."""

        def make() -> Arguments:
            return {"name": text_of(str(name)), "text": text_of(str(text))}

        self._queue_media("text", make, step, log_kwargs)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Log the distribution of an array or tensor, of any shape."""
        self._queue_media("histogram", lambda: _histogram(name, values), step, log_kwargs)


class ArtifactCopies:
    """Copies of the files passed to `log_artifact`, kept until the run ends.

    Args:
        directory: where the folder of the copies is created. None uses the system's temporary
            directory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory).absolute()
        self._folder: Path | None = None
        self._count = 0

    def copy(self, path: str) -> str:
        """Copy a file or directory and return the new path, or the original one if that fails."""
        source = Path(path)
        try:
            if self._folder is None:
                if self._directory is not None:
                    self._directory.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=".artifacts-", dir=self._directory))
            self._count += 1
            target = self._folder / str(self._count) / source.name
            target.parent.mkdir()
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy2(source, target)
        except (OSError, shutil.Error) as error:
            warn(
                f"log_artifact: {path} could not be copied ({error}). The trackers will read the "
                "original, so keep it unchanged until the end of the run.",
            )
            return path
        return str(target)

    def clear(self) -> None:
        """Delete the copies."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def pictures(values: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield the single images in the `values` that a tracker's `log_images` receives.

    Yields:
        The name, the index within the batch, and a uint8 array of shape H W, or H W C with C 3
        or 4. If the batch has several images, the name ends with `/` and the index.
    """
    for name, batch in values.items():
        for index, image in enumerate(batch):
            single = image[..., 0] if image.shape[-1] == 1 else image
            yield (name if len(batch) == 1 else f"{name}/{index}"), index, single


def _images(values: Any, channels_first: bool) -> Payload:
    if not isinstance(values, Mapping) or not values:
        raise ConfigurationError(
            f"log_images needs a non-empty dict of names and images, not {type(values).__name__}."
        )
    batches = {text_of(str(name)): _copied(str(name), value) for name, value in values.items()}
    for name, batch in batches.items():
        _check_image(name, tuple(batch.shape), str(batch.dtype), channels_first)

    def read() -> Arguments:
        return {"values": {k: _as_uint8(k, v, channels_first) for k, v in batches.items()}}

    return read if any(map(_on_device, batches.values())) else read()


def _check_image(name: str, shape: tuple[int, ...], dtype: str, channels_first: bool) -> None:
    wanted = "C H W or N C H W" if channels_first else "H W C or N H W C"
    if 0 in shape:
        raise ConfigurationError(f"log_images: {name!r} is empty: its shape is {shape}.")
    several = len(shape) in (3, 4)
    if not several or shape[-3 if channels_first else -1] not in (1, 3, 4):
        hint = ""
        if several and not channels_first and shape[-3] in (1, 3, 4):
            hint = " It looks like C H W: pass channels_first=True."
        elif len(shape) == 2:
            hint = " A grayscale image has the shape H W 1."
        raise ConfigurationError(
            f"log_images: {name!r} has the shape {shape}, but must be {wanted} with C 1, 3 or "
            f"4.{hint}"
        )
    kind = dtype.removeprefix("torch.")
    if kind != "uint8" and "float" not in kind:
        raise ConfigurationError(
            f"log_images: {name!r} has dtype {kind}, but must be uint8, or float in [0, 1]."
        )


def _as_uint8(name: str, value: Any, channels_first: bool) -> Any:
    numpy = _numpy_module()
    array = _as_array(value)
    if array.ndim == 3:
        array = array[None]
    if channels_first:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype == numpy.uint8:
        return numpy.ascontiguousarray(array)
    low, high = float(array.min(initial=0)), float(array.max(initial=0))
    if not (low >= -1e-3 and high <= 1 + 1e-3):
        raise ConfigurationError(
            f"log_images: {name!r} has values from {low:.4g} to {high:.4g}, but float images must "
            "be in [0, 1]. Scale it, or pass uint8."
        )
    return (array.clip(0, 1) * 255 + 0.5).astype(numpy.uint8)


def _histogram(name: str, values: Any) -> Payload:
    copied = _copied(name, values)

    def read() -> Arguments:
        flat = _as_array(copied).reshape(-1)
        if flat.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"log_histogram({name!r}) needs numbers, but the values have dtype {flat.dtype}."
            )
        return {"name": str(name), "values": flat}

    return read if _on_device(copied) else read()


def _table(table_name: str, columns: Any, data: Any, reporter: Reporter) -> Arguments:
    if columns is None or data is None:
        raise ConfigurationError(
            f"log_table({table_name!r}) needs columns= and data= (a list of rows), or dataframe=."
        )
    names = _unique(text_of(str(column)) for column in columns)
    rows = []
    for number, row in enumerate(map(list, data)):
        if len(row) != len(names):
            raise ConfigurationError(
                f"log_table({table_name!r}): row {number} has {len(row)} values for "
                f"{len(names)} columns ({', '.join(names)})."
            )
        pairs = zip(names, row, strict=True)
        rows.append([_cell(f"{table_name}[{name}]", cell, reporter) for name, cell in pairs])
    return {"table_name": text_of(str(table_name)), "columns": names, "data": rows}


def _cell(key: str, value: Any, reporter: Reporter) -> Any:
    plain = None if value is None else scalar(value)
    if is_scalar(plain):
        return plain
    reporter.report(key, f"is a {type(value).__name__}, but a cell must be a single value")
    return None


def _unique(names: Iterable[str]) -> list[str]:
    """Number columns with the same name, because most libraries would keep only the last."""
    found: list[str] = []
    for name in names:
        number, one = 1, name
        while one in found:
            number += 1
            one = f"{name} ({number})"
        found.append(one)
    return found


def _copied(name: str, value: Any) -> Any:
    """Copy a value, so that later in-place changes don't change what is logged."""
    if is_tensor(value):
        # On a device, the copy is queued after pending work. The writer copies it to the host.
        return value.detach().clone()
    numpy = _numpy_module()
    try:
        if isinstance(value, (list, tuple)):
            if any(map(is_tensor, value)):
                return sys.modules["torch"].stack([item.detach() for item in value])
            return numpy.stack([numpy.asarray(item) for item in value])
        return numpy.array(value)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"{name!r}: all images or numbers in a list must have the same shape: {error}"
        ) from None


def _as_array(value: Any) -> Any:
    if not is_tensor(value):
        return value
    value = value.cpu()
    # NumPy has no bfloat16 or float8.
    if value.is_floating_point() and value.element_size() < 4:
        value = value.float()
    return value.numpy()


def _on_device(value: Any) -> bool:
    return is_tensor(value) and value.device.type != "cpu"


def _numpy_module() -> Any:
    try:
        import numpy
    except ImportError:
        raise ConfigurationError("Images and histograms need NumPy: pip install numpy") from None
    return numpy

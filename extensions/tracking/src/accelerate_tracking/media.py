"""What the verbs take, made into what trackers take. NumPy is needed only here.

Images: name -> one image, H W C, or a batch of them, N H W C; float in [0, 1] or uint8; with
`channels_first` C H W or N C H W. A NumPy array, a tensor of any device, or a list of images of
one shape. C is 1, 3 or 4.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate_core.errors import ConfigurationError
from accelerate_tracking.normalise import Reporter, is_scalar, scalar, text_of

__all__ = ["artifact", "figure", "histogram", "images", "payload", "pictures", "table", "text"]

Payload = tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]


def payload(verb: str, arguments: Mapping[str, Any], reporter: Reporter) -> Payload:
    """Return the arguments of a tracker's `log_<verb>`, and what reads the rest off a device.

    Args:
        verb: one of `VERBS`.
        arguments: those of the function of that name here.

    Raises:
        ConfigurationError: they are none that the verb takes.
    """
    if verb == "images":
        return images(**arguments)
    if verb == "histogram":
        return histogram(**arguments)
    if verb == "table":
        return table(**arguments, reporter=reporter), None
    make: Any = {"figure": figure, "artifact": artifact, "text": text}[verb]
    return make(**arguments), None


def images(values: Any, channels_first: bool = False) -> Payload:
    """Return the arguments of `log_images`, and what reads them off a device later.

    Raises:
        ConfigurationError: a shape, type or range that is not the convention's, with its name.
    """
    if not isinstance(values, Mapping) or not values:
        raise ConfigurationError(
            f"log_images takes a dict of names and images, not {type(values).__name__}."
        )
    batches = {text_of(str(name)): _copied(str(name), value) for name, value in values.items()}
    for name, batch in batches.items():
        _check_shape(name, tuple(batch.shape), channels_first)
        _check_type(name, str(batch.dtype))

    def read() -> dict[str, Any]:
        return {"values": {k: _as_uint8(k, v, channels_first) for k, v in batches.items()}}

    if any(_on_device(batch) for batch in batches.values()):
        return {}, read
    return read(), None


def pictures(values: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield the single images of what `log_images` of a tracker gets.

    As name, index within the batch and uint8 array: H W, or H W C with C 3 or 4. Where the
    batch has several the name ends in `/` and the index.
    """
    for name, batch in values.items():
        for index, image in enumerate(batch):
            single = image[..., 0] if image.shape[-1] == 1 else image
            yield (name if len(batch) == 1 else f"{name}/{index}"), index, single


def histogram(name: str, values: Any) -> Payload:
    """Return the arguments of `log_histogram`; values of any shape are made one-dimensional."""
    copied = _copied(name, values)

    def read() -> dict[str, Any]:
        flat = _numpy(copied).reshape(-1)
        if flat.dtype.kind not in "biuf":
            raise ConfigurationError(f"log_histogram({name!r}): {flat.dtype} are no numbers.")
        return {"name": str(name), "values": flat}

    return ({}, read) if _on_device(copied) else (read(), None)


def table(
    table_name: str,
    columns: Any = None,
    data: Any = None,
    dataframe: Any = None,
    *,
    reporter: Reporter,
) -> dict[str, Any]:
    """Return the arguments of `log_table`: names of columns, and rows of plain values.

    Raises:
        ConfigurationError: neither rows nor a data frame, or rows of another length.
    """
    if dataframe is not None:
        columns, data = list(dataframe.columns), dataframe.values.tolist()
    if columns is None or data is None:
        raise ConfigurationError(
            f"log_table({table_name!r}) takes columns= and data= (a list of rows), or dataframe=."
        )
    names = _unique(text_of(str(column)) for column in columns)
    rows = []
    for number, row in enumerate(data):
        row = list(row)
        if len(row) != len(names):
            raise ConfigurationError(
                f"log_table({table_name!r}): row {number} has {len(row)} values for "
                f"{len(names)} columns ({', '.join(names)})."
            )
        rows.append(
            [
                _cell(f"{table_name}[{name}]", cell, reporter)
                for name, cell in zip(names, row, strict=True)
            ]
        )
    return {"table_name": text_of(str(table_name)), "columns": names, "data": rows}


def _cell(key: str, value: Any, reporter: Reporter) -> Any:
    plain = None if value is None else scalar(value)
    if is_scalar(plain):
        return plain
    reporter.report(key, f"is no single value but a {type(value).__name__}")
    return None


def _unique(names: Iterable[str]) -> list[str]:
    """Number columns of one name: most libraries keep only the last of them."""
    found: list[str] = []
    for name in names:
        number, one = 1, name
        while one in found:
            number += 1
            one = f"{name} ({number})"
        found.append(one)
    return found


def text(name: str, text: Any) -> dict[str, Any]:
    """Return the arguments of `log_text`."""
    return {"name": text_of(str(name)), "text": text_of(str(text))}


def figure(name: str, figure: Any) -> dict[str, Any]:
    """Return the arguments of `log_figure`.

    Raises:
        ConfigurationError: it is no figure.
    """
    if isinstance(figure, type) or not callable(getattr(figure, "savefig", None)):
        raise ConfigurationError(
            f"log_figure({name!r}) takes a matplotlib figure, not {type(figure).__name__}."
        )
    return {"name": text_of(str(name)), "figure": figure}


def artifact(path: Any, name: str | None = None) -> dict[str, Any]:
    """Return the arguments of `log_artifact`.

    Raises:
        ConfigurationError: there is no such file or directory.
    """
    found = Path(os.fspath(path)).expanduser()
    if not found.exists():
        raise ConfigurationError(f"log_artifact: there is no file or directory {found}.")
    return {"path": str(found.absolute()), "name": text_of(str(name or found.name))}


def _copied(name: str, value: Any) -> Any:
    """Copy, so that later in-place work of the script does not change what is logged."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # On a device the clone is queued behind the work; the writer copies it to the host.
        return value.detach().clone()
    numpy = _numpy_module()
    try:
        if isinstance(value, (list, tuple)):
            if torch is not None and any(isinstance(item, torch.Tensor) for item in value):
                return torch.stack([item.detach() for item in value])
            return numpy.stack([numpy.asarray(item) for item in value])
        return numpy.array(value)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"{name!r}: a list of images or numbers must be of one shape: {error}"
        ) from None


def _check_shape(name: str, shape: Sequence[int], channels_first: bool) -> None:
    wanted = "C H W or N C H W" if channels_first else "H W C or N H W C"
    if 0 in shape:
        raise ConfigurationError(f"log_images: {name!r} is empty, of shape {tuple(shape)}.")
    if len(shape) in (3, 4) and shape[-3 if channels_first else -1] in (1, 3, 4):
        return
    hint = ""
    if len(shape) in (3, 4) and not channels_first and shape[-3] in (1, 3, 4):
        hint = " It looks like C H W: pass channels_first=True."
    elif len(shape) == 2:
        hint = " A grey image is H W 1."
    raise ConfigurationError(
        f"log_images: {name!r} has the shape {tuple(shape)}; it takes {wanted} with C 1, 3 or 4.{hint}"
    )


def _check_type(name: str, kind: str) -> None:
    kind = kind.removeprefix("torch.")
    if kind != "uint8" and "float" not in kind:
        raise ConfigurationError(
            f"log_images: {name!r} is of type {kind}; it takes uint8, or float in [0, 1]."
        )


def _as_uint8(name: str, value: Any, channels_first: bool) -> Any:
    numpy = _numpy_module()
    array = _numpy(value)
    if array.ndim == 3:
        array = array[None]
    if channels_first:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype == numpy.uint8:
        return numpy.ascontiguousarray(array)
    low, high = float(array.min(initial=0)), float(array.max(initial=0))
    if not (low >= -1e-3 and high <= 1 + 1e-3):
        raise ConfigurationError(
            f"log_images: {name!r} has values from {low:.4g} to {high:.4g}; a float image is "
            f"within [0, 1]. Scale it, or pass uint8."
        )
    return (array.clip(0, 1) * 255 + 0.5).astype(numpy.uint8)


def _numpy(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.cpu()
        # NumPy has no bfloat16 or float8.
        kept = value.dtype in (torch.float32, torch.float64) or not value.is_floating_point()
        return (value if kept else value.float()).numpy()
    return value


def _on_device(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _numpy_module() -> Any:
    try:
        import numpy
    except ImportError:
        raise ConfigurationError("Images and histograms need NumPy: pip install numpy") from None
    return numpy

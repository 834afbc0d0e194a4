"""One call of `log` or of a verb, on its way from the step to the trackers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DeviceRead:
    """One-element tensors of devices, on their way to the host without anybody waiting.

    The copies are queued behind the work that makes the values; `values` waits for them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        import torch  # it is there already: somebody made the tensors

        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for key, tensor in tensors.items():
            groups.setdefault((tensor.device, tensor.dtype), []).append(key)
        self._parts: list[tuple[list[str], torch.Tensor, torch.Event | None]] = []
        current = torch.accelerator.current_accelerator()
        for (device, _), keys in groups.items():
            # One copy per device and type, and of values that later in-place work cannot change.
            stacked = torch.stack([tensors[key].detach().reshape(()) for key in keys])
            if current is None or device.type != current.type:
                self._parts.append((keys, stacked, None))
                continue
            host = stacked.to("cpu", non_blocking=True)
            event = torch.accelerator.current_stream(device).record_event()
            self._parts.append((keys, host, event))

    def values(self) -> dict[str, Any]:
        """Wait for the copies and return the numbers."""
        found: dict[str, Any] = {}
        for keys, host, event in self._parts:
            if event is not None:
                event.synchronize()
            found.update(zip(keys, host.tolist(), strict=True))
        return found


class LogEntry:
    """What was logged; what it has on a device is read once, whichever writer comes first.

    Args:
        verb: `log`, or what stands behind `log_`.
        arguments: of the tracker's method; of `log` the values.
        keywords: further arguments, by tracker.
        others: values of `log` that only some trackers take.
        read: waits for a device and returns the arguments that were lacking.
    """

    __slots__ = (
        "_lock", "_read", "arguments", "keywords", "others", "refused", "step", "verb",
    )  # fmt: skip

    def __init__(
        self,
        verb: str,
        arguments: dict[str, Any],
        step: int | None,
        keywords: Mapping[str, Mapping[str, Any]] | None = None,
        others: dict[str, object] | None = None,
        read: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.verb, self.arguments, self.step = verb, arguments, step
        self.keywords, self.others, self._read = keywords, others, read
        #: Whether what came from the device turned out to be nothing that can be logged.
        self.refused = False
        self._lock = threading.Lock() if read is not None else None

    @property
    def method(self) -> str:
        """The method of a tracker that takes it."""
        return "log" if self.verb == "log" else f"log_{self.verb}"

    @property
    def keys(self) -> str:
        """What a warning calls it."""
        found = self.arguments
        if self.verb in ("log", "images"):
            named = found if self.verb == "log" else found.get("values", ())
            keys = [repr(key) for key in (*named, *(self.others or {}))]
            return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        return repr(found.get("name", found.get("table_name", "")))

    @property
    def is_plain_log(self) -> bool:
        """Whether `log_many` can take it together with its neighbours."""
        return self.verb == "log" and not self.keywords and not self.others

    def resolve(self) -> None:
        """Wait for what comes from a device; raise, once, if it cannot be logged."""
        if self._lock is None:
            return
        with self._lock:
            if self._read is not None:
                read, self._read = self._read, None
                try:
                    self.arguments.update(read())
                except Exception:
                    self.refused = True
                    raise

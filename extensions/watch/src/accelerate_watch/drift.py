"""Notice ranks that drift apart: facts on the host that must be equal, compared after some steps.

Each rank captures its facts at the end of the same optimizer steps. The watching thread of the reference
rank writes its last facts to one key of the store, and the threads of the other ranks read that key and
compare it with their own facts. There is no collective, and nothing is read from the device.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate_core.plugin import AcceleratorView
from accelerate_watch.report import name_ranks
from accelerate_watch.settings import DriftError

if TYPE_CHECKING:
    import torch

#: The reference rank publishes so many of its last records.
_KEPT = 16
#: A record has at most this many entries per fact; more are only part of its digest.
_ENTRIES = 64
#: A message shows so many entries.
_SHOWN = 3
#: Seconds that a rank waits at the end of the run for facts and differences of other ranks.
_AT_END = 1.0
#: Seconds in which other ranks add their values to a warning.
_TO_JOIN = 0.15
#: Seconds in which every rank reads that the run must end.
_TO_READ = 4.0
#: Dimensions of the device mesh along which all facts are equal.
_EQUAL_ALONG = ("dp_replicate", "dp_shard", "cp", "sp", "tp")

#: Fact -> its likely cause, and what to do.
_CAUSES = {
    "hyperparameters": "a scheduler that is not prepared got each rank's own metric, or the script sets "
    "them on some ranks only. Prepare the scheduler, or set the same values on all ranks.",
    "trained parameters": "requires_grad was set on some ranks only. Set it on all ranks, in the same step.",
    "order of the data": "the order is drawn from generators that are not seeded alike. Call set_seed on all "
    "ranks before the data set and the sampler are created.",
    "steps": "optimizer.step() or backward() was called on some ranks only, for example because a condition "
    "depends on the rank's own data.",
}

#: Numbers the Accelerators of this process, in the same order on all ranks.
_serials = itertools.count()


@dataclass(frozen=True)
class Record:
    """The facts of one rank at the end of one step.

    Attributes:
        optimizer: the number of the optimizer, in the order in which they were prepared.
        name: the name of its class.
        step: the number of the step.
        backwards: the number of backward passes so far.
        position: the number of collectives so far in the groups of the backend; None if unknown.
        collectives: their number in all groups.
        facts: fact -> (digest of all entries, the first entries by name).
        last: whether it was captured at the end of the run, where the main process may do other things.
    """

    optimizer: int
    name: str
    step: int
    backwards: int
    position: int | None
    collectives: int
    facts: dict[str, tuple[str, dict[str, str]]]
    last: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        """What the records of two ranks that are compared have in common."""
        return self.optimizer, self.step, self.last


def next_step(step: int) -> int:
    """Return the step after which facts are captured next: 1, 2, 10, 20, ... 200, then 5% more each time."""
    if step < 2:
        return step + 1
    return 10 if step < 10 else step + max(10, step // 20)


# --- capture ----------------------------------------------------------------------------------


def hyperparameters(groups: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the scalars of parameter groups by name, learning rates first."""
    entries = {}
    for index, group in enumerate(groups):
        for name, value in group.items():
            text = None if name == "params" else _scalar(value)
            if text is not None:
                entries[f"{name} of group {index}"] = text
    return dict(sorted(entries.items(), key=lambda entry: not entry[0].startswith("lr ")))


def _scalar(value: Any) -> str | None:
    """Return a scalar as text; None for other values, and for tensors that are not in host memory."""
    import torch

    if type(value) is torch.Tensor:
        if value.device.type != "cpu" or value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, float):
        return f"{value:.7g}"
    if value is None or isinstance(value, bool | int):
        return str(value)
    if isinstance(value, str):
        return value[:40]
    if isinstance(value, tuple) and len(value) <= 4:
        parts = [_scalar(one) for one in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return None


def trained_parameters(models: Iterable[torch.nn.Module]) -> dict[str, str]:
    """Return which parameters require gradients: the names of the trained or the frozen ones, if fewer."""
    trained: dict[str, str] = {}
    frozen: dict[str, str] = {}
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            into = trained if parameter.requires_grad else frozen
            into[f"{name} of model {index}"] = "trained" if parameter.requires_grad else "frozen"
    return {
        "number of trained parameters": str(len(trained)),
        **(trained if len(trained) < len(frozen) else frozen),
    }


def orders(loaders: Iterable[Any]) -> dict[str, str]:
    """Return the digests of the orders in which loaders read their current epochs."""
    digests = [getattr(loader, "order_digest", None) for loader in loaders]
    return {
        f"digest of loader {index}": f"{digest:x}"
        for index, digest in enumerate(digests)
        if digest is not None
    }


def _packed(entries: dict[str, str]) -> tuple[str, dict[str, str]]:
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=8).hexdigest()
    return digest, dict(itertools.islice(entries.items(), _ENTRIES))


def _positions(accelerator: AcceleratorView) -> tuple[int | None, int]:
    """Return the number of collectives so far: in the backend's groups, and in all groups."""
    import torch.distributed as dist

    scopes: tuple[Any, ...] = ("world", "data", "loss")
    own = {accelerator.backend.scope_group(scope) or dist.group.WORLD for scope in scopes}
    numbers: dict[Any, int | None] = {}
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        try:
            numbers[group] = int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # this kind of group, or this torch, does not count
            numbers[group] = None
    of_backend = [numbers.get(group) for group in own]
    known = [number for number in of_backend if number is not None]
    everywhere = sum(number or 0 for number in numbers.values())
    return (sum(known) if len(known) == len(of_backend) else None), everywhere


# --- comparison -------------------------------------------------------------------------------


def differences(reference: Record, record: Record) -> dict[str, dict[str, tuple[str, str]]]:
    """Return by fact what differs between two ranks: entry -> (the reference's value, this rank's).

    Ranks that are at different places of the run are not compared.
    """
    if record.last and reference.backwards != record.backwards:
        return {}
    if reference.backwards != record.backwards and reference.collectives != record.collectives:
        return {"steps": {"backward passes": (str(reference.backwards), str(record.backwards))}}
    if reference.position != record.position:
        return {}
    found = {}
    for fact, (digest, entries) in record.facts.items():
        other_digest, others = reference.facts.get(fact, (digest, entries))
        if digest != other_digest:
            found[fact] = _different_entries(fact, others, entries)
    return found


def _different_entries(
    fact: str, reference: dict[str, str], entries: dict[str, str]
) -> dict[str, tuple[str, str]]:
    names = [*reference, *(name for name in entries if name not in reference)]
    # Only the trained or only the frozen parameters are listed.
    listed = {*reference.values(), *entries.values()}
    opposite = {"trained": "frozen", "frozen": "trained"}
    missing = next((opposite[one] for one in ("trained", "frozen") if one in listed), "not there")
    pairs = {
        name: (reference.get(name, missing), entries.get(name, missing))
        for name in names
        if reference.get(name) != entries.get(name)
    }
    # The number of parameters is only of interest if no name shows the difference.
    named = {name: pair for name, pair in pairs.items() if not name.startswith("number of ")}
    return named or pairs or {f"one of more than {_ENTRIES} entries": ("another value", "its own")}


def describe(fact: str, found: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """Return the warning about one fact.

    Args:
        fact: what differs.
        found: what the ranks that differ from the reference published.
        ranks: the compared ranks; the first one is the reference.
    """
    step = min(one["step"] for one in found)
    first = [one for one in found if one["step"] == step]
    optimizer = f"optimizer {first[0]['optimizer']} ({first[0]['name']})"
    entries = dict.fromkeys(name for one in first for name in one["entries"])
    parts = []
    for name in itertools.islice(entries, _SHOWN):
        values: dict[str, list[int]] = {}
        pairs = {one["rank"]: one["entries"].get(name) for one in first}
        same = next(pair[0] for pair in pairs.values() if pair is not None)
        for rank in ranks:
            pair = pairs.get(rank)
            values.setdefault(same if pair is None else pair[1], []).append(rank)
        parts.append(
            f"{name}: {', '.join(f'{value} on {name_ranks(at)}' for value, at in values.items())}"
        )
    more = len(entries) - _SHOWN
    listed = "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
    return (
        f"The ranks have drifted apart. After step {step} of {optimizer}, the {fact} differ: {listed}. "
        f"Likely cause: {_CAUSES[fact]} (WatchConfiguration(drift='error') ends the run instead, "
        "drift='off' compares nothing.)"
    )


def compared_ranks(accelerator: AcceleratorView) -> list[int]:
    """Return the ranks that must have the same facts, the reference first; [] if that is unknown."""
    everyone = list(range(accelerator.num_processes))
    if accelerator.backend.reduces_gradients == "never":
        return []
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        ranks: torch.Tensor = mesh.mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return []
        for dim in reversed(range(ranks.ndim)):
            if (mesh.mesh_dim_names or ())[dim] not in _EQUAL_ALONG:
                ranks = ranks.select(dim, coordinate[dim])
        return sorted(ranks.flatten().tolist())
    _, count = accelerator.hooks.data_shard()
    elastic = accelerator.backend.supports.get("elastic", False)
    return everyone if elastic or count == len(everyone) else []


class Drift:
    """Captures the facts of this rank, and compares them with those of the reference rank.

    `watch` and the captures run in the main thread, and the other methods in the watching thread.

    Args:
        accelerator: the Accelerator, which is not kept alive.
        raises: whether a difference ends the run.
        ranks: the ranks that must have the same facts, the reference first.
        wake: wakes the watching thread.
    """

    def __init__(
        self,
        accelerator: AcceleratorView,
        raises: bool,
        ranks: Sequence[int],
        wake: Callable[[], None],
    ) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._raises = raises
        self._rank = accelerator.process_index
        self._ranks = ranks
        self._wake = wake
        self._key = f"drift/{next(_serials)}/{ranks[0]}"
        self._rates_may_differ = accelerator.provenance["scheduler_metric"].value == "local"
        self._optimizers: list[weakref.ref[Any]] = []
        #: Records that the watching thread has not seen; those that it could not compare or publish yet.
        self._captured: deque[Record] = deque()
        self._waiting: list[Record] = []
        self._published: deque[Record] = deque(maxlen=_KEPT)
        #: Facts that this rank has reported as different, and when it warns about them.
        self._reported: set[str] = set()
        self._warn_at: dict[str, float] = {}
        self._began = time.monotonic()
        #: Seconds until a look for facts that the reference rank has not published yet.
        self._retry = 0.02
        #: The text of the error, once a difference is known.
        self.verdict = ""
        self.raised = False
        #: Why nothing is compared any more; "" while it is.
        self.failed = ""

    # --- in the main thread -------------------------------------------------------------------

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Capture facts after some steps of optimizers that are not watched yet."""
        there = [reference() for reference in self._optimizers]
        for optimizer in optimizers:
            if not any(one is optimizer for one in there):
                number = len(self._optimizers)
                self._optimizers.append(weakref.ref(optimizer))
                optimizer.call_after_step(
                    next_step(optimizer.steps_taken), partial(self._capture, number)
                )

    def _capture(self, number: int, optimizer: Any, last: bool = False) -> None:
        accelerator = self._accelerator()
        if accelerator is None or self.failed:
            return
        try:
            record = self._record(accelerator, number, optimizer, last)
        except Exception as error:  # facts of an unusual object must not end the run
            self.failed = f"{type(error).__name__}: {error}"
            return
        if record is not None:
            self._captured.append(record)
            self._wake()
        if not last:
            after = next_step(optimizer.steps_taken)
            optimizer.call_after_step(after, partial(self._capture, number))

    def capture_last(self) -> None:
        """Capture the learning rates at the end of the run."""
        for number, reference in enumerate(self._optimizers):
            optimizer = reference()
            if optimizer is not None and optimizer.steps_taken:
                self._capture(number, optimizer, last=True)

    def _record(
        self, accelerator: AcceleratorView, number: int, optimizer: Any, last: bool
    ) -> Record | None:
        state = accelerator.gradient_state
        # Ranks with fewer batches take fewer steps. A script without models may train another one per rank.
        if state.uneven_inputs or not accelerator.models:
            return None
        facts = {}
        if not last:
            facts["trained parameters"] = _packed(trained_parameters(accelerator.models))
            facts["order of the data"] = _packed(orders(accelerator.loaders))
        if not self._rates_may_differ:
            facts["hyperparameters"] = _packed(hyperparameters(optimizer.param_groups))
        position, collectives = _positions(accelerator)
        return Record(
            optimizer=number,
            name=type(optimizer.optimizer).__name__,
            step=optimizer.steps_taken,
            backwards=state.backwards,
            position=position,
            collectives=collectives,
            facts=facts,
            last=last,
        )

    def _raise(self, optimizer: Any) -> None:
        self.raised = True
        raise DriftError(self.verdict)

    # --- in the watching thread ---------------------------------------------------------------

    def pause(self) -> float:
        """Return after how many seconds to look again; infinity if nothing is expected."""
        if self._warn_at:
            return max(0.01, min(self._warn_at.values()) - time.monotonic())
        # The reference rank usually publishes soon. If it does not, do not ask too often.
        return self._retry if self._waiting else math.inf

    def look(self, store: Any) -> None:
        """Publish or compare new records, and warn about differences that are complete.

        Raises:
            RuntimeError: the store cannot be used any more. Other errors only end the comparison.
        """
        if self.failed:
            return
        try:
            self._look(store)
        except RuntimeError:
            raise
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _look(self, store: Any) -> None:
        self._retry = min(2 * self._retry, 60.0)
        while self._captured:
            self._waiting.append(self._captured.popleft())
            self._retry = 0.02
        if self._waiting:
            if self._rank == self._ranks[0]:
                self._publish(store)
            else:
                self._compare(store)
        for fact, due in list(self._warn_at.items()):
            if time.monotonic() >= due:
                del self._warn_at[fact]
                self._tell(store, fact)
        if self._raises and not self.verdict and store.check([f"{self._key}/verdict"]):
            self._arm(json.loads(store.get(f"{self._key}/verdict")))

    def finish(self, store: Any) -> None:
        """Compare what a short run has captured last. Wait a little for the other ranks."""
        until = time.monotonic() + _AT_END
        self._warn_at = dict.fromkeys(self._warn_at, 0.0)
        self.look(store)
        while (self._waiting or self._warn_at) and time.monotonic() < until:
            time.sleep(0.02)
            self.look(store)
        for fact in list(self._warn_at):
            self._tell(store, fact)
        if self._raises and self._optimizers:
            self._wait_for_verdict(store)

    def _wait_for_verdict(self, store: Any) -> None:
        """Wait until every rank has compared its facts, so that all of them raise the error."""
        until = time.monotonic() + 2 * _AT_END
        arrived = store.add(f"{self._key}/finished", 1)
        while arrived < len(self._ranks) and time.monotonic() < until:
            time.sleep(0.05)
            arrived = store.add(f"{self._key}/finished", 0)
        self.look(store)

    def _publish(self, store: Any) -> None:
        self._published.extend(self._waiting)
        self._waiting.clear()
        store.set(self._key, json.dumps([asdict(record) for record in self._published]))

    def _compare(self, store: Any) -> None:
        if not store.check([self._key]):
            return
        published = [Record(**record) for record in json.loads(store.get(self._key))]
        references = {record.key: record for record in published}
        newest = {record.optimizer: record.step for record in published}
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            reference = references.get(record.key)
            if reference is not None:
                for fact, entries in differences(reference, record).items():
                    self._report(store, fact, record, entries)
            elif record.last or record.step > newest.get(record.optimizer, -1):
                self._waiting.append(record)  # the reference rank has not published this step yet
        del self._waiting[:-_KEPT]

    def _report(
        self, store: Any, fact: str, record: Record, entries: dict[str, tuple[str, str]]
    ) -> None:
        """Publish a difference. The first rank that did warns a little later, in the name of all."""
        if fact in self._reported:
            return
        self._reported.add(fact)
        line = {
            "rank": self._rank,
            "optimizer": record.optimizer,
            "name": record.name,
            "step": record.step,
            "entries": dict(itertools.islice(entries.items(), _ENTRIES)),
        }
        store.append(f"{self._key}/{fact}", json.dumps(line) + "\n")
        self._warn_at[fact] = time.monotonic() + _TO_JOIN

    def _tell(self, store: Any, fact: str) -> None:
        if store.add(f"{self._key}/{fact}/claimed", 1) > 1:
            return
        lines = store.get(f"{self._key}/{fact}").decode().splitlines()
        found = [json.loads(line) for line in lines]
        text = describe(fact, found, self._ranks)
        if self._raises:
            verdict = {"text": text, "optimizer": found[0]["optimizer"], "step": self._ahead()}
            store.set(f"{self._key}/verdict", json.dumps(verdict))
            return
        accelerator = self._accelerator()
        if accelerator is not None:
            accelerator.warn_once(text, every_rank=True)
        else:
            sys.stderr.write(f"\naccelerate-watch: {text}\n")

    def _steps(self) -> int:
        there = [reference() for reference in self._optimizers]
        return max((one.steps_taken for one in there if one is not None), default=0)

    def _ahead(self) -> int:
        """Return a step that the other ranks have probably not reached when they read the verdict."""
        steps = self._steps()
        rate = steps / (time.monotonic() - self._began)
        return steps + 2 + math.ceil(_TO_READ * rate)

    def _arm(self, verdict: dict[str, Any]) -> None:
        self.verdict = verdict["text"]
        optimizer = self._optimizers[verdict["optimizer"]]()
        if optimizer is not None:
            optimizer.call_after_step(verdict["step"], self._raise)

"""One call of `prepare`: its objects, and which parameter of which model an optimizer holds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_core.compilation import canonical_key
from accelerate_core.errors import PrepareError
from accelerate_core.prepare.classify import Kind

__all__ = ["Entry", "PreparePlan", "named_parameters"]


@dataclass(eq=False)
class Entry:
    """One object: as it was passed, and as it has become so far."""

    kind: Kind
    original: Any
    value: Any
    place: bool = True
    evaluation_mode: bool = False
    done: bool = False
    #: Names of the trainable parameters before any stage (models only).
    trainable: frozenset[str] = frozenset()


@dataclass(eq=False)
class PreparePlan:
    """All objects of one `prepare` call, in order; a backend replaces values in place."""

    entries: list[Entry]
    unwrap: Callable[[Any], torch.nn.Module]
    #: Parameters that an earlier call replaced: old -> (model as prepared, name).
    replaced: WeakIdKeyDictionary
    # By id, and without keeping alive: a large model is not to be held twice while it is prepared.
    _before: dict[int, tuple[Entry, str, weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    _slots: list[tuple[Any, dict[str, Any], int, torch.Tensor]] = field(default_factory=list)

    def of_kind(self, kind: Kind) -> Iterator[Entry]:
        """Iterate over the entries of one kind that are not prepared yet."""
        return (entry for entry in self.entries if entry.kind == kind and not entry.done)

    @property
    def models(self) -> list[Any]:
        """The models, as they are now."""
        return [entry.value for entry in self.of_kind("model")]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, as they are now."""
        return [entry.value for entry in self.of_kind("optimizer")]

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers, as they are now."""
        return [entry.value for entry in self.of_kind("scheduler")]

    @property
    def loaders(self) -> list[Any]:
        """The data loaders, as they are now."""
        return [entry.value for entry in self.of_kind("loader")]

    def each(self, kind: Kind, change: Callable[[Any, Entry], Any]) -> None:
        """Replace every object of a kind by what `change(object, entry)` returns."""
        for entry in self.of_kind(kind):
            entry.value = change(entry.value, entry)
            if entry.value is None:
                raise PrepareError(
                    f"Preparing a {type(entry.original).__name__} gave None: a hook that prepares a "
                    f"{kind} has to return it."
                )

    def record(self, earlier: Iterable[Any] = ()) -> None:
        """Note the name of every parameter, before any stage.

        Args:
            earlier: optimizers prepared in earlier calls, which may hold parameters of a model of
                this one.
        """
        for entry in self.of_kind("model"):
            named = named_parameters(entry.value)
            entry.trainable = frozenset(n for n, p in named.items() if p.requires_grad)
            for name, parameter in named.items():
                self._before.setdefault(id(parameter), (entry, name, weakref.ref(parameter)))
        given = [entry.value for entry in self.of_kind("optimizer")]
        self._earlier = [one for one in earlier if not any(one is other for other in given)]
        for optimizer in [*given, *self._earlier]:
            for group in getattr(optimizer, "param_groups", ()):
                for index, parameter in enumerate(group["params"]):
                    self._slots.append((optimizer, group, index, parameter))

    def rebind(self) -> None:
        """Point the optimizers at the parameters the models have now, by name.

        Groups, hyperparameters and the state of parameters that kept their shape stay.

        Raises:
            PrepareError: a parameter an optimizer holds has no successor of its name.
        """
        now = {
            id(entry): named_parameters(self.unwrap(entry.value)) for entry in self.of_kind("model")
        }
        for entry, name, reference in self._before.values():
            new, old = now[id(entry)].get(name), reference()
            if old is not None and new is not None and new is not old:
                self.replaced[old] = (entry.value, name)
        for optimizer, group, index, old in self._slots:
            successor = self._successor(old, now)
            if successor is None or successor is group["params"][index]:
                continue
            group["params"][index] = successor
            state = getattr(optimizer, "state", {})
            if old in state and successor.shape == old.shape:
                state[successor] = state.pop(old)

    def _successor(
        self, old: torch.Tensor, now: dict[int, dict[str, torch.nn.Parameter]]
    ) -> torch.Tensor | None:
        if id(old) in self._before:
            entry, name, _ = self._before[id(old)]
            new = now[id(entry)].get(name)
        elif old in self.replaced:
            model, name = self.replaced[old]
            new = named_parameters(self.unwrap(model)).get(name)
        else:
            return None  # of no model that was ever prepared: the user's own business
        if new is None:
            raise PrepareError(
                f"Parameter {name!r} is held by an optimizer, but the prepared model has no parameter of "
                "that name any more. A stage that replaces parameters must keep their names."
            )
        return new

    def verify(self, prepared: Iterable[Any]) -> None:
        """Assert that what is trainable will be trained.

        Args:
            prepared: all models prepared so far by this Accelerator, unwrapped.

        Raises:
            PrepareError: a stage or the backend made a trainable parameter no optimizer holds, or
                an optimizer still holds one that its model no longer has.
        """
        held = {
            id(p)
            for o in [*self.optimizers, *self._earlier]
            for g in getattr(o, "param_groups", ())
            for p in g["params"]
        }
        if not held:
            return
        current = {id(p) for model in prepared for p in model.parameters()}
        for _, group, index, old in self._slots:
            if id(old) in self._before and id(group["params"][index]) not in current:
                raise PrepareError(
                    f"The optimizer still holds {self._before[id(old)][1]!r} as it was before prepare; "
                    "the model would not be trained."
                )
        for entry in self.of_kind("model"):
            self._verify_model(entry, held)

    def _verify_model(self, entry: Entry, held: set[int]) -> None:
        named = named_parameters(self.unwrap(entry.value))
        seen: set[int] = set()
        missing = []
        for name, parameter in named.items():
            if parameter.requires_grad and id(parameter) not in held and id(parameter) not in seen:
                missing.append(name)
            seen.add(id(parameter))
        held_before = {id(parameter) for _, _, _, parameter in self._slots}
        was_held = {
            name
            for key, (its, name, _) in self._before.items()
            if its is entry and key in held_before
        }
        if not missing or not was_held:
            return  # no optimizer held this model
        lost = [name for name in missing if name in was_held or name not in entry.trainable]
        if lost:
            raise PrepareError(
                f"After prepare {len(lost)} trainable parameter(s) of {type(entry.original).__name__} "
                f"are in no optimizer and would never change: {', '.join(lost[:3])}. "
                "A stage replaced them without keeping their names."
            )
        warnings.warn(
            f"{len(missing)} trainable parameter(s) of {type(entry.original).__name__} are in no optimizer "
            f"passed to prepare, such as {missing[0]!r}; set requires_grad_(False) on what is frozen.",
            stacklevel=4,
        )


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return all parameters by the name the user's own model gives them, tied ones by each name."""
    return {
        canonical_key(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }

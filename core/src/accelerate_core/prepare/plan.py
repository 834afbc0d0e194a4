"""One call of `prepare`: its objects, and which parameters the optimizers hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_core.builtin.compiled import Compiler, plain_keys
from accelerate_core.contract.members import ObjectKind
from accelerate_core.errors import PrepareError, warn


@dataclass(eq=False)
class Entry:
    """One object: as it was passed, and in its current form."""

    kind: ObjectKind
    original: Any
    value: Any
    on_device: bool = True
    evaluation_mode: bool = False
    done: bool = False
    #: Name -> compiler of the modules that the script compiled, which are compiled in place (models only).
    compilers: dict[str, Compiler] = field(default_factory=dict)
    #: Names of the trainable parameters before any stage (models only).
    trainable: frozenset[str] = frozenset()
    #: Names that shared one parameter before any stage.
    ties: list[list[str]] = field(default_factory=list)
    #: Old name -> new name, for parameters that a stage or a backend renamed or merged.
    renamed: dict[str, str] = field(default_factory=dict)

    def called(self, name: str) -> str:
        """Return the current name of a parameter by its old name."""
        return self.renamed.get(name, name)


@dataclass(eq=False)
class _Group:
    """One parameter group of an optimizer: its original parameters, and their current form."""

    optimizer: Any
    group: dict[str, Any]
    before: list[torch.Tensor]
    now: list[torch.Tensor]


@dataclass(eq=False)
class PreparePlan:
    """All objects of one `prepare` call, in order. A backend replaces values in place."""

    entries: list[Entry]
    unwrap: Callable[[Any], torch.nn.Module]
    #: Parameters that an earlier call replaced: old -> (prepared model, name).
    replaced: WeakIdKeyDictionary
    # By id and with weak references, so that a large model is not kept in memory twice.
    _before: dict[int, tuple[Entry, str, weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    _groups: list[_Group] = field(default_factory=list)

    def of_kind(self, kind: ObjectKind) -> Iterator[Entry]:
        """Iterate over the entries of one kind that are not prepared yet."""
        return (entry for entry in self.entries if entry.kind == kind and not entry.done)

    def values(self, kind: ObjectKind) -> list[Any]:
        """Return the objects of one kind that are not prepared yet, as they are now."""
        return [entry.value for entry in self.of_kind(kind)]

    def each(self, kind: ObjectKind, change: Callable[[Any, Entry], Any]) -> None:
        """Replace every object of a kind by what `change(object, entry)` returns."""
        for entry in self.of_kind(kind):
            entry.value = change(entry.value, entry)
            if entry.value is None:
                raise PrepareError(
                    f"Preparing a {type(entry.original).__name__} returned None. A hook that prepares a "
                    f"{kind} must return it."
                )

    def record(self, earlier: Iterable[Any] = ()) -> None:
        """Record the name of every parameter, before any stage.

        Args:
            earlier: optimizers from earlier calls, which may hold parameters of these models.
        """
        for entry in self.of_kind("model"):
            named = named_parameters(self.unwrap(entry.value))
            entry.trainable = frozenset(n for n, p in named.items() if p.requires_grad)
            by_parameter: dict[int, list[str]] = {}
            for name, parameter in named.items():
                by_parameter.setdefault(id(parameter), []).append(name)
                self._before.setdefault(id(parameter), (entry, name, weakref.ref(parameter)))
            entry.ties = [names for names in by_parameter.values() if len(names) > 1]
        given = self.values("optimizer")
        self._earlier = [one for one in earlier if not any(one is other for other in given)]
        for optimizer in [*given, *self._earlier]:
            for group in getattr(optimizer, "param_groups", ()):
                held = list(group["params"])
                self._groups.append(_Group(optimizer, group, held, held.copy()))

    def rename(self, model: Any, names: Mapping[str, str]) -> None:
        """Record new names of a model's parameters.

        Several parameters may become one, such as q, k and v in a fused qkv, if the optimizer treats
        them alike.

        Args:
            model: the model, as the plan holds it.
            names: old name -> new name.
        """
        self._entry_of(model).renamed.update(names)

    def _entry_of(self, model: Any) -> Entry:
        return next(one for one in self.of_kind("model") if one.value is model)

    def add(self, kind: ObjectKind, obj: Any) -> None:
        """Prepare an object that the script did not pass; `prepare` does not return it."""
        self.entries.append(Entry(kind, obj, obj))

    def drop(self, model: Any, names: Collection[str]) -> None:
        """Remove parameters that this rank does not keep, from the optimizers as well.

        Args:
            model: the model, as the plan holds it.
            names: names of the parameters before any stage.
        """
        entry = self._entry_of(model)
        entry.trainable -= frozenset(names)
        dropped = set()
        for key, (owner, name, reference) in list(self._before.items()):
            shared = next((tie for tie in entry.ties if name in tie), [name])
            kept = [one for one in shared if one not in names]
            if owner is entry and kept:
                self._before[key] = (entry, kept[0], reference)
            elif owner is entry:
                dropped.add(key)
        entry.ties = [[name for name in tie if name not in names] for tie in entry.ties]
        for one in self._groups:
            held = [pair for pair in zip(one.before, one.now) if id(pair[0]) not in dropped]
            one.before = [before for before, _ in held]
            one.now = [now for _, now in held]
            one.group["params"][:] = one.now

    def reconcile(self, earlier: Iterable[Any], *, tell: bool) -> None:
        """Restore ties, rebind the optimizers and verify, after models were changed.

        Args:
            earlier: the models of earlier calls.
            tell: whether to warn about trainable parameters that were never in an optimizer.
        """
        self._tie()
        self.rebind()
        self._verify(earlier, tell)

    def _tie(self) -> None:
        """Restore tied parameters that became separate ones."""
        for entry in self.of_kind("model"):
            model = self.unwrap(entry.value)
            now = named_parameters(model) if entry.ties else {}
            for names in entry.ties:
                there = [new for name in names if (new := entry.called(name)) in now]
                for name in there[1:]:
                    first = now[there[0]]
                    if now[name] is not first and now[name].shape == first.shape:
                        owner, _, leaf = name.rpartition(".")
                        setattr(model.get_submodule(owner), leaf, first)

    def rebind(self) -> None:
        """Point the optimizers at the models' current parameters, by name.

        Groups and hyperparameters stay, and so does the state of parameters that kept their shape.

        Raises:
            PrepareError: a parameter of an optimizer has no successor, or parameters with different
                hyperparameters became one.
        """
        now = {
            id(entry): named_parameters(self.unwrap(entry.value)) for entry in self.of_kind("model")
        }
        for entry, name, reference in self._before.values():
            new = now[id(entry)].get(entry.called(name))
            old = reference()
            if old is not None and new is not None and new is not old:
                self.replaced[old] = (entry.value, entry.called(name))
        placed: dict[tuple[int, int], dict[str, Any]] = {}
        for one in self._groups:
            state = getattr(one.optimizer, "state", {})
            mine = {}
            for index, (old, current) in enumerate(zip(one.before, one.now, strict=True)):
                held = self._successor(old, now)
                if held is None:
                    held = current
                elif held is not current and current in state and held.shape == current.shape:
                    state[held] = state.pop(current)
                one.now[index] = held
                other = placed.setdefault((id(one.optimizer), id(held)), one.group)
                self._check_alike(old, one.group, other)
                if other is one.group:
                    mine[id(held)] = held
            one.group["params"][:] = mine.values()

    def _check_alike(self, old: torch.Tensor, group: dict[str, Any], other: dict[str, Any]) -> None:
        """Refuse to merge parameters that the optimizer treats differently."""
        keys = [key for key in group if key != "params" and group[key] != other.get(key)]
        if group is not other and keys:
            entry, name, _ = self._before[id(old)]
            raise PrepareError(
                f"{name!r} and others were merged into {entry.called(name)!r}, but the optimizer has "
                f"different {', '.join(keys)} for them. Put them into one group."
            )

    def _successor(
        self, old: torch.Tensor, now: dict[int, dict[str, torch.nn.Parameter]]
    ) -> torch.Tensor | None:
        if id(old) in self._before:
            entry, name, _ = self._before[id(old)]
            name = entry.called(name)
            new = now[id(entry)].get(name)
        elif old in self.replaced:
            model, name = self.replaced[old]
            new = named_parameters(self.unwrap(model)).get(name)
        else:
            return None  # belongs to a model that was never prepared
        if new is None:
            raise PrepareError(
                f"An optimizer holds parameter {name!r}, but the prepared model has no parameter with that "
                "name anymore. A hook that replaces parameters must keep their names, or report new "
                "ones with plan.rename(model, {old: new})."
            )
        return new

    def _verify(self, earlier: Iterable[Any], tell: bool) -> None:
        """Verify that all trainable parameters will be trained.

        Raises:
            PrepareError: no optimizer holds a trainable parameter that a stage or the backend
                created, or an optimizer holds a parameter that its model lost.
        """
        held = {
            id(p)
            for o in [*self.values("optimizer"), *self._earlier]
            for g in getattr(o, "param_groups", ())
            for p in g["params"]
        }
        if not held:
            return
        models = [self.unwrap(model) for model in [*earlier, *self.values("model")]]
        current = {id(p) for model in models for p in model.parameters()}
        for one in self._groups:
            for old, new in zip(one.before, one.now, strict=True):
                if id(old) in self._before and id(new) not in current:
                    raise PrepareError(
                        f"The optimizer still holds the old parameter {self._before[id(old)][1]!r}, so "
                        "the prepared model would not be trained."
                    )
        for one in self.values("optimizer") if tell and self.values("model") else ():
            its = {id(p) for group in getattr(one, "param_groups", ()) for p in group["params"]}
            if its and not its & current:
                warn(
                    f"The {type(one).__name__} passed to prepare() holds no parameter of a prepared model, "
                    "so it trains none of them, and ranks do not share what it trains."
                )
        for entry in self.of_kind("model"):
            self._verify_model(entry, held, tell)

    def _verify_model(self, entry: Entry, held: set[int], tell: bool) -> None:
        model = self.unwrap(entry.value)
        missing = [
            name
            for name, parameter in plain_keys(model, dict(model.named_parameters())).items()
            if parameter.requires_grad and id(parameter) not in held
        ]
        held_before = {id(parameter) for one in self._groups for parameter in one.before}
        trainable = {entry.called(name) for name in entry.trainable}
        was_held = {
            entry.called(name)
            for key, (its, name, _) in self._before.items()
            if its is entry and key in held_before
        }
        if not missing or not was_held:
            return  # no optimizer held this model
        lost = [name for name in missing if name in was_held or name not in trainable]
        if lost:
            raise PrepareError(
                f"After prepare(), {len(lost)} trainable parameter(s) of {type(entry.original).__name__} "
                f"are in no optimizer and would never change: {', '.join(lost[:3])}. "
                "A stage replaced them without keeping their names, or a plugin replaced their optimizer."
            )
        if not tell:
            return
        warn(
            f"{len(missing)} trainable parameter(s) of {type(entry.original).__name__}, such as "
            f"{missing[0]!r}, are in no optimizer passed to prepare(). If they are frozen, call "
            "requires_grad_(False) on them.",
        )


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return all parameters by the name the user's own model gives them, tied ones by each name."""
    return plain_keys(model, dict(model.named_parameters(remove_duplicate=False)))

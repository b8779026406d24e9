"""What a step needs to go on: parameters, buffers, optimizer state and counters, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.session import Session
from commfuse_fx.checkpoints.damage import damage_told
from commfuse_fx.checkpoints.held import Held, Stored
from commfuse_fx.checkpoints.plain_values import is_plain, replaced
from commfuse_fx.checkpoints.state_differences import StateDifferences
from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.errors import CheckpointError
from commfuse_fx.runtime.memory.places import Place
from commfuse_fx.runtime.memory.shards import Shards
from commfuse_fx.runtime.memory.whole_states import states_in_parts
from commfuse_fx.support.logs import logger

log = logger("runtime")

Undo = Callable[[], None]


class StepState:
    """The state of a step is a dict with "model", "optimizer" and "step", the same for any number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, session: Session) -> None:
        self._model = model
        self._optimizer = optimizer
        self._session = session

    def full(self) -> dict[str, Any]:
        """The state with whole tensors. Where ranks divide parameters or states, all of them have to call this."""
        return self._state(dict(self._model.state_dict()))

    def held(self) -> dict[str, Any]:
        """The state with `Held` in place of tensors: parts of what is divided. No rank waits for another one."""
        places = self._places()
        shared = self._shared_by_ranks()
        known: dict[int, Held] = {}

        def held(path: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in known:
                is_part, is_own = id(value) in places, id(value) not in shared
                known[id(value)] = Held(*places[id(value)]) if is_part else Held.whole(value, path, is_own)
            return known[id(value)]

        with states_in_parts():
            state = self._state(dict(self._model.state_dict(keep_vars=True)))
        for group in state.get("optimizer", {}).get("param_groups", ()):
            for name in [name for name, value in group.items() if not is_plain(value)]:
                log.warning("a checkpoint leaves out %r of the optimizer's param_groups, which is no plain value", name)
                del group[name]
        with torch._C.DisableTorchFunctionSubclass():
            found: dict[str, Any] = replaced(state, held)
        return found

    def of_single_ranks(self) -> dict[str, str]:
        """The parameters and buffers that only one rank has, since the user divides the model: names by their paths in
        `held`."""
        mode = self._session.planner.config.parallel_mode
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {f"model/{name}": name for name, each in named if is_of_each_rank(each, mode)}

    def places_in(self, saved: Mapping[str, Any]) -> dict[str, Place]:
        """Where parts lie that this rank takes of stored tensors, by their names. Of others it takes all.

        saved: a state with `Stored` in place of tensors. Raises CheckpointError, which lists names and shapes, if it is
        the state of another model or optimizer.
        """
        differences = StateDifferences()
        differences.sections(saved, ("model", "step", *(("optimizer",) if self._optimizer is not None else ())))
        entries = self._entries()
        differences.names("parameter or buffer", saved["model"], [*entries, *self._others()])
        differences.shapes(saved["model"], entries)
        if self._optimizer is not None:
            differences.groups(saved["optimizer"], self._optimizer, self._names())
        differences.check()
        parts = self._places()
        found = {saved["model"][key].name: parts[id(each)][1] for key, each in entries.items() if id(each) in parts}
        for name, place in self._state_places().items():
            for state in saved["optimizer"]["state"].get(name, {}).values():
                if isinstance(state, Stored) and state.shape == place.whole and place.whole:
                    found[state.name] = place
        return found

    def put_by_methods(self, given: Mapping[str, Any]) -> Undo:
        """Give the optimizer its state, but for that of divided parameters, and the model what no tensor of it holds.

        given: a state that has passed `places_in`, with tensors. Returns what takes all of it back. Raises what methods
        of the user's classes raise; nothing has changed then.
        """
        optimizer = self._optimizer
        others = self._others()
        before = copy.deepcopy(others)
        held = {} if optimizer is None else {"state": optimizer.state, "param_groups": optimizer.param_groups}

        def undo() -> None:
            if optimizer is not None:
                optimizer.__dict__.update(held)
            if others:
                self._model.load_state_dict(before, strict=False)

        try:
            if others:
                self._model.load_state_dict({key: given["model"][key] for key in others}, strict=False)
            if optimizer is not None:
                self._put_optimizer(optimizer, given["optimizer"])
        except BaseException:
            undo()
            raise
        return undo

    def put(self, given: Mapping[str, Any]) -> None:
        """Write all the rest: values of parameters and buffers, and parts of optimizer states. It does not fail."""
        parts = self._places()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for key, target in self._entries().items():
                part = parts[id(target)][0] if id(target) in parts else target
                part.detach().copy_(given["model"][key])
        shards = self._shards()
        if shards is not None:
            shards.put_states(given["optimizer"]["state"])
        self._session.go_on(given["step"]["count"], given["step"].get("seed"))

    def _put_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        with states_in_parts():
            packed = optimizer.state_dict()
        numbers = self._numbers(packed)
        divided = self._state_places()
        states = {numbers.get(name, name): held for name, held in saved["state"].items() if name not in divided}
        groups = [
            {**mine, **group, "params": mine["params"]}
            for mine, group in zip(packed["param_groups"], saved["param_groups"], strict=True)
        ]
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        with damage_told("the optimizer's state") if is_torchs else nullcontext():
            optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})
        self._keep_types(optimizer, saved["state"])

    def _keep_types(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """`load_state_dict` casts states to the type of the parameter: those in higher precision would lose digits."""
        names = self._names()
        for param, state in optimizer.state.items():
            for name, value in saved.get(names.get(id(param), ""), {}).items():
                held = state.get(name)
                if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                    state[name] = value.to(held.device)

    def _state(self, model: dict[str, Any]) -> dict[str, Any]:
        if count := self._session.micro_batches.count:
            raise CheckpointError(
                f"{count} of {self._session.planner.config.accumulate_steps} micro-batches have added to gradients "
                "since the last update, and gradients are no part of the state: save after the update, or call "
                "step.drop_micro_batches() to forget them"
            )
        state: dict[str, Any] = {"model": model}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer_state(self._optimizer)
        state["step"] = {"count": self._session.steps, "seed": self._session.seed}
        return state

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """That of `optimizer.state_dict()`, with names of parameters in place of numbers."""
        packed = optimizer.state_dict()
        name_of = {number: name for name, number in self._numbers(packed).items()}
        return {
            **packed,
            "state": {name_of.get(number, number): state for number, state in packed["state"].items()},
            "param_groups": [
                {**group, "params": [name_of[number] for number in group["params"]]} for group in packed["param_groups"]
            ],
        }

    def _numbers(self, packed: Mapping[str, Any]) -> dict[str, int]:
        """The number of each parameter in `optimizer.state_dict()`, by its name."""
        assert self._optimizer is not None
        names = self._names()
        found: dict[str, int] = {}
        for group, numbered in zip(self._optimizer.param_groups, packed["param_groups"], strict=True):
            for param, number in zip(group["params"], numbered["params"], strict=True):
                found[names[id(param)]] = number
        return found

    def _names(self) -> dict[int, str]:
        """The name of each parameter, by its `id`; of one that is tied, the first name."""
        return {id(param): name for name, param in self._model.named_parameters()}

    def _entries(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers in the model's `state_dict()`."""
        own = self._own()
        return {key: each for key, each in self._model.state_dict(keep_vars=True).items() if id(each) in own}

    def _others(self) -> dict[str, Any]:
        """What else is there: extra state of modules, and what hooks have made."""
        own = self._own()
        return {key: each for key, each in self._model.state_dict(keep_vars=True).items() if id(each) not in own}

    def _own(self) -> set[int]:
        return {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}

    def _shared_by_ranks(self) -> set[int]:
        """The `id`s of tensors that all ranks have with the same values: parameters and their optimizer states.

        Each rank has its own buffers, and its own parameters where the user divides the model. Ranks may begin with any
        parameters: rank 0 may send its own in the first step, or they stay different.
        """
        voting = self._session.voting
        if self._session.agreement is not None and (voting.starts_differ or not voting.is_started):
            return set()
        single, divided = self.of_single_ranks().values(), self._state_places()
        found: set[int] = set()
        for name, param in self._model.named_parameters():
            if name not in single:
                found.add(id(param))
                if self._optimizer is not None and name not in divided:
                    found.update(map(id, self._optimizer.state.get(param, {}).values()))
        return found

    def _shards(self) -> Shards | None:
        """The divided parameters, while they are divided."""
        shards = self._session.runners.executors.shards
        return shards if shards is not None and shards.is_divided else None

    def _state_places(self) -> dict[str, Place]:
        shards = self._shards()
        return {} if shards is None else shards.state_places()

    def _places(self) -> dict[int, tuple[torch.Tensor, Place]]:
        shards = self._shards()
        return {} if shards is None else shards.places()

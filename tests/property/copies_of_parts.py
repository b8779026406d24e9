"""Actions that save or copy a model or parts of it: values, and that no more is kept than eager training keeps."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Mapping

import torch
from torch import nn

from tests.property.trainee import Named, Trainee


def deepcopy_model(trainee: Trainee, rng: random.Random) -> Named:
    copied = copy.deepcopy(trainee.model)
    values = {name: value.clone() for name, value in copied.state_dict().items()}
    trainee.copies.append((copied, values))
    return values


def save_part(trainee: Trainee, rng: random.Random) -> Named:
    """What a file of one part holds."""
    part = rng.choice([*trainee.model.parts, trainee.model.head])
    return _with_sizes(torch.load(_saved(part.state_dict())))


def save_tensors(trainee: Trainee, rng: random.Random) -> Named:
    """One file for each of some parameters."""
    found: Named = {}
    for name, param in trainee.parameters_of(rng)[:2]:
        found.update(_with_sizes({name: torch.load(_saved(param.detach()))}))
    return found


def save_whole(trainee: Trainee, rng: random.Random) -> Named:
    loaded = torch.load(_saved({"model": trainee.model.state_dict(), "optimizer": trainee.optimizer.state_dict()}))
    return dict(loaded["model"])


def pickle_part(trainee: Trainee, rng: random.Random) -> Named:
    for name, param in trainee.parameters_of(rng)[:1]:
        loaded = pickle.loads(pickle.dumps(param))
        assert isinstance(loaded, nn.Parameter) and loaded.requires_grad == param.requires_grad
        return _with_sizes({name: loaded.detach()})
    return {}


def deepcopy_parts(trainee: Trainee, rng: random.Random) -> Named:
    found = {name: copy.deepcopy(param).detach() for name, param in trainee.parameters_of(rng)[:2]}
    found["head"] = copy.deepcopy(trainee.model.head.weight.detach())
    return _with_sizes(found)


def _saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _with_sizes(tensors: Mapping[str, torch.Tensor]) -> Named:
    """The tensors, and the bytes that they hold; a name that ends in `#` is compared as an upper limit."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors.values()}
    return {**tensors, "bytes#": torch.tensor(sum(storages.values()))}


COPIES: Mapping[str, Callable[[Trainee, random.Random], Named]] = {
    "deepcopy_model": deepcopy_model,
    "save_part": save_part,
    "save_tensors": save_tensors,
    "save_whole": save_whole,
    "pickle_part": pickle_part,
    "deepcopy_parts": deepcopy_parts,
}

"""Start-up of the distributed world, and its time-out."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError, ConfigTypeError, ConfigValueError
from commfuse_fx.runtime.ranks.joining.rank_place import ENVIRONMENT, RankPlace
from commfuse_fx.runtime.ranks.joining.starts import store_of_this_start, store_outlives_ranks
from commfuse_fx.support.checks import show
from commfuse_fx.support.tracebacks import user_frames_only

_BACKENDS = '"gloo", or "nccl" where there are GPUs, or leave it out for the one that fits'
DEFAULT_TIMEOUT = timedelta(minutes=10)


@user_frames_only
def init(
    backend: str | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> None:
    """Join the world that torchrun started, or that the arguments name. Without both this is a world of one.

    It does nothing when torch.distributed is initialised already. After a restart by torchrun, ranks read nothing
    that an earlier start wrote into the store.

    backend: the backend of torch.distributed. None picks by device: Gloo on CPU; with CUDA, NCCL for GPU
        tensors and Gloo for CPU ones (each process then uses the GPU of its LOCAL_RANK).
    timeout: seconds, or a timedelta, after which a collective that some rank does not join is an error.
    rank, world_size: which rank this process is, and of how many. None: RANK and WORLD_SIZE of the environment.
    init_method: where ranks find each other: "tcp://HOST:PORT" of rank 0, or "file:///PATH" that all of them see.
        None: MASTER_ADDR and MASTER_PORT of the environment.

    Raises ConfigTypeError or ConfigValueError on bad arguments, and where nothing says which rank a process is that a
    launcher has started as one of several, or that is a child of multiprocessing. Raises CollectiveError if some rank
    does not come.
    """
    limit = _timeout(timeout)
    _check_backend(backend)
    place = RankPlace.given(rank, world_size, init_method)
    if not dist.is_available():
        return
    if dist.is_initialized():
        place.check_running(dist.get_rank(), dist.get_world_size())
        return
    cuda = torch.cuda.is_available()
    if cuda and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    chosen = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if place.is_alone:
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    try:
        _join(chosen, limit, place)
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"{place} {_not_joined(error, limit)} [{type(error).__name__}: {error}]") from error


def _not_joined(error: RuntimeError, limit: timedelta) -> str:
    if "EADDRINUSE" in str(error):
        return "cannot wait for the others, as its port is taken: choose another, and give each rank its own number."
    return (
        "could not join the others, which have not come within the time-out of "
        f"{limit.total_seconds():.0f} s or cannot be reached: look at the output of all ranks."
    )


def _join(backend: str, limit: timedelta, place: RankPlace) -> None:
    rank, size = place.rank, place.size
    if place.method != ENVIRONMENT or not store_outlives_ranks():
        dist.init_process_group(backend, place.method, limit, world_size=size, rank=rank)
        return
    store, rank, size = next(dist.rendezvous(ENVIRONMENT, rank, size, timeout=limit))
    store.set_timeout(limit)
    store = store_of_this_start(store, rank, size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def _check_backend(backend: object) -> None:
    if backend is None or not dist.is_available():
        return
    if not isinstance(backend, str):
        raise ConfigTypeError(f"backend is {show(backend)}; give a name such as {_BACKENDS}")
    for part in backend.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if not dist.is_backend_available(name) or (name == "nccl" and not torch.cuda.is_available()):
            raise ConfigValueError(f"backend is {show(backend)}, and {show(name)} is not there; give {_BACKENDS}")


def _timeout(timeout: float | timedelta) -> timedelta:
    if isinstance(timeout, timedelta):
        limit = timeout
    elif isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ConfigTypeError(f"timeout={timeout!r} must be a number of seconds or a datetime.timedelta")
    else:
        limit = timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ConfigValueError(f"timeout={timeout!r} must be positive")
    return limit


def world_timeout() -> timedelta:
    """The time-out of the running world. torch gives new groups its own default of 30 minutes instead."""
    world = dist.distributed_c10d._get_default_group()
    timeout: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout

"""Which rank a process is to be, of how many, and where it finds the others."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from urllib.parse import urlparse

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import check_int, show
from commfuse_fx.support.launchers import rank_variable, several_ranks

ENVIRONMENT = "env://"

_ARGUMENTS = "rank=, world_size= and init_method="


@dataclass(frozen=True)
class RankPlace:
    """A place in the world. rank, size: -1 where the environment says it. method: where ranks find each other."""

    rank: int = -1
    size: int = -1
    method: str = ENVIRONMENT
    is_given: bool = False

    @classmethod
    def given(cls, rank: object, world_size: object, init_method: object) -> RankPlace:
        """What the user has given to `init`. Raises ConfigTypeError or ConfigValueError."""
        if rank is None and world_size is None and init_method is None:
            return cls()
        found_rank, size = _number(rank, "rank", "RANK", 0), _number(world_size, "world_size", "WORLD_SIZE", 1)
        if found_rank >= size:
            raise ConfigValueError(f"rank is {found_rank} and world_size is {size}; give a rank in 0..{size - 1}")
        return cls(found_rank, size, ENVIRONMENT if init_method is None else _method(init_method), True)

    @property
    def is_alone(self) -> bool:
        """Whether this is a world of one that needs no others to be found.

        Raises ConfigValueError where nothing says which rank this process is, or where the others are.
        """
        is_listed = "MASTER_ADDR" in os.environ and ("RANK" in os.environ or self.is_given)
        if self.method != ENVIRONMENT:
            return False
        if is_listed:
            self._check_variables()
            return False
        if self.is_given:
            if self.size > 1:
                raise ConfigValueError(
                    f"world_size={self.size} without init_method, and without MASTER_ADDR in the environment: pass "
                    'init_method="tcp://HOST:PORT", with the host of rank 0 and a free port of it'
                )
            return True
        if said := several_ranks():
            raise ConfigValueError(
                f"{said}, but RANK and MASTER_ADDR are not in the environment: pass {_ARGUMENTS} to cf.init(), as in "
                f'rank=int(os.environ["{rank_variable()}"]) and init_method="tcp://HOST:29500" with the host of rank 0'
            )
        if multiprocessing.parent_process() is not None:
            raise ConfigValueError(
                "cf.init() in a child of multiprocessing, where nothing says which rank it is: pass "
                f'{_ARGUMENTS}, as in cf.init(rank=rank, world_size=2, init_method="tcp://127.0.0.1:29500"); '
                "cf.init(rank=0, world_size=1) is a world of one"
            )
        return True

    def _check_variables(self) -> None:
        """Raises ConfigValueError if a variable that the others are found by is missing or no number."""
        names = ("MASTER_PORT",) if self.is_given else ("RANK", "WORLD_SIZE", "MASTER_PORT")
        for name in names:
            text = os.environ.get(name)
            if text is None or not text.strip().isdecimal():
                raise ConfigValueError(
                    f"{name} {_as_found(text)}: set it to a number, as torchrun does, or pass {_ARGUMENTS}"
                )
        if not self.is_given and int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
            rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
            raise ConfigValueError(f"RANK is {rank} and WORLD_SIZE is {size} in the environment: ranks begin at 0")

    def check_running(self, rank: int, size: int) -> None:
        """Raises ConfigValueError if the world that runs is not the one that was asked for."""
        if self.is_given and (self.rank, self.size) != (rank, size):
            raise ConfigValueError(
                f"rank={self.rank} and world_size={self.size}, but this process is already rank {rank} of {size}: call "
                "cf.init() once, or torch.distributed.destroy_process_group() before"
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.method})" if self.is_given else "this rank"


def _number(value: object, name: str, variable: str, low: int) -> int:
    if value is not None:
        return check_int(value, name, low)
    text = os.environ.get(variable)
    if text is None or not text.strip().isdecimal():
        raise ConfigValueError(f"{name} is not given, and {variable} {_as_found(text)}: pass {_ARGUMENTS} together")
    return int(text)


def _as_found(text: str | None) -> str:
    return "is not in the environment" if text is None else f"is {show(text)} in the environment"


def _method(value: object) -> str:
    allowed = 'give "tcp://HOST:PORT", "file:///PATH" or "env://"'
    if not isinstance(value, str):
        raise ConfigTypeError(f"init_method is {show(value)}; {allowed}")
    try:
        found = urlparse(value)
        has_port = found.port is not None
    except ValueError:
        raise ConfigValueError(
            f"init_method is {show(value)}, whose port is no number up to 65535; {allowed}"
        ) from None
    is_whole = {"tcp": bool(found.hostname) and has_port, "file": bool(found.path), "env": not found.netloc}
    if not is_whole.get(found.scheme, False):
        raise ConfigValueError(f"init_method is {show(value)}; {allowed}")
    return value

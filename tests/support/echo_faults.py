"""Faults that an echo engine injects, so that tests can show what the other components survive.

A fault is written `NAME` or `NAME:key=value,key=value`:

    fail-step:at=20                 the 20th step raises; the engine exits with the cause
    slow-step:seconds=0.5,every=10  every tenth step takes 0.5 s longer
    fail-verb:verb=PAUSE,rank=1     rank 1 fails the next PAUSE (times=N: the next N)
    stall-verb:verb=SUSPEND,rank=2,seconds=30   rank 2 acknowledges the next SUSPEND late
    drop-heartbeats:after=5         heartbeats after the fifth are not sent (count=N: N of them)
    ignore-aborts                   aborted requests are generated to their end
    crash-on-token:token=666        a request whose prompt begins with token 666 ends the process with SIGSEGV
                                    (length=N: when prompt and answer have N tokens; signal=SIGKILL: with SIGKILL)
    lacks:capability=HIGH_TEMPERATURE   the backend does not declare this capability
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from megatron_runtime.protocol.headers import CONTROLS
from megatron_runtime.protocol.messages import Abort, Message
from megatron_runtime.requests.capabilities import Capability
from megatron_runtime.transport.peer_link import PeerLink


class InvalidFaultError(ValueError):
    """A fault is not valid. The text has the fault, the field and the remedy."""


class InjectedFaultError(RuntimeError):
    """Raised by an injected fault."""


class _Fault(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str


class FailStep(_Fault):
    name: Literal["fail-step"]
    at: int = Field(ge=1)


class SlowStep(_Fault):
    name: Literal["slow-step"]
    seconds: float = Field(gt=0)
    every: int = Field(default=1, ge=1)


class _VerbFault(_Fault):
    verb: Literal[*sorted(header.name for header in CONTROLS)]  # type: ignore[valid-type]
    rank: int = Field(default=0, ge=0)
    times: int = Field(default=1, ge=1)


class FailVerb(_VerbFault):
    name: Literal["fail-verb"]


class StallVerb(_VerbFault):
    name: Literal["stall-verb"]
    seconds: float = Field(default=3600.0, gt=0)


class DropHeartbeats(_Fault):
    name: Literal["drop-heartbeats"]
    after: int = Field(default=0, ge=0)
    count: int | None = Field(default=None, ge=1)


class IgnoreAborts(_Fault):
    name: Literal["ignore-aborts"]


class CrashOnToken(_Fault):
    """A request that ends every engine that runs it.

    token:  the first token of its prompt.
    length: tokens of prompt and answer at the crash.
    """

    name: Literal["crash-on-token"]
    token: int = Field(ge=0, lt=1 << 31)
    length: int = Field(default=1, ge=1)
    signal: Literal["SIGSEGV", "SIGKILL"] = "SIGSEGV"
    """SIGSEGV is raised by a null pointer, because process 1 of a container ignores signals that it sends itself."""


class Lacks(_Fault):
    name: Literal["lacks"]
    capability: Literal[*sorted(capability.name for capability in Capability)]  # type: ignore[valid-type]


Fault: TypeAlias = Annotated[
    FailStep | SlowStep | FailVerb | StallVerb | DropHeartbeats | IgnoreAborts | CrashOnToken | Lacks,
    Field(discriminator="name"),
]
_FAULT: TypeAdapter[Any] = TypeAdapter(Fault)
_T = TypeVar("_T", bound=_Fault)


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one engine."""

    all: tuple[Any, ...] = ()

    def of(self, kind: type[_T]) -> list[_T]:
        return [fault for fault in self.all if isinstance(fault, kind)]


def parse_faults(specs: Iterable[str]) -> Faults:
    """Parse faults in the format of this module's docstring. Raises InvalidFaultError."""
    return Faults(tuple(_parse(spec) for spec in specs))


def _parse(spec: str) -> Any:
    name, _, rest = spec.partition(":")
    fields: dict[str, Any] = {"name": name}
    for item in filter(None, rest.split(",")):
        key, separator, value = item.partition("=")
        if not separator or key in fields:
            raise InvalidFaultError(f"fault {spec!r}, {item!r}: want NAME:key=value,key=value, each key once")
        fields[key] = value
    try:
        return _FAULT.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidFaultError(f"fault {spec!r}, {where or 'name'}: {first['msg']}") from error


class FaultyLink(PeerLink):
    """A link that drops outgoing heartbeats or incoming aborts."""

    def __init__(self, *args: Any, faults: Faults, on_message: Callable[[Message], None], **kwargs: Any) -> None:
        super().__init__(*args, on_message=on_message, **kwargs)
        self._faults = faults
        self._beats = 0
        if faults.of(IgnoreAborts):
            self.on_message = lambda message: None if isinstance(message, Abort) else on_message(message)

    def beat(self) -> None:
        self._beats += 1
        for fault in self._faults.of(DropHeartbeats):
            dropped = self._beats - fault.after
            if dropped > 0 and (fault.count is None or dropped <= fault.count):
                return
        super().beat()

"""The addresses at which a peer tries to reach its coordinator, or either coordinator of a pair."""

from __future__ import annotations


def coordinator_address(where: int | str) -> str:
    """Return the ZeroMQ address of a coordinator.

    where: port number on this machine, "host:port" or "tcp://host:port".
    """
    if isinstance(where, int):
        return f"tcp://127.0.0.1:{where}"
    if "://" in where:
        return where
    host, separator, port = where.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"coordinator address {where!r}: want a port number, 'host:port' or 'tcp://host:port'")
    return f"tcp://{host}:{port}"


class CoordinatorAddresses:
    """The addresses of one coordinator or of a pair. `current` is the address in use, or the next address to try.

    addresses: `tcp://HOST:PORT` or `ipc://PATH` of each coordinator, in the order in which they are tried.
    learns:    whether learn() adds the address of the other coordinator of a pair. Both coordinators use the same port.
               If False, only `addresses` are used.
    """

    def __init__(self, *addresses: str, learns: bool = True) -> None:
        self.current = addresses[0]
        self._first = addresses[0]
        self._all = addresses
        self._learns = learns

    def __len__(self) -> int:
        return len(self._all)

    def move_on(self) -> None:
        """Select the next address as the current one."""
        self.current = self._all[(self._all.index(self.current) + 1) % len(self._all)]

    def learn(self, other: str | None) -> None:
        """Record the host of the other coordinator of a pair, which the current coordinator reports.

        other: host of the other coordinator; None if there is none.
        """
        if not self._learns:
            return
        others: tuple[str, ...] = ()
        if other:
            host = f"[{other}]" if ":" in other else other
            others = (f"tcp://{host}:{self.current.rpartition(':')[2]}",)
        self._all = tuple(dict.fromkeys((self._first, self.current, *others)))

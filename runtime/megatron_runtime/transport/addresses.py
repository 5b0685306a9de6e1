"""Where a peer looks for its coordinator: one address, or both addresses of a pair."""

from __future__ import annotations


class CoordinatorAddresses:
    """The addresses of one coordinator or of a pair. `current` is the address that is tried or in use.

    addresses: as for a Dealer; the first is tried first.
    learns:    a coordinator may name the host of the other one, which has the same port. False: there are no others.
    """

    def __init__(self, *addresses: str, learns: bool = True) -> None:
        self.current = addresses[0]
        self._first = addresses[0]
        self._all = addresses
        self._learns = learns

    def __len__(self) -> int:
        return len(self._all)

    def move_on(self) -> None:
        """Make the next address the current one."""
        self.current = self._all[(self._all.index(self.current) + 1) % len(self._all)]

    def learn(self, other: str | None) -> None:
        """Record the host of the other coordinator, which the current one reports. None: there is none."""
        if not self._learns:
            return
        others: tuple[str, ...] = ()
        if other:
            host = f"[{other}]" if ":" in other else other
            others = (f"tcp://{host}:{self.current.rpartition(':')[2]}",)
        self._all = tuple(dict.fromkeys((self._first, self.current, *others)))

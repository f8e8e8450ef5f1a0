"""Names -> things: one small class behind every list of choices."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from vicinal.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to things of one kind; a duplicate name raises, an unknown one lists the valid ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that files its argument under `name`."""

        def file(thing: T) -> T:
            if name in self._things:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._things[name] = thing
            return thing

        return file

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            raise UnknownNameError(self.kind, name, self._things)
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

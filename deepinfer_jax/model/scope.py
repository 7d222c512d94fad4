"""Where a module's weights come from: a function from released names to arrays, with a prefix."""

from collections.abc import Callable
from typing import Any


class Scope:
    """`scope("weight")` takes a tensor, `scope / "attn"` goes one name deeper."""

    def __init__(self, take: Callable[[str], Any], prefix: str = ""):
        self._take = take
        self._prefix = prefix

    def __call__(self, name: str) -> Any:
        """The tensor of this name under the prefix."""
        return self._take(self._prefix + name)

    def __truediv__(self, name: str) -> "Scope":
        """The scope of a child."""
        return Scope(self._take, f"{self._prefix}{name}.")

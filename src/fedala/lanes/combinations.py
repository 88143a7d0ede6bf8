"""Models that are sums of others, with shares that learn: Σ_j p_j·θ_j.

Large tables of words are never added up. A batch reads a few rows of them, and the rows of a sum
are the sum of the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

Read = Callable[[Tensor], Tensor]
"""What a batch reads of tables, [lane, row, …]. It is linear in them."""


class Combination(ABC):
    """In every lane, a model that is the sum of others."""

    @abstractmethod
    def compose(self, name: str) -> Tensor:
        """Return a parameter of the sum, [lane, …]."""

    @abstractmethod
    def find_slopes(self, name: str, gradient: Tensor) -> Tensor:
        """Return the shares' slopes, [lane, share], at the gradient of a parameter of the sum."""

    @abstractmethod
    def read(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        """Return what `read` gives of a table of the sum, and its derivatives, [share, lane, …]."""

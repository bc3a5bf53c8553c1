"""A counting allocator: the bytes of tensors that are alive."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors made within it that are alive, and their most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.is_entered = False  # for whoever enters it in a thread that is not its own
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # A result with an alias, a view or what was changed in place, is memory that was there.
        if any(returned.alias_info is not None for returned in function._schema.returns):
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self._known:
            return
        self._known.add(pointer)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, pointer, size)

    def _forget(self, pointer: int, size: int) -> None:
        self._known.discard(pointer)
        self.now -= size

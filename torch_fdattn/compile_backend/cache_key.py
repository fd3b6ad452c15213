"""What we are, in the keys of Inductor's and AOTAutograd's caches.

Those caches hold compiled forwards and backwards. They are found by the rewritten graph, which names our op
alone: were the op's backward to change, the old gradient would be served on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_fdattn.sources import hash_of
from torch_fdattn.version import __version__

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.options import Options


class CacheKey(CustomGraphPass):
    """A pass over the joint graph that does nothing (but run the user's own), and has an id."""

    def __init__(self, own: Options, users: object = None) -> None:
        self.own = tuple(own)
        self.users = users

    @classmethod
    def patch(cls, patches: dict[str, Any], own: Options) -> dict[str, Any]:
        users = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
        return {"joint_custom_pre_pass": cls(own, users)}

    def __call__(self, graph) -> None:
        for each in self._users():
            each(graph)

    def uuid(self) -> Any:
        ids = [each.uuid() if hasattr(each, "uuid") else None for each in self._users()]
        # A pass without an id forbids caching, ours or not.
        return None if None in ids else (source_hash(), __version__, self.own, *ids)

    def _users(self) -> tuple:
        if self.users is None:
            return ()
        return tuple(self.users) if isinstance(self.users, (list, tuple)) else (self.users,)


def source_hash() -> str:
    """Of every source that a compiled graph can have been made by."""
    return hash_of("ops", "dist", "compile_backend", "checks.py")

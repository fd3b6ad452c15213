"""What modules of the package keep between calls: each cache has its place in this list, and a reason."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torch_fdattn"
_MAKERS = {
    "dict", "list", "set", "defaultdict", "Counter", "OrderedDict", "deque", "WeakKeyDictionary", "WeakValueDictionary",
    "WeakSet",
}  # fmt: skip
_CACHES = {"cache", "lru_cache", "cached"}


def made_empty(node: ast.AST | None) -> bool:
    """Whether a value is an empty container, which somebody will fill."""
    if isinstance(node, ast.Dict):
        return not node.keys
    if isinstance(node, ast.List):
        return not node.elts
    if isinstance(node, ast.Call):
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        return name in _MAKERS and not node.args
    return False


def is_cached(function: ast.FunctionDef) -> bool:
    for decorator in function.decorator_list:
        decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = (
            decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
        )
        if name in _CACHES:
            return True
    return False


def kept(path: Path) -> list[str]:
    found = []
    body = ast.parse(path.read_text(encoding="utf-8")).body
    inside = [x for node in body if isinstance(node, ast.ClassDef) for x in node.body]
    for node in [*body, *inside]:
        targets, value = [], None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.value
        found += [x.id for x in targets if isinstance(x, ast.Name) and made_empty(value)]
        if isinstance(node, ast.FunctionDef) and is_cached(node):
            found.append(node.name)
    return found


ALLOWED = {
    "dist/ring_attention/transformers_layers.py": {"_checked": "modules whose positions were compared: a collective"},
    "dist/symm/channel.py": {"_channels": "symmetric memory, which only a collective makes"},
    "dist/symm/availability.py": {"_available": "whether a group's ranks share symmetric memory: a collective finds out"},
    "dist/symm/faults.py": {
        "_kept": "pinned words that kernels may still write to", "_registry": "what waits in vain left behind, for `check`",
    },
    "dist/tensor_parallel/fused_inference.py": {"_row_norm": "a module that imports triton"},
    "dist/groups.py": {
        "_ranks": "a group's rank and size, whose look-up costs more than a decode's other checks",
    },
    "dist/consensus.py": {
        "_compared": "what a group's ranks have compared: a collective",
        "_consensus": "what a group's ranks have answered: a collective",
        "_left": "which call this rank left by an exception, until the others have come to the next one",
    },
    "dist/ring_attention/local.py": {"_planned": "a function of shards and mask alone"},
    "dist/ring_attention/op.py": {"partition": "a function of shards alone"},
    "dist/symm/symmetric_memory.py": {"_workspaces": "symmetric memory, which only a collective makes"},
    "dist/symm/copies.py": {"_lanes": "streams and events of a device"},
    "dist/tensor_parallel/auto.py": {"table": "a file that is read once", "_cached_lookup": "a row of it, for these sizes"},
    "dist/tensor_parallel/one_sided.py": {"_module": "modules that import triton"},
    "dropins/continuous_batching.py": {"_takes": "which arguments a class of caches takes"},
    "dropins/flash_impl.py": {"fallbacks": "a count for users"},
    "dropins/model_kinds.py": {"_kind_of": "what a model's class is: its source is read"},
    "launch/device.py": {"num_sms": "of a device"},
    "launch/driver.py": {"loaded": "a library"},
    "launch/launches.py": {"_NOTHING": "a default that nobody writes to"},
    "launch/prepared.py": {"_calls": "prepared calls, by all that decides them"},
    "launch/tile_counter.py": {"_counters": "of streams: zeros between launches"},
    "models/encoding.py": {"special_texts": "a default that nobody writes to"},
    "models/chat_template.py": {"_compiled": "a template", "_environment": "jinja2's environment"},
    "ops/attention/configs.py": {"device_capability": "of a device"},
    "ops/attention/dispatch.py": {"_gpu": "of a device", "_rows": "rows of a table for a device"},
    "ops/attention/hopper/__init__.py": {"is_importable": "of the installed Triton"},
    "ops/attention/tuning.py": {"_memories": "what autotune found, by file", "_where": "a device with its software"},
    "ops/decode/schedule.py": {"fast_memory": "of a device"},
    "ops/determinism.py": {"_generators": "of seeds, which `set_deterministic` makes"},
    "ops/layout.py": {"_warn_once": "said once"},
    "ops/library.py": {"launches": "a count for tests", "register_dtensor_rules": "done once"},
    "tables/device.py": {"of": "of a device"},
    "tables/lookup.py": {"_digest": "of what was read once", "_record": "a file that is read once", "_shipped": "as _record"},
    "sources.py": {"hash_of": "of files that do not change"},
}  # fmt: skip


def test_every_cache_is_listed():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if names := kept(path):
            found[str(path.relative_to(PACKAGE))] = names
    unlisted = {
        path: [x for x in names if x not in ALLOWED.get(path, {})] for path, names in found.items()
    }
    assert not {path: names for path, names in unlisted.items() if names}
    gone = {
        path: [x for x in names if x not in found.get(path, [])] for path, names in ALLOWED.items()
    }
    assert not {path: names for path, names in gone.items() if names}, "listed, but no longer there"

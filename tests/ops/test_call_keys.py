"""The key by which a call is remembered holds all that decides what it does."""

import types

import pytest
import torch

import torch_fdattn  # noqa: F401
from torch_fdattn.launch import prepared
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.append_kv import op as append_op
from torch_fdattn.ops.attention import derivative_op
from torch_fdattn.ops.attention import op as attention_op
from torch_fdattn.ops.decode import op as decode_op
from torch_fdattn.ops.varlen_attention import op as varlen_op

F16, I32 = torch.float16, torch.int32
Q, K = torch.zeros(2, 4, 8, 32, dtype=F16), torch.zeros(2, 2, 8, 32, dtype=F16)
LSE = torch.zeros(2, 4, 8)
PACKED, KEYS, STARTS = (
    torch.zeros(8, 4, 32, dtype=F16),
    torch.zeros(8, 2, 32, dtype=F16),
    torch.zeros(3, dtype=I32),
)
ONE = torch.zeros(2, 4, 1, 32, dtype=F16)
PAGES, TABLE = torch.zeros(6, 2, 16, 32, dtype=F16), torch.zeros(2, 3, dtype=I32)
#: Arguments of each raw op by the names in its schema; the others are their defaults, or None.
OPS = {
    "attention_forward": (attention_op._forward, dict(q=Q, k=K, v=K)),
    "attention_backward": (derivative_op._backward, dict(dout=Q, q=Q, k=K, v=K, out=Q, lse=LSE)),
    "varlen_attention_forward": (varlen_op._forward, dict(q=PACKED, k=KEYS, v=KEYS, cu_seqlens_q=STARTS)),
    "varlen_attention_backward": (
        varlen_op._backward, dict(dout=PACKED, q=PACKED, k=KEYS, v=KEYS, out=PACKED, lse=LSE[0], cu_seqlens_q=STARTS)
    ),
    "decode_forward": (decode_op._raw(False)[0], dict(q=ONE, k_cache=K, v_cache=K)),
    "paged_decode_forward": (
        decode_op._raw(True)[0], dict(q=ONE, k_cache=PAGES, v_cache=PAGES, page_table=TABLE)
    ),
    "append_kv": (
        lambda k_cache, v_cache, *rest: append_op.append_eagerly(k_cache, v_cache, None, *rest),
        dict(k_cache=K, v_cache=K, k=K[:, :, :1], v=K[:, :, :1], kv_lens=STARTS[:2]),
    ),
    "paged_append_kv": (
        append_op.append_eagerly,
        dict(k_cache=PAGES, v_cache=PAGES, page_table=TABLE, k=K[:, :, :1], v=K[:, :, :1], kv_lens=STARTS[:2]),
    ),
}  # fmt: skip
NUMBERS = {"float": 0.5, "int": 0, "bool": False, "SymInt": 0}
OTHER_NUMBERS = {"float": 0.75, "int": 1, "bool": True, "SymInt": 1}


class Looked(Exception):
    """A key was asked for: it is the argument."""


def key_of(op: str, arguments: dict, monkeypatch) -> tuple:
    def checked(key):
        raise Looked(key)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(prepared, "checked", checked)
        with pytest.raises(Looked) as found:
            OPS[op][0](*arguments.values())
    return found.value.args[0]


def usual(op: str) -> dict:
    given, found = OPS[op][1], {}
    for x in getattr(torch.ops.fdattn, op).default._schema.arguments:
        found[x.name] = given.get(x.name, x.default_value)
        if found[x.name] is None and str(x.type) in NUMBERS:
            found[x.name] = NUMBERS[str(x.type)]
    return found


def others(kind: str, value: object) -> list:
    """Values that another call may have in this one's place."""
    if isinstance(value, torch.Tensor):
        wider = torch.zeros(*value.shape[:-1], 2 * value.shape[-1], dtype=value.dtype)
        found = [
            wider,
            wider[..., ::2],
            value.to(torch.bfloat16 if value.is_floating_point() else torch.int64),
        ]
        return [*found, value.to("meta")]
    if "Tensor" in kind:
        return [torch.zeros(4), torch.zeros(2, 4)]
    if "ScalarType" in kind or value is None:  # the dtype of results
        return [torch.float32]
    return [OTHER_NUMBERS[kind]]


@pytest.mark.parametrize("op", OPS)
def test_each_argument_is_in_the_key(op, monkeypatch):
    arguments = usual(op)
    key = key_of(op, arguments, monkeypatch)
    assert key is not None
    assert key == key_of(op, dict(arguments), monkeypatch)
    keys = {key}
    for x in getattr(torch.ops.fdattn, op).default._schema.arguments:
        for other in others(str(x.type), arguments[x.name]):
            found = key_of(op, arguments | {x.name: other}, monkeypatch)
            assert found not in keys, f"{x.name} {other!r} is not in the key"
            keys.add(found)


def test_ops_have_keys_of_their_own(monkeypatch):
    names = [key_of(op, usual(op), monkeypatch)[0] for op in OPS]
    assert len(set(names)) == len(OPS) - 2  # decode's and append_kv's hold whether there is a table


def launch(x=Q, y=K, descriptor=K, block=(1, 1, 8, 32), number=3, packed=None, **changed):
    """One that takes tensors by themselves, in a tuple, as descriptors and by name, and numbers among them."""
    descriptor = types.SimpleNamespace(
        base=descriptor, shape=[*descriptor.shape], strides=[*descriptor.stride()], block_shape=[*block],
        padding=changed.pop("padding", "zero"), layout=changed.pop("layout", "a"),
        round_f32_to_tf32=changed.pop("tf32", False),
    )  # fmt: skip
    kernel, grid = changed.pop("kernel", len), changed.pop("grid", 4)
    options = dict(FLAG=False, NAME="a", max_ctas_per_sm=2) | changed
    arguments = x, (0.5, y, None), x.stride(), descriptor, number, packed
    return Launch(kernel, grid, *arguments, also={"seed": STARTS}, **options)


def test_all_but_addresses_is_in_a_launchs_key():
    key, tensors = launch().signed()
    assert [id(x) for x in tensors] == [id(x) for x in (Q, K, K, STARTS)]
    others = launch(x=Q.clone(), y=K.clone(), descriptor=K.clone()).signed()
    assert others[0] == key
    assert not any(x is y for x, y in zip(others[1][:3], tensors, strict=False))
    changes = dict(
        x=Q.float(), y=K.float(), descriptor=K.float(), block=(1, 1, 4, 32), number=4, packed=0, FLAG=True, NAME="b",
        max_ctas_per_sm=3, MORE=1, kernel=max, grid=(4, 2, 1), padding="nan", layout="b", tf32=True,
    )  # fmt: skip
    found = [launch(**{name: value}).signed()[0] for name, value in changes.items()]
    found += [
        launch(x=x).signed()[0] for x in (Q[:, :, :, ::2], Q[:1, :1, :4].as_strided((2, 4, 8, 32), (0, 0, 0, 1)))
    ]  # fmt: skip
    found += [launch(packed=packed).signed()[0] for packed in ((), (None,), (Q,), (1, 2), "a")]
    found.append(launch(x=Q.to("meta")).signed()[0])
    assert len({key, *found}) == 1 + len(found)

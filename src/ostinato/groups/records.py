"""Records of a buffer of groups: an event as JSON and the elements of its tensors, in one piece of bytes.

The body of a record is the length of its JSON (uint32, little-endian), the JSON, and each tensor at a multiple of 8
bytes. The JSON is an object of `event` (what changed), `payload` (what users gave, as `durable.manifest.encode` writes
it) and `tensors` (dtype, shape and offset of each). Decoding makes plain data only and executes nothing.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
import xxhash
from torch import Tensor

from ostinato.durable.arrays import DTYPES, check_shape, dtype_name, host_view, is_raw, shape_nbytes
from ostinato.durable.files import damaged
from ostinato.durable.manifest import canonical, decode, encode, parse_first, parse_json
from ostinato.errors import KindError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LENGTH = struct.Struct("<I")
_EVENT = b'{"event":'
_ALIGNMENT = 8
PER_TOKEN = ("tokens", "mask", "logprobs")
"""Fields of a response that have one value for each token."""


class Payload(NamedTuple):
    """Values of users, ready to be written.

    Attributes:
        node: The values as JSON; tensors stand in it by their numbers.
        tensors: Dtype, shape and offset of each, as JSON.
        chunks: Their bytes and the padding between them.
        digest: XXH3-64 of all of it, in hexadecimal digits.
    """

    node: bytes
    tensors: bytes
    chunks: list[bytes | memoryview]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return len(self.node) + sum(map(len, self.chunks))

    @classmethod
    def of(cls, value: object, where: str) -> Payload:
        """Encode a value; `where` names it in messages.

        Raises:
            CheckpointError: It has a part of a type that cannot be saved; names the part.
        """
        tensors = _Tensors()
        node = canonical(encode(value, where=where, store=tensors.add, inline_bytes=0))
        described = canonical(tensors.described)
        digest = xxhash.xxh3_64(b"[%b,%b]" % (node, described))
        for chunk in tensors.chunks:
            digest.update(chunk)
        return cls(node, described, tensors.chunks, digest.hexdigest())


class _Tensors:
    """The tensors of a payload, one behind the other."""

    def __init__(self) -> None:
        self.described: list[list[Any]] = []
        self.chunks: list[bytes | memoryview] = []
        self._nbytes = 0

    def add(self, tensor: Tensor, _: str) -> str:
        """Add a tensor; return its number."""
        view = _bytes_of(tensor)
        padding = bytes(-view.nbytes % _ALIGNMENT)
        self.described.append([dtype_name(tensor.dtype), list(tensor.shape), self._nbytes])
        self.chunks += [view, padding]
        self._nbytes += view.nbytes + len(padding)
        return str(len(self.described) - 1)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor as bytes; a common one takes two calls of torch instead of ten."""
    try:
        return tensor.numpy().data.cast("B")
    except (RuntimeError, TypeError, ValueError):  # of a dtype, device or layout that NumPy has not, or empty
        return host_view(tensor)


def pack(event: dict[str, Any], payload: Payload | None = None) -> bytes:
    """Return the body of a record."""
    text = canonical({"event": event})
    if payload is not None:
        text = b'%b,"payload":%b,"tensors":%b}' % (text[:-1], payload.node, payload.tensors)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return b"".join((_LENGTH.pack(len(text)), text, *(payload.chunks if payload is not None else ())))


def _head_of(body: bytes | bytearray | memoryview, where: str) -> tuple[dict[str, Any], int]:
    """Return the JSON object of a body, and where its tensors begin."""
    length = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else 0
    head = parse_json(bytes(body[_LENGTH.size : _LENGTH.size + length]), where)
    if not isinstance(head, dict) or not isinstance(head.get("event"), dict):
        damaged(where, "not a record of groups")
    return head, _LENGTH.size + length


def event_of(body: bytes | bytearray | memoryview, where: str) -> dict[str, Any]:
    """Return the event of a record, with which its JSON begins; the rest is not parsed.

    Raises:
        DamagedFileError: The body is not one of a record; the message begins with `where`.
    """
    start = _LENGTH.size + len(_EVENT)
    if body[_LENGTH.size : start] != _EVENT:
        damaged(where, "not a record of groups")
    event = parse_first(bytes(body[start : _LENGTH.size + _LENGTH.unpack_from(body)[0]]), where)
    if not isinstance(event, dict):
        damaged(where, "not a record of groups")
    return event


def payload_of(body: bytearray | memoryview, where: str, index: int | None = None) -> Any:
    """Return the values of a record; its tensors are views of `body`, which can be written.

    Args:
        body: The bytes of the record.
        where: Its file and offset, for messages.
        index: Number of the item to decode, if the values are a list.

    Raises:
        DamagedFileError: A value is not as `Payload.of` writes it.
    """
    head, start = _head_of(body, where)

    def load(name: str) -> Tensor:
        try:
            of, shape, offset = head["tensors"][int(name)]
            dtype, shape = DTYPES[of], check_shape(shape)
            if shape is None or type(offset) is not int or offset < 0 or offset % _ALIGNMENT:
                raise ValueError
            count = shape_nbytes(shape, dtype)
            if start + offset + count > len(body):
                raise ValueError
        except (KeyError, IndexError, ValueError, TypeError):
            damaged(where, f"no tensor {name[:20]}")
        count //= dtype.itemsize
        return torch.frombuffer(body, dtype=dtype, count=count, offset=start + offset).view(shape)

    node = head.get("payload")
    if index is not None:
        if not isinstance(node, list) or type(index) is not int or not 0 <= index < len(node):
            damaged(where, f"no value {index}")
        node = node[index]
    return decode(node, where=where, load=load)


# -- values in memory -------------------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """Return a copy of a value, equal to what is decoded after it was encoded."""
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is dict:
        return {name: copied(item) for name, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    plain = kind is Tensor and value.layout is torch.strided and not torch.is_inference_mode_enabled()
    if plain and not value.requires_grad and is_raw(value):
        return value.clone()
    with torch.inference_mode(mode=False):  # a trainer needs plain tensors
        return payload_of(bytearray(pack({}, Payload.of(value, "a value"))), "a value")


_CONSTANT = frozenset({type(None), bool, int, float, str, bytes})


class Held(NamedTuple):
    """The prompt of a group and the parts of each response, all that were appended."""

    prompt: Any
    responses: dict[str, list[dict[str, Any]]]
    nbytes: list[int]
    """Of the records of each."""


@final
class Recent:
    """Values of groups that were not leased yet, in memory up to a number of bytes. The log has all of them."""

    def __init__(self, most_bytes: int) -> None:
        """Hold nothing."""
        self._left = most_bytes
        self._groups: dict[str, Held] = {}

    def __contains__(self, group: str) -> bool:
        """Whether a group is held."""
        return group in self._groups

    def admit(self, groups: Sequence[str], prompts: Sequence[Any], nbytes: int) -> None:
        """Hold groups, if there is room for the record of their prompts."""
        if nbytes <= self._left:
            self._left -= nbytes
            share = nbytes // len(groups)
            for group, prompt in zip(groups, prompts, strict=True):
                self._groups[group] = Held(copied(prompt), {}, [share])

    def append(self, group: str, response: str, fields: dict[str, Any] | None, nbytes: int) -> None:
        """Hold a part of a response; without its fields or room, the group is not held any more."""
        held = self._groups.get(group)
        if held is None:
            return
        if fields is None or nbytes > self._left:
            self.take(group)
            return
        self._left -= nbytes
        held.nbytes.append(nbytes)
        held.responses.setdefault(response, []).append(fields)

    def take(self, group: str) -> Held | None:
        """Return the values of a group, which belong to the caller then; None if they are not held."""
        held = self._groups.pop(group, None)
        if held is not None:
            self._left += sum(held.nbytes)
        return held


# -- responses --------------------------------------------------------------------------------------------------------


class Response(NamedTuple):
    """One response of a group.

    Attributes:
        id: Its id, unique in the group.
        fields: What was appended, the parts joined: `tokens` and whatever else was given.
        done: Whether its last part is there.
    """

    id: str
    fields: dict[str, Any]
    done: bool


class Group(NamedTuple):
    """One prompt and its responses, as read from the buffer.

    Attributes:
        id: Its id.
        prompt: What was admitted.
        size: How many responses it was to have.
        state: `waiting`, `running`, `ready`, `leased`, `trained` or `dropped`.
        responses: Those that are there, in the order in which they began. A leased group has the complete ones alone.
    """

    id: str
    prompt: Any
    size: int
    state: str
    responses: tuple[Response, ...]


class Lease(NamedTuple):
    """Groups that one consumer trains on.

    Attributes:
        id: Name of the lease, for `ack` and `release`.
        groups: The groups, in the order of the buffer.
        consumer: Name of the consumer.
        until: When it expires, in seconds of the buffer's clock.
    """

    id: str
    groups: tuple[Group, ...]
    consumer: str
    until: float


class Prepared(NamedTuple):
    """A checked response or part.

    Attributes:
        payload: Its values.
        fields: Its fields, whose tensors may be those of the caller.
        tokens: Number of its tokens.
        version: The oldest policy version in it; None if none was given.
        columns: Name, dtype and shape of an element of each tensor that continues from part to part.
    """

    payload: Payload
    fields: dict[str, Any]
    tokens: int
    version: int | None
    columns: tuple[str, ...]


def prepare(response: Mapping[str, Any]) -> Prepared:
    """Check the fields of a response, or of a part of one.

    Raises:
        KindError: It is not a mapping, or a field is not of its kind.
        SchemaError: `tokens` is missing, or sizes disagree.
        CheckpointError: A field has a type that cannot be saved.
    """
    if not hasattr(response, "keys") or not all(isinstance(name, str) for name in response):
        msg = f"a response is a dict with names of fields as keys, got {type(response).__name__}"
        raise KindError(msg)
    if "tokens" not in response:
        msg = f"a response needs the field 'tokens', got {', '.join(map(repr, response)) or 'no field'}"
        raise SchemaError(msg)
    fields = {name: _tensor(name, value) for name, value in response.items()}
    count = len(_row("tokens", fields["tokens"], None))
    for name in (*PER_TOKEN, *(name for name in ("reward", "version") if np.ndim(fields.get(name, 0)))):
        if name in fields:
            fields[name] = _row(name, fields[name], count)
    for name in ("tokens", "version"):
        if isinstance(fields.get(name), Tensor) and (fields[name].is_floating_point() or fields[name].is_complex()):
            msg = f"{name!r} are integers, got {fields[name].dtype}"
            raise KindError(msg)
    reward = fields.get("reward")
    if isinstance(reward, dict):
        fields["reward"] = {
            name: _row(f"reward {name}", value, count) if np.ndim(value) else value for name, value in reward.items()
        }
    columns = tuple(
        f"{name} {dtype_name(value.dtype)} {list(value.shape[1:])}"
        for name, value in sorted(fields.items())
        if isinstance(value, Tensor) and value.ndim and name != "version"
    )
    return Prepared(Payload.of(fields, "response"), fields, count, _oldest(fields.get("version")), columns)


def _oldest(version: Any) -> int | None:
    """Return the oldest of the versions of a response."""
    if version is None:
        return None
    if isinstance(version, Tensor):
        return int(version.min()) if version.numel() else None
    if isinstance(version, bool) or not hasattr(version, "__index__"):
        msg = f"'version' is the integer of a policy, or one for each token, got {version!r}"
        raise KindError(msg)
    return int(version)


def _tensor(name: str, value: Any) -> Any:
    """Return an array of numbers as a tensor, also a list where the field has one value for each token."""
    if isinstance(value, Tensor):
        return value
    listed = isinstance(value, list | tuple) and name in {*PER_TOKEN, "reward", "version"}
    if not listed and not isinstance(value, np.ndarray):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        if listed:
            msg = f"{name!r} holds numbers, got {str(value)[:60]}"
            raise KindError(msg)
        return value
    return torch.as_tensor(np.asarray(array if array.size else array.astype(np.int64)), device="cpu")


def _row(name: str, value: Any, count: int | None) -> Tensor:
    """Return the values of tokens as a tensor `[count]`."""
    value = _tensor("tokens", value)
    shape = list(np.shape(value))
    if not isinstance(value, Tensor) or len(shape) != 1 or count not in (None, shape[0]):
        expected = "[tokens]" if count is None else f"[{count}], as 'tokens' has"
        msg = f"{name!r} must have shape {expected}, got {shape} of type {type(value).__name__}"
        raise SchemaError(msg)
    return value


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the parts of a response.

    Tensors with a first dimension follow each other; versions that differ become one for each token; of other fields,
    later parts replace earlier ones.
    """
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if name == "version":
            joined[name] = _join_versions(parts)
        elif all(isinstance(value, Tensor) and value.ndim for value in values):
            joined[name] = torch.cat(values)
        else:
            joined[name] = values[-1]
    return joined


def _join_versions(parts: Sequence[dict[str, Any]]) -> Any:
    """Return the version of all parts, or one for each token, -1 where none was given."""
    versions = [part.get("version") for part in parts]
    if all(isinstance(version, int) and version == versions[0] for version in versions):
        return versions[0]
    spans = []
    for part, version in zip(parts, versions, strict=True):
        span = torch.full((len(part["tokens"]),), -1, dtype=torch.int64, device="cpu")
        if version is not None:
            span[:] = version
        spans.append(span)
    return torch.cat(spans)

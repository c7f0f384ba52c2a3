"""Arrays in objects: a JSON header and the bytes of the arrays, and nothing else.

    "cdsites1" | length of the header, 8 bytes, little endian | header | arrays

Numbers are little endian, arrays in C order, one behind the other. What is read must be
exactly what the reader expects, by shapes and dtypes of its own: nothing in a message
says how it is to be read, and nothing is unpickled. Of a large message the arrays lie
in objects of their own, which are written before it.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from curvadion_jax.sites._store import Store

FORMAT = 1
_MAGIC = b"cdsites1"
_LARGEST_HEADER = 2**24
_UID = re.compile("[0-9a-f]{32}")
# Bytes of arrays in one object; S3 takes 5 GiB in one request.
PART = 2**26


class RunError(RuntimeError):
    """This site cannot go on with the run; the others do."""


class Refused(RunError):
    """A message that is not what it should be; says why."""


def describe(arrays: Sequence[Any]) -> list[list[Any]]:
    """Dtypes and shapes, as a header has them."""
    return [[str(x.dtype), list(x.shape)] for x in arrays]


def write(
    store: Store,
    key: str,
    header: dict[str, Any],
    arrays: Sequence[np.ndarray],
) -> tuple[bool, dict[str, Any]]:
    """Creates a message; whether it was, and its header as it is in the store.

    The header gets "format", "uid" (if it has none), "arrays", "sha256" of the arrays
    and "parts", the number of their objects, 0 if they are in the message itself.
    """
    body = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)
    count = _parts(len(body))
    header = (
        {"uid": uuid.uuid4().hex}
        | header
        | {
            "format": FORMAT,
            "arrays": describe(arrays),
            "sha256": hashlib.sha256(body).hexdigest(),
            "parts": count,
        }
    )
    for index in range(count):
        piece = body[index * PART : (index + 1) * PART]
        store.create(part_key(key, header["uid"], index), piece)
    text = json.dumps(header).encode()
    start = _MAGIC + len(text).to_bytes(8, "little") + text
    created = store.create(key, start if count else start + body)
    if not created:  # perhaps by this very request, whose answer was lost
        found = store.get(key)
        created = found is not None and found.startswith(start)
    return created, header


def _parts(size: int) -> int:
    """Objects of so many bytes of arrays; 0 if they are in the message itself."""
    return -(-size // PART) if size > PART else 0


def part_key(key: str, uid: str, index: int) -> str:
    return f"parts/{key}/{uid}/{index:06d}"


def read(
    store: Store, key: str, kind: str, expected: Sequence[jax.ShapeDtypeStruct]
) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Header and arrays of a message; None if there is none.

    Raises:
      Refused: if it is not of this kind, shapes and dtypes, or damaged.
    """
    data = store.get(key)
    if data is None:
        return None
    header, body = split(data)
    check_header(header, kind)
    given, wanted = header["arrays"], describe(expected)
    if given != wanted:
        names = [f"{d}{s}" for d, s in given] if _well_formed(given) else given
        raise Refused(
            f"arrays of another shape or dtype: {str(names)[:200]} and not "
            f"{str([f'{d}{s}' for d, s in wanted])[:200]}"
        )
    size = sum(x.size * x.dtype.itemsize for x in expected)
    count = _parts(size)
    if header["parts"] != count:
        raise Refused(f"it has {header['parts']} parts, and not {count}")
    if count:
        keys = [part_key(key, header["uid"], index) for index in range(count)]
        pieces = [store.get(each) for each in keys]
        if any(piece is None for piece in pieces):  # collected since
            return None
        body = b"".join(pieces)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if len(body) != size:
        raise Refused(f"it has {len(body)} bytes of arrays, and not {size}")
    if hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise Refused("its bytes are not those that its digest is of")
    return header, _arrays(body, expected)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a message's bytes."""
    length = int.from_bytes(data[8:16], "little")
    if data[:8] != _MAGIC or not 0 < length <= min(_LARGEST_HEADER, len(data) - 16):
        raise Refused("it is no message of this format")
    header = as_object(data[16 : 16 + length])
    return header, data[16 + length :]


def as_object(data: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused("its header is no JSON") from error
    if not isinstance(found, dict):
        raise Refused("its header is no JSON object")
    return found


def check_format(header: dict[str, Any], what: str) -> None:
    number = header.get("format")
    if number != FORMAT:
        newer = isinstance(number, int) and number > FORMAT
        raise Refused(
            f"{what} is of format {number}, and this curvadion_jax reads {FORMAT}"
            + (": upgrade it" if newer else "")
        )


def check_header(header: dict[str, Any], kind: str) -> None:
    """Rejects another format, another kind, and fields of other types."""
    check_format(header, "it")
    if header.get("kind") != kind:
        raise Refused(f"it is a {header.get('kind')!r}, and no {kind}")
    fields = {"uid": str, "sha256": str, "parts": int, "arrays": list}
    for name, wanted in fields.items():
        if not isinstance(header.get(name), wanted):
            raise Refused(f"its {name} is {header.get(name)!r}")
    if not _UID.fullmatch(header["uid"]):  # it becomes a part of keys
        raise Refused("its uid is none")


def _well_formed(given: Any) -> bool:
    return all(isinstance(each, list) and len(each) == 2 for each in given)


def _arrays(body: bytes, expected: Sequence[Any]) -> list[np.ndarray]:
    found, first = [], 0
    for x in expected:
        last = first + x.size * x.dtype.itemsize
        found.append(np.frombuffer(body[first:last], x.dtype).reshape(x.shape))
        first = last
    return found

"""JPEG pictures stored as rows of bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from ostinato._optional import require
from ostinato.errors import DamagedFileError


def decode_jpegs(rows: Any, place: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode pictures.

    Args:
        rows: the bytes of each one, as arrays uint8 or `bytes`.
        place: file, field and first row, for errors.
        shape: shape of a picture, `(height, width)` or `(height, width, channels)`.

    Returns:
        uint8 `[rows, *shape]`.

    Raises:
        DamagedFileError: if a picture cannot be decoded, or has another shape.
    """
    image = require("PIL.Image", "minari")
    out = np.empty((len(rows), *shape), np.uint8)
    for position, row in enumerate(rows):
        content = row if isinstance(row, bytes) else np.asarray(row).tobytes()
        try:
            picture = np.asarray(image.open(io.BytesIO(content), formats=("JPEG",)))
        except (OSError, ValueError, SyntaxError) as error:
            msg = f"{place}: picture {position} cannot be decoded: {error}"
            raise DamagedFileError(msg) from error
        if picture.shape != shape:
            msg = f"{place}: picture {position} has the shape {list(picture.shape)}, the space says {list(shape)}"
            raise DamagedFileError(msg)
        out[position] = picture
    return out

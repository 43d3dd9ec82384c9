"""Pictures of a run as data URIs."""

from __future__ import annotations

import base64
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

LARGEST_RAW = 1_500_000
"""In bytes: a larger file is embedded smaller."""

WIDEST = 1800
"""In pixels: a wider picture is embedded at this width."""

KINDS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif"}
"""Formats that every browser shows, with their MIME subtypes."""


@dataclass(frozen=True)
class Picture:
    """An embedded picture: its data URI and its size in pixels."""

    uri: str
    width: int
    height: int


def embed(path: Path) -> Picture:
    """A picture file as a data URI, made smaller where it is large.

    Raises:
        ValueError: it is damaged, no picture, or of a size that is refused.
        OSError: it cannot be read.
    """
    from PIL import Image

    if not path.is_file():
        raise ValueError("it is not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()  # a cut-off file fails here
                kind, width, height = image.format, image.width, image.height
                if kind in KINDS and path.stat().st_size <= LARGEST_RAW and width <= WIDEST:
                    return Picture(_uri(KINDS[kind], path.read_bytes()), width, height)
                flat = Image.new("RGB", image.size, "white")
                layers = image.convert("RGBA")
                flat.paste(layers, mask=layers.getchannel("A"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError("it has too many pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise ValueError("it is damaged, or no picture") from error
    if flat.width > WIDEST:
        flat = flat.resize((WIDEST, max(1, round(flat.height * WIDEST / flat.width))))
    content = io.BytesIO()
    flat.save(content, "jpeg", quality=90)
    return Picture(_uri("jpeg", content.getvalue()), flat.width, flat.height)


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"

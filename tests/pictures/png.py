"""Small PNG files: with a palette, which is enough for a screen of text, and with the best compression."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from playwright.sync_api import Browser

COLOURS = 256
"""The maximum number of colours in a palette of PNG."""
DECODED = """
async (encoded) => {
    const image = new Image();
    image.src = `data:image/png;base64,${encoded}`;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height).getContext('2d');
    canvas.drawImage(image, 0, 0);
    const bytes = canvas.getImageData(0, 0, image.width, image.height).data;
    let text = '';
    for (let at = 0; at < bytes.length; at += 30000) text += String.fromCharCode(...bytes.subarray(at, at + 30000));
    return [image.width, image.height, btoa(text)];
}
"""
"""A script by which the browser decodes a PNG. It returns width, height, and the pixels in base64, four bytes each."""


def smaller(browser: Browser, image: bytes) -> bytes:
    """Return the same picture with a palette. A colour that is not in the palette becomes the nearest colour in it."""
    tab = browser.new_page()
    width, height, encoded = tab.evaluate(DECODED, base64.b64encode(image).decode())
    tab.close()
    palette, places = _reduced(np.frombuffer(base64.b64decode(encoded), "<u4") & 0xFFFFFF)
    rows = np.zeros((height, width + 1), np.uint8)
    # The first byte of a row names its filter: none, which is best for a palette.
    rows[:, 1:] = places.reshape(height, width)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", palette.tobytes()),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _reduced(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a palette, three bytes for each colour, and for each pixel the place of its colour in the palette."""
    known, places, counts = np.unique(pixels, return_inverse=True, return_counts=True)
    colours = known.view(np.uint8).reshape(-1, 4)[:, :3]
    colours = colours.astype(int)
    nearest = np.zeros(len(colours), np.uint8)
    distances = np.full(len(colours), 3 * 255**2)
    palette = []
    for number in range(min(COLOURS, len(colours))):
        # Add the colour that would look worst without an entry: it is far from the palette, and many pixels have it.
        palette.append(colours[(distances * counts).argmax()])
        from_it = ((colours - palette[-1]) ** 2).sum(axis=1)
        nearest[from_it < distances] = number
        distances = np.minimum(distances, from_it)
    return np.array(palette, np.uint8), nearest[places]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

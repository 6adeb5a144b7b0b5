"""A lens as a picture, and as a film of ten seconds in which the text fades behind the cursor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from halflife.analysis.look import HeadLens, Lens
from halflife.analysis.look.lens import Head
from halflife.files import atomic_path, write_text
from halflife.report.numbers import token_count
from halflife.report.style import COLOURS, INK, PAPER

COLUMNS, ROWS = 88, 12  # characters of a line, and lines of a text of which the last ones are shown
SIZE, WIDTH, HEIGHT, EDGE = 14, 8.43, 21, 16  # of the font, a character, a line and the margin, in pixels
SHARPNESS = 2  # pixels of a PNG for one of these
FRAMES, SECONDS = 100, 10
PICTURES, FILMS = (".png", ".svg"), (".webp", ".png", ".gif")
# Characters that no font draws, and some of which XML refuses.
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
SOFT, LEFT = "#59636e", COLOURS[5]


class Cell(NamedTuple):
    """A token, or a part of one, in the text."""

    token: int
    row: int
    column: int
    text: str


@dataclass(frozen=True)
class Scene:
    """Coloured boxes (x, y, width, height, fill, outline) and texts (x, baseline, words, colour) of one picture."""

    width: int
    height: int
    boxes: Sequence[tuple[float, float, float, float, str, str]]
    texts: Sequence[tuple[float, float, str, str]]


def drawable(text: str) -> str:
    """A text with dots in the place of control characters, and a space in that of a tab."""
    return CONTROLS.sub("·", text.replace("\t", " "))


def cells(tokens: Sequence[str], gaps: bool) -> list[Cell]:
    """Lay out tokens in lines of `COLUMNS`, with gaps between them where they are numbers."""
    placed, row, column = [], 0, 0
    for i, token in enumerate(tokens):
        parts = drawable(token).split("\n")
        for n, part in enumerate(parts):
            text = f"{part}↵" if n < len(parts) - 1 else part
            if column + len(text) > COLUMNS:
                row, column = row + 1, 0
            if text:
                placed.append(Cell(i, row, column, text[:COLUMNS]))
            column += len(text) + gaps
            if n < len(parts) - 1:
                row, column = row + 1, 0
    return placed


def scene(title: str, layout: Sequence[Cell], shown: Sequence[HeadLens], names: Sequence[str], at: int) -> Scene:
    """What is left of a text for some heads, at the cursor with index `at` of their cursors."""
    cursor = int(shown[0].cursors[at])
    last = max((cell.row for cell in layout if cell.token <= cursor), default=0)
    rows = min(ROWS, 1 + max(cell.row for cell in layout))
    first = max(0, last - rows + 1)
    boxes: list[tuple[float, float, float, float, str, str]] = []
    texts: list[tuple[float, float, str, str]] = [(EDGE, EDGE + SIZE, drawable(title), INK)]
    y = EDGE + 2.0 * HEIGHT
    for one, name in zip(shown, names, strict=True):
        life = token_count(one.head.half_life, one.head.beyond)
        texts.append((EDGE, y + SIZE, f"{name} head ({one.head}): half of a write is left after {life} tokens", SOFT))
        y += 1.25 * HEIGHT
        for cell in layout:
            if not first <= cell.row < first + rows:
                continue
            x, top = EDGE + cell.column * WIDTH, y + (cell.row - first) * HEIGHT
            fill = mixed(float(one.left.values[at, cell.token].clip(0, 1)))
            outline = COLOURS[0] if cell.token == cursor else ""
            boxes.append((x, top, len(cell.text) * WIDTH, HEIGHT - 2, fill, outline))
            texts.append((x, top + SIZE + 1, cell.text, INK if cell.token <= cursor else "#b5bcc4"))
        y += (rows + 0.5) * HEIGHT
    return Scene(round(2 * EDGE + COLUMNS * WIDTH), round(y), boxes, texts)


def mixed(share: float) -> str:
    """The colour of a share, between the paper and `LEFT`."""
    low, high = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (PAPER, LEFT))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(low, high, strict=True))


def svg(picture: Scene) -> str:
    """A scene as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{SIZE}" xml:space="preserve">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    for x, y, width, height, fill, outline in picture.boxes:
        line = f' stroke="{outline}" stroke-width="2"' if outline else ""
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}"{line}/>')
    for x, y, words, colour in picture.texts:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def pixels(picture: Scene, sharpness: int = SHARPNESS) -> Any:
    """A scene as an image of Pillow."""
    from matplotlib.font_manager import findfont
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(findfont("DejaVu Sans Mono"), SIZE * sharpness)
    image = Image.new("RGB", (picture.width * sharpness, picture.height * sharpness), PAPER)
    draw = ImageDraw.Draw(image)
    for x, y, width, height, fill, outline in picture.boxes:
        corners = [z * sharpness for z in (x, y, x + width, y + height)]
        draw.rectangle(corners, fill=fill, outline=outline or None, width=2 * sharpness)
    for x, y, words, colour in picture.texts:
        draw.text((x * sharpness, y * sharpness), words, fill=colour, font=font, anchor="ls")
    return image


def scenes(
    lens: Lens, tokens: Sequence[str], title: str, gaps: bool, heads: dict[Head, str], count: int
) -> Iterator[Scene]:
    """Yield what is left at `count` cursors, or at the last token if `count` is 1."""
    by_head = {one.head: one for one in lens.details(list(heads), max(2, count))}
    shown, layout = [by_head[head] for head in heads], cells(tokens, gaps)
    for at in range(len(shown[0].cursors)) if count > 1 else [len(shown[0].cursors) - 1]:
        yield scene(title, layout, shown, list(heads.values()), at)


def check_suffixes(picture: Path | None, film: Path | None) -> None:
    """Raise a ValueError if a file has another suffix than `PICTURES` and `FILMS`."""
    for path, suffixes in ((picture, PICTURES), (film, FILMS)):
        if path is not None and path.suffix not in suffixes:
            raise ValueError(f"{path} must end in {', '.join(suffixes)}")


def write_picture(picture: Scene, path: Path) -> None:
    """Write a scene as PNG or SVG."""
    check_suffixes(path, None)
    if path.suffix == ".svg":
        write_text(path, svg(picture))
        return
    with atomic_path(path) as temporary:
        pixels(picture).save(temporary, format="PNG", optimize=True)


def write_film(pictures: Iterator[Scene], path: Path) -> None:
    """Write scenes as an animation of ten seconds, which begins again."""
    check_suffixes(None, path)
    frames = [pixels(picture, 1) for picture in pictures]
    time = round(1000 * SECONDS / len(frames))
    with atomic_path(path) as temporary:
        frames[0].save(
            temporary, format={".webp": "WEBP", ".png": "PNG", ".gif": "GIF"}[path.suffix], save_all=True,
            append_images=frames[1:], duration=[time] * (len(frames) - 1) + [4 * time], loop=0,
        )  # fmt: skip

"""Draw the Mermaid diagrams of the pages as HTML when mkdocs builds the site.

GitHub draws Mermaid by itself. The site must work without a network, and mermaid.js is a download of 3 MB, so this hook
draws the one kind of diagram that the pages use: a chain of boxes, `name["first line<br>second line"] --> …`.
"""

import re

FENCE = re.compile(r"^```mermaid\nflowchart TB\n(.*?)^```$", re.M | re.S)
NODE = re.compile(r'\w+\["([^"]+)"\]')


def chain(code: str) -> str:
    """Return one box for each node of the chain, from top to bottom.

    Args:
        code: the lines after `flowchart TB`.

    Raises:
        ValueError: a line is not a node, or an arrow to a node.
    """
    for line in code.splitlines():
        if line.strip() and not re.fullmatch(rf"\s*(-->\s*)?{NODE.pattern}", line):
            raise ValueError(f"the site draws chains of boxes only, and cannot draw {line.strip()!r}")
    return "".join(f"<div>{label}</div>\n" for label in NODE.findall(code))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each diagram of a page; mkdocs calls this function."""
    return FENCE.sub(lambda match: f'<div class="chain">\n{chain(match[1])}</div>', markdown)

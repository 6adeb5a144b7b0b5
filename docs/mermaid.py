"""Draw the Mermaid diagrams of the pages as HTML when mkdocs builds the site.

GitHub draws Mermaid by itself. The site must work without a network, and mermaid.js is a download of 3 MB. So this hook
draws the one kind of diagram that the pages have: a chain of boxes, where each line adds the next box,
`last --> next["first line<br>second line"]`.
"""

import re

FENCE = re.compile(r"^```mermaid\nflowchart TB\n(.*?)^```$", re.M | re.S)
LABEL = r'\["([^"]+)"\]'
LINK = re.compile(rf"\s*(\w+)(?:{LABEL})? --> (\w+){LABEL}")


def chain(code: str) -> str:
    """Return one box for each node of the chain, from top to bottom.

    Args:
        code: the lines after `flowchart TB`.

    Raises:
        ValueError: a line does not continue the chain.
    """
    last, labels = None, []
    for line in code.splitlines():
        link = LINK.fullmatch(line)
        if link is None or last not in (None, link[1]):
            raise ValueError(f"the site draws chains of boxes only, and cannot draw {line.strip()!r}")
        labels += [label for label in (link[2], link[4]) if label]
        last = link[3]
    return "".join(f"<div>{label}</div>\n" for label in labels)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each diagram of a page; mkdocs calls this function."""
    return FENCE.sub(lambda match: f'<div class="chain">\n{chain(match[1])}</div>', markdown)

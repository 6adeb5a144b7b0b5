"""Order what the site's search finds: pages that answer a question, then other pages, then the API.

The words of a question stand in the name of many functions. mkdocs calls `on_page_markdown` for each page, and the
search plugin of Material reads the boost.
"""

from typing import Any

BOOSTS = {"api/": 0.2, "results/overview.md": 5.0, "how-to/": 2.0}


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Set the boost of a page."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    return markdown

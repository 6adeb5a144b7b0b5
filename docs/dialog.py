"""Gives the dialog of the search a name, which the theme leaves out and screen readers say."""

from typing import Any

NAMELESS = 'data-md-component="search" role="dialog"'


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog of a page."""
    return output.replace(NAMELESS, f'{NAMELESS} aria-label="Search"')

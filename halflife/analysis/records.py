"""The base class of results: frozen dataclasses that turn into the plain data of the JSON files."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Record:
    """A result. Its subclasses document their fields, with units and shapes."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists and numbers. An optional field (default None) without a value is omitted.

        Numbers that are not finite stay as they are, see `halflife.files.finite`.
        """
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: _plain(x) for field, x in values if x is not None or field.default is MISSING}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

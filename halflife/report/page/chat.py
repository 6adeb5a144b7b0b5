"""The pages of a server: one to talk to its model, and the memory lens on what is typed. They ask no other server."""

from __future__ import annotations

from pathlib import Path

from halflife.report.page.embed import page
from halflife.report.page.look import look_page

HERE = Path(__file__).parent
ASK = (HERE / "ask.js").read_text(encoding="utf-8")
KEY = '<label>API key <input id="key" type="password" autocomplete="off"></label>\n'
ANSWERS = "The model answers. Enter sends a message, and Shift and Enter begin a new line."
CONTINUES = "The model continues the text, because its tokenizer has no template for chats. Ctrl and Enter go on."
TYPED = """<p class="hint"><a href="/">Talk to the model</a></p>
<label class="typed">Text <textarea id="typed" rows="4" autofocus></textarea></label>
{key}<p id="said" class="said" role="status"></p>
"""


def chat_page(name: str, *, chat: bool, key: bool, most: int) -> str:
    """The HTML of the page to talk to a model, which answers messages (`chat`) or continues a text.

    `key` says whether the server asks for a key, and `most` is the most tokens that it writes at once.
    """
    script = '"use strict";\n' + ASK + (HERE / "chat.js").read_text(encoding="utf-8")
    words = {"label": "Message", "send": "Send", "rows": 3, "summary": ANSWERS} if chat else {
        "label": "Text", "send": "Continue", "rows": 14, "summary": CONTINUES,
    }  # fmt: skip
    data = {"model": name, "chat": chat}
    return page("chat", name, script, data, connect=True, most=most, key=KEY if key else "", **words)


def live_page(name: str, *, key: bool) -> str:
    """The HTML of the memory lens on a text that is typed; the arguments are those of `chat_page`."""
    script = ASK + (HERE / "live.js").read_text(encoding="utf-8")
    return look_page(
        f"Memory lens: {name}", None, above=TYPED.format(key=KEY if key else ""), script=script, connect=True
    )

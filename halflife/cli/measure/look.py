"""`halflife look`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from halflife.analysis.readable import Progress
    from halflife.report.look import Look as Lens

TOKENS = 512  # of a text


@dataclass(frozen=True)
class Look:
    """Look at a text through a model's memory: one page on which the text itself is the picture.

    The page shows, for every position of a cursor, how much of each token's write is left in the state, with which
    weight the token at the cursor reads each earlier token, where a token is read later, and what was lost to decay,
    to resets and to tokens that overwrote it. It needs no network.

    Without --text, a model of `halflife compare` reads a sequence of its task. The page then marks the pairs that it
    recalls, with the probability of the right answer.

    examples:
      halflife look runs/20260101-120000-mqar-smoke
      halflife look my-checkpoint --text book.txt --tokens 1024 --output look.html
      halflife look me/my-model --text a.txt b.txt --heads 0.3 2.1
    """

    folder: Positional[str]
    """A checkpoint (ours, or one that `halflife convert` converts), a run that contains some, or a name on the hub,
    owner/name or owner/name@revision."""
    text: tuple[Path, ...] = ()
    """Files to read, each as a document. A file that ends in .gz is unpacked."""
    tokens: int | None = None
    """Most tokens of the text, by default 512, or the length of the task's sequence, by default that of the run."""
    model: str | None = None
    """The model of a run with several, by its name or label. Default: the first one."""
    heads: tuple[str, ...] = ()
    """Heads whose numbers must be on the page, as layer.head, from 0. Default: the slowest, the median and the fastest
    head, then the slowest of each layer, until the page is full."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer of transformers. Default: the one beside the model, or bytes."""
    output: Path | None = None
    """The page to write. Default: look.html in the folder, or look-<owner>--<name>.html for the hub."""
    picture: Path | None = None
    """Also write a picture of the slowest, the median and the fastest head at the last token, .png or .svg."""
    film: Path | None = None
    """Also write a film of ten seconds in which the cursor moves across the text, .webp, .png or .gif."""
    device: str | None = None
    """Device of the model. Default: the GPU if there is one, else the CPU."""
    open: bool = False
    """Open the page in a browser, at a terminal of a desktop. The variable HALFLIFE_OPEN=0 prevents it."""
    quiet: bool = False
    """Do not draw a progress bar."""

    def run(self) -> None:
        from halflife.analysis.look.foreign import has_readings
        from halflife.cli.options import default_device, open_page, progress_bar
        from halflife.extras import require
        from halflife.models.load import checkpoints, without_diverged
        from halflife.registry import check_choice
        from halflife.report.tables.look import look_table
        from halflife.training.start import local_folder

        if self.tokens is not None and self.tokens < 2:
            raise ValueError(f"a lens needs 2 tokens or more; got --tokens {self.tokens}")
        if self.picture or self.film:
            require("--picture and --film", "matplotlib", "PIL")
            from halflife.report.look_picture import check_suffixes

            check_suffixes(self.picture, self.film)
        root = local_folder(self.folder)
        found = without_diverged(checkpoints([root], has_readings))
        label = _best_label(root, self.model, found) if self.model else next(iter(found))
        check_choice("model", label, found)
        name = "look.html" if root == Path(self.folder) else f"look-{self.folder.replace('/', '--')}.html"
        output = self.output or (root / name if root == Path(self.folder) else Path(name))
        with progress_bar("layers and heads", show=not self.quiet) as progress:
            lens = lens_of(
                found[label], label, self.text, self.tokens, self.tokenizer, default_device(self.device), progress
            )
            chosen = [lens.find(*_numbers(name)) for name in self.heads]
            lens.save(output, chosen, progress)
        print(look_table(lens).terminal())
        if len(found) > 1 and self.model is None:
            print(f"This is {label}. Others, with --model: {', '.join(other for other in found if other != label)}.")
        if self.picture is not None:
            print(f"written: {lens.picture(self.picture)}")
        if self.film is not None:
            print(f"written: {lens.film(self.film)}")
        print(f"written: {output}")
        if self.open:
            open_page(output)


def lens_of(
    folder: Path, label: str, text: Sequence[Path], tokens: int | None, tokenizer_name: str | None, device: str,
    progress: Progress,
) -> Lens:  # fmt: skip
    """The lens of the model in a folder on a text, or without one on a sequence of the task that it was trained on."""
    from halflife.analysis.look.foreign import load_for_lens
    from halflife.cli.checkpoint import load_tokenizer
    from halflife.data import tokenizers
    from halflife.report.look import look, read_task, read_text

    model = load_for_lens(folder, device)
    if not text:
        ids, pairs, task = read_task(model, folder, tokens)
        return look(model, ids, title=f"{label} reads a sequence of {task}", pairs=pairs, progress=progress)
    size = model.config.vocab_size
    own = load_tokenizer(folder, size) if tokenizer_name is None else tokenizers.load_tokenizer(tokenizer_name, size)
    ids, documents = read_text(text, own, tokens or TOKENS)
    title = f"{label} reads {text[0].name}"
    return look(model, ids, documents=documents, tokenizer=own, title=title, progress=progress)


def _best_label(root: Path, model: str, found: Mapping[str, Path]) -> str:
    """The label of a model, or where it was trained several times, that of its first seed at the selected rate."""
    labels = [label for label in found if label.startswith(f"{model} ")]
    from halflife.runs.folder import RESULTS_CSV, read

    if model in found or not labels or not (root / RESULTS_CSV).is_file():
        return model
    chosen = {(one.learning_rate, one.seed) for one in read(root).scores if one.model == model and one.selected}
    names = {f"lr{rate:g}-seed{seed}" for rate, seed in sorted(chosen)[:1]}
    return next((label for label in labels if found[label].name in names), labels[0])


def _numbers(name: str) -> tuple[int, int]:
    """`"2.1"` → layer 2, head 1."""
    layer, dot, head = name.partition(".")
    if not (dot and layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"--heads takes layer.head, as 2.1; got {name!r}")
    return int(layer), int(head)

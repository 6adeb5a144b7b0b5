"""`halflife push`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from halflife.cli.options import say


@dataclass(frozen=True)
class Push:
    """Upload a trained model to the Hugging Face Hub, as a private repository unless --public is given.

    Uploaded are the model, its tokenizer, the model card (README.md), figures/, metrics.jsonl and result.json. The rest
    of a run's folder stays here: checkpoints, settings with names of your files, samples and reports with pieces of
    your text, files of trackers. `hf auth login` logs in, or HF_TOKEN holds a token.

    examples:
      halflife push my-model me/my-model --dry-run
      halflife push my-model me/my-model
      halflife push my-model my-lab/my-model --public
    """

    folder: Positional[Path]
    """The folder of a finished `halflife train`, of one run of a comparison, or of another model."""
    name: Positional[str]
    """owner/name of the repository. It is created if needed. One that exists stays private or public."""
    public: bool = False
    """Create a public repository, which everybody can read."""
    dry_run: bool = False
    """List the files and their sizes, and what stays here; connect to nothing."""

    def run(self) -> None:
        from halflife.runs.share import check_name, divide_files, push

        check_name(self.name)
        shared, others = divide_files(self.folder)
        sizes = {name: (self.folder / name).stat().st_size for name in shared}
        width = max(map(len, sizes))
        for name, size in sizes.items():
            say(f"{name:{width}}  {size:>15,} bytes")
        say(f"{'in all':{width}}  {sum(sizes.values()):>15,} bytes in {len(sizes)} files")
        if others:
            say(f"not uploaded: {', '.join(others)}")
        if "README.md" not in sizes:
            say("this folder has no model card; the Hub shows README.md, which `halflife train` writes")
        visible = "public" if self.public else "private"
        if self.dry_run:
            say(f"nothing was uploaded; without --dry-run these files go to {self.name}, {visible} if it is new")
        else:
            say(f"uploaded to {push(self.folder, self.name, shared, private=not self.public)}")

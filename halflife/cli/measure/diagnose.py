"""`halflife diagnose`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

LENGTH = 256  # tokens of a sequence of a task, in which something is forgotten


@dataclass(frozen=True)
class Diagnose:
    """Say in words how trained models forget, and why: their spectrum, a forecast and their memory on one page.

    It begins with what each model allows, whichever library wrote it, and leaves out what it does not. A lens shows
    what each model keeps of the text, or of a sequence of its task. Without a text the spectrum is that at zero input,
    and models of text have no forecast. Files: report.html, look-<model>.html, decays.json and forecast.json.

    examples:
      halflife diagnose runs/20260101-120000-mqar-smoke
      halflife diagnose my-model --text book.txt
      halflife diagnose mamba2-130m-hf --text book.txt --longest 4
    """

    folders: Positional[tuple[Path, ...]]
    """Runs, checkpoints, models of transformers, or their names on the hub."""
    text: tuple[Path, ...] = ()
    """Files that the models read, one after the other."""
    length: int = 2048
    """Tokens in a sequence of the text, for the spectrum."""
    longest: int = 32
    """Longest lag of the forecast, in training lengths."""
    output: Path | None = None
    """Folder for the results. Default: diagnosis/ in the first folder."""
    device: str | None = None
    """Device of the models. Default: the GPU if there is one, else the CPU."""
    quiet: bool = False
    """Do not draw a progress bar."""

    def run(self) -> None:
        from halflife.analysis.diagnosis import diagnose, what_is_allowed
        from halflife.cli.options import command_line, default_device
        from halflife.cli.spectrum import default_output
        from halflife.files import writable, write_text
        from halflife.report.page.model_spectrum import write_spectrum_page
        from halflife.report.tables import diagnosis
        from halflife.report.tables.forecast import write_forecasts
        from halflife.report.tables.spectrum import write_tables

        device = default_device(self.device)
        allowed = what_is_allowed(self.folders, device)
        print("\n".join(diagnosis.allowed_lines(allowed)), flush=True)
        output = self.output or default_output(self.folders, "diagnosis")
        with writable(output):
            found = diagnose(
                self.folders, self.text, longest=self.longest, length=self.length, device=device, show=not self.quiet
            )
        pages, seen = self._look(output, device)
        findings = [*diagnosis.findings(allowed, found), *seen]
        print("\n".join(["", *findings]))
        files = pages if isinstance(found["forecast"], str) else [*pages, *write_forecasts(found["forecast"], output)]
        if isinstance(found["spectrum"], str):
            files.append(output / "diagnosis.txt")
            write_text(files[-1], "".join(f"{line}\n" for line in findings))
        else:
            files += write_tables(found["spectrum"], output)
            files.append(write_spectrum_page(found["spectrum"], output, command_line(), findings))
        print(f"written to {output}: {', '.join(file.name for file in files)}")

    def _look(self, output: Path, device: str) -> tuple[list[Path], list[str]]:
        """Write the page of each model's lens, and return the pages and a sentence for each model."""
        from halflife.analysis.survey import find_models
        from halflife.cli.measure.look import lens_of
        from halflife.cli.options import progress_bar
        from halflife.report.tables.look import look_sentence
        from halflife.training.start import local_folder

        pages, said, tokens = [], [], None if self.text else LENGTH
        with progress_bar("layers and heads", show=not self.quiet) as progress:
            for label, folder in find_models(self.folders).items():
                try:
                    lens = lens_of(local_folder(str(folder)), label, self.text, tokens, None, device, progress)
                except (FileNotFoundError, ValueError) as error:
                    said.append(f"{label}: there is no lens: {error}.")
                    continue
                pages.append(lens.save(output / f"look-{re.sub('[^A-Za-z0-9_.+-]+', '-', label)}.html"))
                said.append(look_sentence(label, lens))
        return pages, said

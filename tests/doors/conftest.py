"""Counts what works at each door."""

from collections import Counter
from pathlib import Path


def pytest_terminal_summary(terminalreporter, config):
    """Print works ÷ tried a file, where only tests of this folder were asked for."""
    if not all(Path(name.split("::")[0]).resolve().is_relative_to(Path(__file__).parent) for name in config.args):
        return
    tried, works = Counter(), Counter()
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            door = Path(report.nodeid.split("::")[0]).stem.removeprefix("test_")
            tried[door] += 1
            works[door] += outcome == "passed"
    terminalreporter.section("doors: works / tried")
    for door in sorted(tried):
        terminalreporter.line(f"{door:20} {works[door]:5} / {tried[door]}")
    terminalreporter.line(f"{'all':20} {works.total():5} / {tried.total()}")

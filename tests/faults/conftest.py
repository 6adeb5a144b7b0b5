"""Counts the faults that were survived, for the last line of `make faults`."""


def pytest_terminal_summary(terminalreporter):
    survived, lost = (len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed"))
    terminalreporter.write_line(f"survived ÷ tried: {survived} ÷ {survived + lost}")

"""The numbers of a server in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from halflife.serve.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Answers:
    """What the server has answered: how often each status, and the seconds until answers were complete."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: float = 0.0
    left: int = 0  # clients that went away before their answer was complete

    def add(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.statuses[path, status] += 1
        self.seconds += seconds


def text(engine: Engine, answers: Answers, sessions: int, session_bytes: int) -> str:
    """Return all numbers."""
    counts = engine.counts
    rows = [
        ("counter", "prompt_tokens_total", "Tokens of prompts that the model read.", counts.prompt_tokens),
        ("counter", "reused_tokens_total", "Tokens of prompts that a stored state stood for.", counts.reused_tokens),
        ("counter", "written_tokens_total", "Tokens that the model wrote.", counts.written_tokens),
        ("counter", "steps_total", "Batched steps of one token.", counts.steps),
        ("counter", "jobs_total", "Prompts that were begun.", counts.jobs),
        ("counter", "jobs_cancelled_total", "Jobs whose clients went away.", counts.cancelled),
        ("counter", "jobs_failed_total", "Jobs that ended with an error.", counts.failed),
        ("counter", "first_token_seconds_sum", "Seconds until the first token, summed.", counts.first_token_seconds),
        ("counter", "first_token_seconds_count", "Continuations that have a first token.", counts.first_tokens),
        ("counter", "clients_left_total", "Clients that left before the end.", answers.left),
        ("gauge", "rows_active", "Rows that are being read or written.", engine.active),
        ("gauge", "rows_limit", "Most rows at one time.", engine.max_rows),
        ("gauge", "jobs_waiting", "Jobs that wait for a row.", engine.waiting),
        ("gauge", "prefix_states", "Stored states of prompts.", len(engine.prefixes)),
        ("gauge", "prefix_bytes", "Bytes of the stored states of prompts.", engine.prefixes.bytes),
        ("gauge", "sessions", "Open sessions.", sessions),
        ("gauge", "session_bytes", "Bytes of the states of sessions.", session_bytes),
        ("counter", "request_seconds_sum", "Seconds until answers were complete, summed.", answers.seconds),
        ("counter", "request_seconds_count", "Answers.", sum(answers.statuses.values())),
    ]
    lines = []
    for kind, name, about, value in rows:
        lines += [f"# HELP halflife_{name} {about}", f"# TYPE halflife_{name} {kind}", f"halflife_{name} {value}"]
    lines += ["# HELP halflife_requests_total Answers by path and status.", "# TYPE halflife_requests_total counter"]
    for (path, status), count in sorted(answers.statuses.items()):
        lines.append(f'halflife_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"

"""The faults of the campaign. A new fault is one line of `TABLE`.

A row is (fault, where, expected):

- fault: a function of `actions.py`, which spoils something;
- where: its argument, a file of a run or a moment;
- expected: "same numbers" (the run goes on to the numbers of an undisturbed one, to the bit), "same result" (the same
  weights and the same `result.json`; `metrics.jsonl` may have lost lines, of which a warning tells), or a regular
  expression for the error, which must be one of `ACCEPTED`. Alternatives of the form "A or B" are allowed.
"""

EVENTS = 110  # file-system events of a run; `fault_campaign.py` measures that there are no more

NEWEST, OLDER = "checkpoints/checkpoint-8", "checkpoints/checkpoint-4"
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "window.json",
         "run.json", "complete.json", "training_args.bin")  # fmt: skip

EVENTS_OF_COMPARISON = 215  # the same for a comparison of two models

SPOIL = ("flip", "cut", "empty", "garbage", "remove")

SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")

TABLE = [
    # Killed at any moment that touches a file.
    *(("kill", event, "same numbers") for event in range(EVENTS)),
    # Killed anywhere else: at a share of the time that a run takes, three times in a row.
    *(("moment", share / 100, "same numbers") for share in range(8, 100, 8)),
    *(("kill of compare", event, "same numbers") for event in range(0, EVENTS_OF_COMPARISON, 10)),
    # Two processes that hold shards are killed after a checkpoint, and one process goes on.
    ("kill of fsdp", 1, "same result"),
    # A checkpoint that is damaged, in any file and way.
    *((how, f"{NEWEST}/{name}", "same numbers") for how in SPOIL for name in FILES),
    *((how, f"{NEWEST}+{OLDER}/{name}", "same numbers") for how in SPOIL for name in ("optimizer.pt", "complete.json")),
    ("remove_tree", NEWEST, "same numbers"),
    ("remove_tree", "checkpoints", "same numbers"),
    ("file_instead", NEWEST, "same numbers"),
    ("file_instead", "checkpoints", "checkpoints"),
    ("future", "", "same numbers"),
    ("past", "", "same numbers"),
    ("extra", f"{NEWEST}/shards/00001.safetensors", "same numbers"),
    ("extra", "checkpoints/.partial/checkpoint-12/optimizer.pt", "same numbers"),
    ("extra", "checkpoints/checkpoint-notes/complete.json", "same numbers"),
    ("extra", ".model.safetensors.1.tmp", "same numbers"),
    ("remarked", f"{NEWEST}/optimizer.pt", "same numbers"),
    ("remarked", f"{NEWEST}/model.safetensors", "same numbers"),
    # The other files of an interrupted run.
    *((how, "metrics.jsonl", "same result") for how in SPOIL),
    ("half_line", "metrics.jsonl", "same numbers"),
    *((how, "run.json", r"run\.json or same numbers") for how in SPOIL),
    ("edit", "run.json", "learning_rate"),
    ("file_instead", "metrics.jsonl", "same result"),
    # The machine refuses: then the run goes on.
    *(("small_files", size, "same numbers") for size in (1_000, 10_000, 30_000)),
    *(("signal", (name, step), "same numbers") for name in SIGNALS for step in (1, 6, 12)),
    # Content that is read again later.
    *((how, "model.safetensors", r"model\.safetensors") for how in ("flip", "cut", "empty", "garbage", "remove")),
    *((how, "session", "session or same state") for how in ("flip", "cut", "empty", "garbage")),
    *((how, "tokens", "same tokens") for how in ("flip", "cut", "empty", "garbage", "remove")),
]  # fmt: skip

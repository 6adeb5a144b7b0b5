"""Commands of Slurm for tests: `install(folder)` writes sbatch, srun, sacct and scancel. Jobs run on this machine.

A job is a process group whose number is in `<folder>/<job>.pid`. `sbatch` keeps the submitted files as `<job>.sh`.
"""

import os
import sys
from pathlib import Path

SBATCH = """#!{python}
import os, subprocess, sys
from pathlib import Path
place = Path({folder!r})
number = str(100 + len(list(place.glob("*.sh"))))
script = place / f"{{number}}.sh"  # as in Slurm, a copy: submitit moves its file away as soon as this command ends
script.write_text(Path(sys.argv[1]).read_text())
environment = {{**os.environ, "SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}}
with open(os.devnull, "w") as nothing:
    job = subprocess.Popen(
        ["bash", str(script)], env=environment, start_new_session=True, stdout=nothing, stderr=nothing, stdin=nothing
    )
(place / f"{{number}}.pid").write_text(str(job.pid))
print("Submitted batch job", number)
"""
SRUN = """#!{python}
import os, sys, time
from pathlib import Path
at = sys.argv.index("-u") - 1  # the python of the command, after srun's options
job = os.environ["SLURM_JOB_ID"]
work = Path(sys.argv[-1].replace("%j", job), f"{{job}}_submitted.pkl")
while not work.exists():  # submitit moves it there once `sbatch` has ended, long before Slurm starts a job
    time.sleep(0.01)
log = os.open(sys.argv[3].replace("%j", job).replace("%t", "0"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
os.execv(sys.argv[at], sys.argv[at:])
"""
SACCT = """#!{python}
import os
from pathlib import Path
print("JobID|State|NodeList")
for file in Path({folder!r}).glob("*.pid"):
    try:
        state = Path("/proc", file.read_text(), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "Z"
    print(f"{{file.stem}}|{{'COMPLETED' if state == 'Z' else 'RUNNING'}}|here")
"""
SCANCEL = """#!{python}
import os, signal, sys
from pathlib import Path
os.killpg(int((Path({folder!r}) / f"{{sys.argv[1]}}.pid").read_text()), signal.SIGTERM)
"""


def install(folder: Path) -> None:
    """Write the commands into `folder`, which must stand first in PATH."""
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT), ("scancel", SCANCEL)):
        (folder / name).write_text(text.format(python=sys.executable, folder=str(folder)))
        os.chmod(folder / name, 0o755)

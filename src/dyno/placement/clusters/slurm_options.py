"""What `--on slurm=…` says: how many jobs, of which kind."""

from __future__ import annotations

from dataclasses import dataclass, field

from dyno.worker.spec import UserError, check_known

EXAMPLE = "--on slurm=4,partition=gpu,time=60"
# Options of sbatch that are handed on as they are.
OF_SBATCH = (
    "partition", "account", "qos", "constraint", "gres", "mem", "cpus-per-task", "nodelist", "exclude", "reservation",
)  # fmt: skip
MINUTES = {"time": 240, "wait": 10}  # that a job may last; and that is waited for others once one has started
CLUSTERS = ("slurm", "local")


@dataclass(frozen=True)
class SlurmRequest:
    """How many jobs of Slurm, or of this host; minutes by name, and sbatch's options."""

    jobs: int = 1
    cluster: str = CLUSTERS[0]
    minutes: dict[str, int] = field(default_factory=lambda: dict(MINUTES))
    sbatch: dict[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        return self.cluster == "local"


def parse(spec: str) -> SlurmRequest:
    """Parse the words after `slurm=`, e.g. `4,partition=gpu`; raise `UserError`, one line, for invalid ones."""
    items = [item.strip() for item in spec.split(",")] if spec.strip() else []
    jobs = items.pop(0) if items and "=" not in items[0] else "1"
    if not (jobs.isascii() and jobs.isdecimal() and int(jobs)):
        raise UserError(f"--on slurm needs a whole number of jobs of at least 1, not {jobs!r}; write e.g. {EXAMPLE}")
    given: dict[str, str] = {}
    for item in items:
        name, _, value = (part.strip() for part in item.partition("="))
        if not value:
            raise UserError(f"{item!r} of --on slurm is not NAME=VALUE; write e.g. {EXAMPLE}")
        check_known("option of --on slurm", name, ("cluster", *MINUTES, *OF_SBATCH))
        if name in given:
            raise UserError(f"{name} is given twice for --on slurm; give it once")
        given[name] = value
    cluster = given.pop("cluster", CLUSTERS[0])
    check_known("cluster of --on slurm", cluster, CLUSTERS)
    minutes = {name: _parse_minutes(name, given.pop(name, str(usual))) for name, usual in MINUTES.items()}
    if given and cluster == "local":
        raise UserError(f"cluster=local runs the jobs on this host, where {', '.join(given)} has no meaning; omit it")
    return SlurmRequest(int(jobs), cluster, minutes, given)


def _parse_minutes(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise UserError(f"{name} of --on slurm must be a whole number of minutes, not {value!r}")
    return int(value)

"""The small job that writes a study's page when its runs have ended: slurm.submit --page.

No run knows that it is the last one, so this job depends on all of them (afterany).
"""

import os
import shlex
from pathlib import Path
from urllib.parse import quote as percent_encode

from parallel.config.study import Study
from slurm.render import cluster_of

TIME = "00:10:00"  # a page of 500 runs takes under a minute


def script(study: Study, logs: Path) -> str:
    """The script: one task without a GPU in the partition of the runs."""
    cluster = cluster_of(study)
    options = [
        f"--job-name={percent_encode(os.fsencode(study.name))}-page",
        *(
            f"--{name}={value}"
            for name in ("account", "partition", "qos", "constraint")
            if (value := getattr(cluster, name))
        ),
        "--ntasks=1",
        f"--time={TIME}",
        "--output=%x-%j.out",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            *cluster.setup,
            f"python=${{PYTHON:-{shlex.quote(cluster.python)}}}",
            f'exec "$python" -m analysis.page {shlex.quote(str(logs / study.name))}',
            "",
        ]
    )

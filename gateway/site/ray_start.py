"""`ray start` as a site wants it: its head process is kept, and the Ray Client server is left out.

The keeper starts a killed `gcs_server` again, which reads what it knew from its storage (see `ray_head`); raylet and workers
wait for it. The Ray Client server is a process, and a port that runs code for its callers, which nothing here uses; Ray has no
option to leave it out, but does so where the client's dependencies are missing, which is what it is told here.
Run as `python -m gateway.site.ray_start start --head …`.
"""

from __future__ import annotations

import sys
from typing import Any

from ray._private import ray_constants, services
from ray.scripts import scripts

from gateway.site import keeper

_start_process = services.start_ray_process


def _start_kept(command: list[str], process_type: str, **options: Any) -> Any:
    if process_type == ray_constants.PROCESS_TYPE_GCS_SERVER:
        # The server writes into files of its own; what the keeper says goes where this process writes.
        command = [sys.executable, "-I", keeper.__file__, *command]
        options |= {"stdout_file": None, "stderr_file": None}
    return _start_process(command, process_type, **options)


def main() -> None:
    setattr(services, "start_ray_process", _start_kept)  # noqa: B010 - not a name that Ray exports
    setattr(scripts, "get_ray_client_dependency_error", lambda: "not wanted")  # noqa: B010 - not a name that Ray exports
    sys.argv[0] = "ray"
    scripts.main()


if __name__ == "__main__":
    main()

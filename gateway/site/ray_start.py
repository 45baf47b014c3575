"""`ray start` without the Ray Client server: a process, and a port that runs code for its callers, which nothing here uses.

Ray has no option to leave it out; it does so where the client's dependencies are missing, which is what it is told here.
Run as `python -m gateway.site.ray_start start --head …`.
"""

from __future__ import annotations

import sys

from ray.scripts import scripts


def main() -> None:
    setattr(scripts, "get_ray_client_dependency_error", lambda: "not wanted")  # noqa: B010 - not a name that Ray exports
    sys.argv[0] = "ray"
    scripts.main()


if __name__ == "__main__":
    main()

"""What can go wrong with the dev cluster, apart from Slurm itself.

::

    SlurmError
    └── DevClusterError            a part of it did not start, or belongs to somebody else
        └── DevClusterUnavailable  this machine cannot carry one at all
"""

from __future__ import annotations

from storage.errors import SlurmError


class DevClusterError(SlurmError):
    """The dev cluster could not be brought up, changed or taken down."""


class DevClusterUnavailable(DevClusterError):
    """No dev cluster can run here: not root, no namespaces, no cgroups or missing packages."""

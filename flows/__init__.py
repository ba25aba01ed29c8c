"""What runs, in which order: Prefect flows, deployments, the command line.

Prefect loads a flow with its folder on the path only until it is imported; the modules that a flow
imports later must be found, too, and before any other of their names.
"""

from headrace import application_folder, put_first

put_first(application_folder())

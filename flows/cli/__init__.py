"""The `headrace` command, one module a group of commands."""

"""Bytes that outlive a job: object store, ledger, checkpoints, retention, shards."""

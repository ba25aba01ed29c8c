"""What a good node measures."""

from __future__ import annotations

from slurm.health.registry import Value

GOOD: dict[str, Value] = {
    "cores": 8,
    "memory": 64.0,
    "kernel": "6.1.0",
    "python": "3.11.2",
    "torch": "2.13.0",
    "gpus": 0,
    "memory_copy": 5.0,
    "matmul": 40.0,
    "matmul_correct": True,
    "disk_write": 500.0,
    "disk_read": 900.0,
    "scratch_free": 100.0,
    "store": 12.0,
    "clock": 0.3,
}

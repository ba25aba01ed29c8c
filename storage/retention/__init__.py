"""Which checkpoints stay, and how the others leave."""

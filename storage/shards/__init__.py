"""From raw documents to token shards, and from shards to a proven order of samples."""

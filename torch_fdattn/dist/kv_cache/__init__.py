"""KV caches whose positions a process group may share."""

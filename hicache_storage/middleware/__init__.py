"""What goes round a backend: wrappers that observe it, and backends around a backend."""

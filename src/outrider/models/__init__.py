"""Models by name: the catalog of aliases, fetching, converting GGUF files, loading; and the small models of our own."""

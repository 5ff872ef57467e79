"""Where objects are kept: directories of files, on disk or in host memory (tmpfs)."""

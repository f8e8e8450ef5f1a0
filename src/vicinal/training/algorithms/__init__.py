"""Training algorithms, one file each."""

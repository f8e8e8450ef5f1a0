"""Test-time methods, one file each."""
